"""Built-in targets: a named model, its unmodified training step and the shapes of its arguments.

Shapes come from `jax.eval_shape`: nothing is ever materialised, so a 405B target costs no more than a tiny one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from lensjax._errors import UsageError
from lensjax.models import more
from lensjax.models.decoder import Config, Decoder

# Llama 3: arXiv:2407.21783, table 3. GPT-3: arXiv:2005.14165, table 2.1, vocabulary of GPT-2 (50257), context 2048.
_GPT3 = dict(norm="layer", gated=False, bias=True, positions="learned", tied=True, max_seq=2048, vocab=50_257)
CONFIGS: dict[str, Config] = {
    "llama3-8b": Config(vocab=128_256, width=4096, layers=32, heads=32, kv_heads=8, mlp=14_336),
    "llama3-70b": Config(vocab=128_256, width=8192, layers=80, heads=64, kv_heads=8, mlp=28_672),
    "llama3-405b": Config(vocab=128_256, width=16_384, layers=126, heads=128, kv_heads=8, mlp=53_248),
    "gpt3-175b": Config(width=12_288, layers=96, heads=96, kv_heads=96, mlp=49_152, **_GPT3),  # type: ignore[arg-type]
    # Small enough to run on a CPU; the same structure as the large ones.
    "llama3-tiny": Config(vocab=512, width=64, layers=4, heads=8, kv_heads=4, mlp=192),
    "gpt3-tiny": Config(**{**_GPT3, "vocab": 512}, width=64, layers=4, heads=4, kv_heads=4, mlp=256),  # type: ignore[arg-type]
}


LONG = 8192  # tokens; the scores of one layer with 32 heads are 8 GiB here, in float32


class Target(NamedTuple):
    """A training step and the shapes of its two arguments; unpacks as `step, state, batch`."""

    step: Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]
    state: Any
    batch: Any


def names() -> list[str]:
    """The names that `target` takes."""
    return sorted([*CONFIGS, *more.NAMES])


def config(name: str) -> Config:
    """The configuration of a built-in target. Raises UsageError that lists the names when there is none."""
    if name not in CONFIGS:
        raise UsageError(
            f"no built-in target {name!r}; there are: {', '.join(names())}",
            hint="for a step of your own give FILE.py:NAME, where NAME() returns (step, arguments)",
        )
    return CONFIGS[name]


def optimizer(peak: float = 3e-4) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipping, as in GPT-3 (arXiv:2005.14165, appendix B) and Llama."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps=2000, decay_steps=100_000)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1))


def create_state(config: Config, rng: jax.Array, tx: optax.GradientTransformation | None = None) -> TrainState:
    """A fresh TrainState; under `jax.eval_shape` only its shapes."""
    model = Decoder(config)
    params = model.init(rng, jnp.zeros((1, 8), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx or optimizer())


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step of next-token prediction; batch: `inputs` and `targets`, int32[batch, seq]."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}
    return state.apply_gradients(grads=grads), metrics


def abstract_batch(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of `batch` sequences of `seq` tokens."""
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return {"inputs": tokens, "targets": tokens}


def target(name: str | Config, batch: int, seq: int | None = None, **changes: Any) -> Target:
    """A built-in target by name, or any `Config`: its step, abstract state and abstract batch.

    `batch` is the global batch in examples, `seq` the tokens of each (None for models without sequences); `changes`
    replace fields of the configuration (`remat="none"`, `layers=4`). Above LONG tokens a named target's attention is
    blockwise unless `changes` say otherwise: nobody stores the scores of all pairs there. No device is touched and
    nothing allocated.
    Raises UsageError for an unknown name, a wrong field, a size below one or more tokens than the model has positions.
    """
    if batch < 1 or (seq is not None and seq < 1):
        raise UsageError(f"batch and seq must be at least 1, got batch {batch} and seq {seq}")
    if isinstance(name, str) and name in more.NAMES:
        return Target(*more.make(name, batch, seq, optimizer(), **changes))
    chosen = config(name) if isinstance(name, str) else name
    if changes:
        try:
            chosen = dataclasses.replace(chosen, **changes)
        except (TypeError, ValueError) as e:
            fields = ", ".join(f.name for f in dataclasses.fields(Config))
            raise UsageError(f"cannot change {name}: {e}", hint=f"the fields are: {fields}") from e
    if seq is None:
        raise UsageError(f"{name} needs --seq", hint="for example --seq 8192")
    if seq > LONG and "attention" not in changes and isinstance(name, str):
        chosen = dataclasses.replace(chosen, attention="blockwise")
    if chosen.positions == "learned" and seq > chosen.max_seq:
        raise UsageError(
            f"{name} has a table of {chosen.max_seq} positions, seq is {seq}",
            hint=f"use seq <= {chosen.max_seq}, or change max_seq",
        )
    state = jax.eval_shape(lambda: create_state(chosen, jax.random.key(0)))
    return Target(train_step, state, abstract_batch(batch, seq))
