"""What a family of the zoo is: a step as people write it, how its state and batch are made, and what it exercises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Case(NamedTuple):
    """An unmodified step; `init(rng) -> state`; `batch(rng) -> batch`; `step(state, batch) -> (state, metrics)`.

    `metrics["loss"]` is always there. With gradients asked for, `metrics["grads"]` is the tree of gradients as the
    step hands them to its optimizer: comparisons are made on those, never on parameters after Adam.
    """

    step: Callable[[Any, Any], tuple[Any, dict[str, Any]]]
    init: Callable[[jax.Array], Any]
    batch: Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """A named case: `make(with_grads=False) -> Case`; `dtype` is the precision of its arithmetic.

    `form` is how its step is written: "state" `step(state, batch) -> (state, metrics)`; "modules" (NNX)
    `step(model, optimizer, batch) -> metrics`, both updated in place, init returns the pair; "split" (NNX)
    `step(graphdef, state, batch) -> (state, metrics)`, init returns (graphdef, state). `call` hides the difference.
    """

    name: str
    make: Callable[..., Case]
    optimizer: str
    notes: str
    dtype: str = "float32"
    form: Literal["state", "modules", "split"] = "state"

    def call(self, step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """state, metrics of one call of `step` (jitted, decorated or bare) in this family's form."""
        if self.form == "modules":
            return state, step(*state, batch)
        if self.form == "split":
            values, metrics = step(*state, batch)
            return (state[0], values), metrics
        return step(state, batch)

    def jit(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step compiled for one device, as its users would."""
        return nnx.jit(step) if self.form == "modules" else jax.jit(step)


def probe(with_grads: bool) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    """metrics, grads -> metrics, with the gradients among them when asked for."""
    return lambda metrics, grads: {**metrics, "grads": grads} if with_grads else metrics


def widen(tree: Any) -> Any:
    """float32 leaves -> float64: the same case in double precision, whatever its modules are.

    Make the case, its state and its batch under `jax.enable_x64(True)` too: some modules fix a precision when made.
    """
    return jax.tree.map(lambda x: x.astype(jnp.float64) if getattr(x, "dtype", None) == jnp.float32 else x, tree)


def tokens(rng: jax.Array, rows: int, length: int, vocab: int) -> dict[str, jax.Array]:
    """Inputs and targets of next-token prediction, int32[rows, length], from a skewed distribution (not uniform)."""
    u = jax.random.uniform(rng, (rows, length + 1), jnp.float32)
    chunk = (u * u * vocab).astype(jnp.int32)
    return {"inputs": chunk[:, :-1], "targets": chunk[:, 1:]}
