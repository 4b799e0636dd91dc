"""ViT: patches by a strided convolution, a class token (17 positions), Flax's own attention module, Lion."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.base import Case, Family, probe


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, h)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(h)))


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (4, 4), strides=(4, 4), name="patches")(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = self.param("class_token", nn.initializers.zeros, (1, 1, x.shape[-1]))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], x.shape[2]))
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(10, name="head")(nn.LayerNorm()(x)[:, 0])


def make(with_grads=False):
    model, note = ViT(), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, 16, 16, 3)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.lion(3e-4, weight_decay=0.1))

    def batch(rng):
        kx, ky = jax.random.split(rng)
        return {"image": jax.random.normal(kx, (16, 16, 16, 3)), "label": jax.random.randint(ky, (16,), 0, 10)}

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family("vit", make, "lion", "17 positions; MultiHeadDotProductAttention")
