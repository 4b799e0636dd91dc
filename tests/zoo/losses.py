"""Two losses that are no plain mean: a sum over examples; a mean over tokens that count, accumulated by MultiSteps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.base import Case, Family, probe, tokens


class Regression(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.tanh(nn.Dense(44)(x)))


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(60, 24)(ids)
        around = nn.Conv(32, (3,))(x)
        return nn.Dense(60)(nn.LayerNorm()(nn.gelu(around)))


def make_sum(with_grads=False):
    model, note = Regression(), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, 20)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-3))

    def batch(rng):
        x = jax.random.normal(rng, (24, 20))
        return {"x": x, "y": jnp.sin(x[:, :3])}

    def step(state, batch):
        def loss_fn(params):
            error = state.apply_fn({"params": params}, batch["x"]) - batch["y"]
            return jnp.sum(error**2) + 1e-2 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss}, grads)

    return Case(step, init, batch)


def make_weighted(with_grads=False):
    model, note = Tagger(), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, 16), jnp.int32))["params"]
        tx = optax.MultiSteps(optax.adamw(5e-3), every_k_schedule=2, accumulator_dtype=jnp.result_type(float))
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def batch(rng):
        k_ids, k_length = jax.random.split(rng)
        length = jax.random.randint(k_length, (16, 1), 3, 17)
        return {**tokens(k_ids, 16, 16, 60), "weight": (jnp.arange(16) < length).astype(jnp.float32)}

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"])
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            counted = jnp.maximum(batch["weight"].sum(), 1)
            return (each * batch["weight"]).sum() / counted, counted

        (loss, counted), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss, "tokens": counted}, grads)

    return Case(step, init, batch)


SUM = Family("sum_loss", make_sum, "sgd", "a sum over the batch, with weight decay in the loss")
WEIGHTED = Family("token_weighted", make_weighted, "MultiSteps of adamw", "the denominator is data; a mask per token")
