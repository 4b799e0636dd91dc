"""A training step that is quick to compile, with everything that a checkpoint or a process boundary could lose: a key
from which dropout draws, a step counter, an average of the parameters, Adam's moments, a learning-rate schedule."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

ROWS, LENGTH, VOCAB = 16, 8, 64


class Little(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 32)(tokens)
        x = nn.Dropout(0.2, deterministic=False)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(VOCAB)(x)


class State(TrainState):
    key: Any
    ema: Any


def create(rng):
    key, dropout = jax.random.split(rng)
    model = Little()
    params = model.init({"params": key, "dropout": key}, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-2, 5, 100))
    ema = jax.tree.map(jnp.copy, params)
    return State.create(apply_fn=model.apply, params=params, tx=tx, key=dropout, ema=ema)


def batch(number):
    """The whole batch of a step: the same in every process."""
    made = jax.random.randint(jax.random.key(1000 + number), (ROWS, LENGTH + 1), 0, VOCAB)
    return jax.device_get({"inputs": made[:, :-1], "targets": made[:, 1:]})


def step(state, batch):
    key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state.replace(ema=optax.incremental_update(state.params, state.ema, 0.1)), loss
