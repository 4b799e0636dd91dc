"""Grouped queries, rotary positions and SwiGLU, scanned: the decoder of the built-in targets, in two precisions."""

import functools

import jax
import jax.numpy as jnp
import optax

from lensjax.models.decoder import Config
from lensjax.models.targets import create_state
from tests.zoo.base import Case, Family, probe, tokens


def make(dtype=None, with_grads=False):
    note = probe(with_grads)
    config = Config(
        vocab=120, width=32, layers=3, heads=4, kv_heads=2, mlp=88, remat="none", dtype=dtype or jnp.result_type(float)
    )

    def init(rng):
        return create_state(config, rng, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95)))

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss, "norm": optax.global_norm(grads)}, grads)

    return Case(step, init, lambda rng: tokens(rng, 16, 16, config.vocab))


FAMILY = Family("gqa_rope_swiglu", make, "adamw, chained with clip", "two key heads for four query heads; widths of 88")
BF16 = Family(
    "bf16_masters",
    functools.partial(make, jnp.bfloat16),
    "adamw, chained with clip",
    "float32 masters, bfloat16 arithmetic",
    dtype="bfloat16",
)
