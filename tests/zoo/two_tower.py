"""Two towers and a contrastive loss (CLIP, arXiv:2103.00020): every example is compared with every other one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.base import Case, Family, probe

ROWS = 16


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(20)(nn.gelu(nn.Dense(48)(x)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class TwoTower(nn.Module):
    @nn.compact
    def __call__(self, image, words):
        text = nn.Embed(70, 16)(words).mean(axis=1)
        scale = self.param("scale", nn.initializers.constant(2.0), ())
        return jnp.exp(scale) * Tower(name="image")(image) @ Tower(name="text")(text).T


def make(with_grads=False):
    model, note = TwoTower(), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((2, 28)), jnp.zeros((2, 6), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.lion(1e-3))

    def batch(rng):
        ki, kw = jax.random.split(rng)
        return {"image": jax.random.normal(ki, (ROWS, 28)), "words": jax.random.randint(kw, (ROWS, 6), 0, 70)}

    def step(state, batch):
        def loss_fn(params):
            scores = state.apply_fn({"params": params}, batch["image"], batch["words"])
            same = jnp.arange(scores.shape[0])
            both = [optax.softmax_cross_entropy_with_integer_labels(s, same).mean() for s in (scores, scores.T)]
            return (both[0] + both[1]) / 2

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family("two_tower_contrastive", make, "lion", "a loss across the batch; a scalar parameter")
