"""What each argument is for, from data flow and tree structure, not from names.

state       comes back as a result of the same structure (what a training loop feeds into the next call)
parameter   float state that a forward or backward computation reads
optimizer   float state of a parameter's shape that flows into that parameter's new value (or is fed by it: an average)
key         PRNG keys, typed or raw
batch       see lensjax.program.batch
constant    arrays that the step closes over
other       counters, statistics, scales, schedules
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lensjax import _jax
from lensjax.program.edit import all_equations, is_var
from lensjax.program.flow import dependencies, touches
from lensjax.program.trace import Traced

Role = Literal["parameter", "optimizer", "batch", "key", "constant", "other"]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array argument. `follows`: index of the parameter whose sharding it takes; `result`: index of the result
    that is its next value (None when it does not come back); `batch_axis`: its batch dimension."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    role: Role
    follows: int | None = None
    result: int | None = None
    batch_axis: int | None = None

    @property
    def nbytes(self) -> int:
        size = 1
        for s in self.shape:
            size *= s
        return size * itemsize(self.dtype)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; a typed PRNG key counts as its raw words (threefry: 8)."""
    return jnp.dtype(dtype).itemsize if not jnp.issubdtype(dtype, jax.dtypes.prng_key) else 8


def match_state(traced: Traced, deps: dict[Any, int]) -> dict[int, int]:
    """{argument index: result index} of the leaves that come back: whole argument subtrees whose structure, shapes and
    dtypes stand again in the results, the best data flow first, each result used once."""
    paths, n = traced.call.paths, len(traced.call.paths)
    invars = _jax.open_jaxpr(traced.jaxpr).invars
    outvars = _jax.open_jaxpr(traced.jaxpr).outvars
    # Candidate subtrees: every prefix of the argument and result paths, largest first.
    arg_groups = _subtrees([p.split("/") for p in paths])
    out_groups = _subtrees([p.split("/") if p else [] for p in traced.out_paths])
    by_signature: dict[Any, list[tuple[int, ...]]] = {}
    for prefix, members in out_groups.items():
        by_signature.setdefault(_signature(prefix, members, traced.out_paths, outvars), []).append(tuple(members))
    matched: dict[int, int] = {}
    used: set[int] = set()
    for prefix, members in sorted(arg_groups.items(), key=lambda kv: (-len(kv[1]), len(kv[0]))):
        if any(i in matched for i in members) or any(i >= n for i in members):
            continue
        options = [o for o in by_signature.get(_signature(prefix, members, paths, invars), []) if not used & set(o)]
        options = [o for o in options if _flows(members, o, outvars, deps)]
        if options:
            best = max(options, key=lambda o: _affinity(members, o, paths, traced.out_paths, outvars, deps))
            matched.update(zip(members, best))
            used.update(best)
    return matched


def _subtrees(split: Sequence[Sequence[str]]) -> dict[tuple[str, ...], list[int]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, parts in enumerate(split):
        for depth in range(len(parts) + 1):
            groups.setdefault(tuple(parts[:depth]), []).append(i)
    return groups


def _signature(prefix: tuple[str, ...], members: Sequence[int], paths: Sequence[str], variables: Sequence[Any]) -> Any:
    def one(i: int) -> Any:
        rest = tuple(paths[i].split("/")[len(prefix) :]) if paths[i] else ()
        aval = variables[i].aval
        return rest, tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval))

    return tuple(one(i) for i in members)


def _flows(members: Sequence[int], outs: Sequence[int], outvars: Sequence[Any], deps: dict[Any, int]) -> bool:
    """At least one leaf of the results depends on its own argument (else equal shapes are a coincidence, as for
    gradients, which depend on the parameters too but are told apart by `_affinity` and by what else is returned)."""
    return any(_dep(outvars[o], deps) >> i & 1 for i, o in zip(members, outs))


def _dep(atom: Any, deps: dict[Any, int]) -> int:
    return deps.get(atom, 0) if is_var(atom) else 0


def _affinity(
    members: Any, outs: Any, paths: Any, out_paths: Any, outvars: Any, deps: dict[Any, int]
) -> tuple[int, int]:
    own = sum(_dep(outvars[o], deps) >> i & 1 for i, o in zip(members, outs))
    named = sum(paths[i].split("/")[0] in out_paths[o].split("/") for i, o in zip(members, outs))
    return own, named


