"""What happens at the cuts: partial values of all shares in, totals out.

    reduce(stacked, *, mesh, specs, axes, state) -> (totals, state)

`stacked` and `specs` are mappings by name (a gradient's is its parameter's path): arrays [groups, ...], split as
P(axes, *(spec without axes)); their totals are split as P(*spec), which may name some of `axes`: every replica then
keeps its own part. `exact` has no state and leaves the schedule to XLA, which reduces
hierarchically where `spec` splits the value over the faster axes (reduce-scatter inside, the slow axes on shards only).
`passes.compress` makes the reductions that send codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from lensjax.passes.shardings import named
from lensjax.plan.plan import Spec

# "same": a value that every share makes alike; any of them is the total.
_OVER = {
    "same": lambda x, axis: jax.lax.index_in_dim(x, 0, axis, keepdims=False),
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "or": jnp.any,
    "and": jnp.all,
}
_BETWEEN = {
    "same": lambda a, b: b,
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "or": jnp.logical_or,
    "and": jnp.logical_and,
}


Arrays = Mapping[str, jax.Array]
Specs = Mapping[str, Spec]


class Reducer(Protocol):
    """The interface of a reduction over `axes` of the mesh; see this module."""

    def __call__(
        self, stacked: Arrays, *, mesh: Any, specs: Specs, axes: tuple[str, ...], state: Arrays
    ) -> tuple[Arrays, Arrays]: ...


def exact(stacked: Arrays, *, mesh: Any, specs: Specs, axes: tuple[str, ...], state: Arrays) -> tuple[Arrays, Arrays]:
    """The sums as they are, in the types that came in."""
    whole = lambda name, x: jax.lax.with_sharding_constraint(jnp.sum(x, 0), named(mesh, specs[name]))
    return {name: whole(name, x) for name, x in stacked.items()}, state


def over(op: str, x: jax.Array, axis: int = 0) -> jax.Array:
    """The sum, max, min, or, and along a dimension; the first of values that are the same."""
    return _OVER[op](x, axis)


def combine(op: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return _BETWEEN[op](a, b)


def start(op: str, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    """What changes nothing when it is combined with a value; sums of narrow floats start as `wide` ones."""
    if op in ("or", "and"):
        return jnp.full(shape, op == "and", dtype)
    if op in ("sum", "same"):
        return wide(op, jnp.zeros(shape, dtype))
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.full(shape, -jnp.inf if op == "max" else jnp.inf, dtype)
    info = jnp.iinfo(dtype)
    return jnp.full(shape, info.min if op == "max" else info.max, dtype)


def wide(op: str, x: jax.Array) -> jax.Array:
    """A partial sum of narrow floats in float32: micro-batches and nodes are added up without rounding each time."""
    narrow = op == "sum" and jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if narrow else x
