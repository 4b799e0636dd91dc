"""MLP with TrainState and SGD with momentum; widths that eight devices do not divide."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.base import Case, Family, probe


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.relu(nn.Dense(36)(x))  # 36 = 4 * 9
        return nn.Dense(10)(x)


def make(with_grads=False):
    model, note = MLP(), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, 24)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    def batch(rng):
        kx, ky = jax.random.split(rng)
        return {"x": jax.random.normal(kx, (16, 24)), "label": jax.random.randint(ky, (16,), 0, 10)}

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family("mlp", make, "sgd with momentum", "TrainState; widths 36 and 10")