# Through these a value stays what it is: a parameter plus its update is the parameter's next value.
_KEEPS = {
    "add",
    "sub",
    "add_any",
    "select_n",
    "convert_element_type",
    "copy",
    "reshape",
    "optimization_barrier",
    "transpose",
}


def split_gradients(
    traced: Traced, state: dict[int, int], is_batch: Callable[[Any], bool]
) -> tuple[dict[int, int], dict[int, int], bool]:
    """Tells state that comes back from results that only look like it: the gradients of parameters.

    A next value is made from the old one by equations without a batch dimension; a gradient depends on its parameter
    only through the batch. Returns (state, {parameter index: result index} of gradients, whether the state may be
    donated): a regularised gradient g + c p cannot be told from p (1 - c) - g, so state is donated only if some leaf
    of it is kept and added to, or it holds more than parameters.
    """
    inner = _jax.open_jaxpr(traced.jaxpr)
    free = dependencies(traced.jaxpr, lambda e: not touches(e, is_batch))
    kept = dependencies(traced.jaxpr, lambda e: e.primitive.name in _KEEPS)
    own = {i for i, o in state.items() if _dep(inner.outvars[o], free) >> i & 1}
    groups: dict[str, list[int]] = {}
    for i in state:
        groups.setdefault(traced.call.paths[i].split("/")[0], []).append(i)
    gradients = {i: state[i] for members in groups.values() if not own & set(members) for i in members}
    comes_back = {i: o for i, o in state.items() if i not in gradients}
    donate = any(
        _dep(inner.outvars[o], kept) >> i & 1 or not jnp.issubdtype(inner.invars[i].aval.dtype, jnp.inexact)
        for i, o in comes_back.items()
    )
    return comes_back, gradients, donate


def added_to(traced: Traced, state: dict[int, int]) -> set[int]:
    """State that an update is added to and that no other state reads: parameters that no computation needs (those of a
    linear model do not stand in their own gradient)."""
    inner = _jax.open_jaxpr(traced.jaxpr)
    kept = dependencies(traced.jaxpr, lambda e: e.primitive.name in _KEEPS)
    full = dependencies(traced.jaxpr)
    found = set()
    for i, o in state.items():
        alone = not any(_dep(inner.outvars[other], full) >> i & 1 for j, other in state.items() if j != i)
        changed = inner.outvars[o] is not inner.invars[i]
        if alone and changed and inner.invars[i].aval.shape and _dep(inner.outvars[o], kept) >> i & 1:
            found.add(i)
    return found


def is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def raw_keys(traced: Traced) -> set[int]:
    """Arguments that are raw PRNG keys: uint32 words that are wrapped into a key."""
    inner = _jax.open_jaxpr(traced.jaxpr)
    index = {v: i for i, v in enumerate(inner.invars)}
    return {
        index[e.invars[0]]
        for e in all_equations(inner)
        if e.primitive.name == "random_wrap" and is_var(e.invars[0]) and e.invars[0] in index
    }


def tie(traced: Traced, state: dict[int, int], parameters: Sequence[int], deps: dict[Any, int]) -> dict[int, int]:
    """{state index: parameter index} for state that belongs to one parameter: same shape, and it flows into that
    parameter's new value (moments) or that parameter flows into it (averages). Between several, the one whose path ends
    most alike (optimizers keep the parameters' tree inside their own)."""
    inner = _jax.open_jaxpr(traced.jaxpr)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for p in parameters:
        by_shape.setdefault(tuple(inner.invars[p].aval.shape), []).append(p)
    ties = {}
    for i, out in state.items():
        aval = inner.invars[i].aval
        if i in parameters or not aval.shape or not jnp.issubdtype(aval.dtype, jnp.inexact):
            continue
        same = by_shape.get(tuple(aval.shape), [])
        into = [p for p in same if p in state and _dep(inner.outvars[state[p]], deps) >> i & 1]
        from_ = [p for p in same if _dep(inner.outvars[out], deps) >> p & 1]
        scored = sorted(
            ((_common_suffix(traced.call.paths[i], traced.call.paths[p]), -p) for p in (into or from_)), reverse=True
        )
        if not scored:
            continue
        best, second = scored[0], scored[1] if len(scored) > 1 else (-1, 0)
        if best[0] > second[0] and (best[0] > 0 or (into and len(scored) == 1)):
            ties[i] = -best[1]
    return ties


def _common_suffix(a: str, b: str) -> int:
    n = 0
    for x, y in zip(reversed(a.split("/")), reversed(b.split("/"))):
        if x != y:
            break
        n += 1
    return n
