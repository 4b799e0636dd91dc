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
from collections.abc import Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lensjax import _jax
from lensjax.program.edit import all_equations, is_var
from lensjax.program.flow import ELEMENTWISE, dependencies
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


@dataclasses.dataclass(frozen=True)
class Matches:
    """Arguments and results of equal structure. {argument index: result index} each.

    state      the result is the argument's next value: made from it element by element (and from whatever else)
    alike      it only has the same structure: a gradient, a reconstruction
    replaced   indices of state that an update is added to: its old buffers are of no more use
    """

    state: dict[int, int]
    alike: dict[int, int]
    replaced: frozenset[int]


def match_state(traced: Traced, deps: dict[Any, int], batch: Collection[int] = ()) -> Matches:
    """Finds, for whole argument subtrees, the results of the same paths, shapes and dtypes. Each result is used once:
    the largest subtrees first, then those that are most of all made from their own argument. Arguments in `batch` are
    left out."""
    paths, n = traced.call.paths, len(traced.call.paths)
    inner = _jax.open_jaxpr(traced.jaxpr)
    by_signature: dict[Any, list[tuple[int, ...]]] = {}
    for prefix, members in _subtrees([p.split("/") if p else [] for p in traced.out_paths]).items():
        signature = _signature(prefix, members, traced.out_paths, inner.outvars)
        by_signature.setdefault(signature, []).append(tuple(members))
    by_size: dict[int, list[tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]]] = {}
    for prefix, members in _subtrees([p.split("/") for p in paths]).items():
        if any(i >= n or i in batch for i in members):
            continue
        if outs := by_signature.get(_signature(prefix, members, paths, inner.invars)):
            by_size.setdefault(len(members), []).append((len(prefix), tuple(members), tuple(outs)))
    score = _Score(traced, deps)
    own, alike = {}, {}
    used: set[int] = set()
    for into, wanted in ((own, True), (alike, False)):
        # Only what larger subtrees left over is scored: in a deep model many small subtrees look the same.
        for size in sorted(by_size, reverse=True):
            pairs = []
            for depth, members, results in by_size[size]:
                if any(i in own or i in alike for i in members):
                    continue
                for outs in results:
                    found = None if used.intersection(outs) else score.of(members, outs)
                    if found is not None and (found[1] > 0) == wanted:
                        pairs.append((tuple(-x for x in found), depth, members, outs))
            for _, _, members, outs in sorted(pairs):
                if not used.intersection(outs) and not any(i in own or i in alike for i in members):
                    into.update(zip(members, outs))
                    used.update(outs)
    kept = frozenset(i for i, o in own.items() if score.keeps(i, o))
    return Matches(own, alike, kept)


class _Score:
    """How much a result is the next value of an argument."""

    def __init__(self, traced: Traced, deps: dict[Any, int]):
        inner = _jax.open_jaxpr(traced.jaxpr)
        self.outvars, self.deps = inner.outvars, deps
        self.paths, self.out_paths = traced.call.paths, traced.out_paths
        self.kept = dependencies(traced.jaxpr, lambda e: e.primitive.name in _KEEPS)
        self.each = dependencies(traced.jaxpr, lambda e: e.primitive.name in ELEMENTWISE | _KEEPS)
        # Arguments that a matmul, a loop, ... reads: what a step trains, against what it only falls back to.
        skip = ELEMENTWISE | {"cond", "while"}
        self.read = {a for e in inner.eqns if e.primitive.name not in skip for a in e.invars if is_var(a)}
        self.invars = inner.invars

    def keeps(self, i: int, out: int) -> bool:
        integer = not jnp.issubdtype(self.invars[i].aval.dtype, jnp.inexact)
        return integer or bool(_dep(self.outvars[out], self.kept) >> i & 1)

    def of(self, members: Sequence[int], outs: Sequence[int]) -> tuple[int, ...] | None:
        """(leaves that are kept and added to, leaves made element by element from their own, leaves that are read,
        leaves that depend on their own, leaves of the argument's name); None when nothing depends on its own
        argument."""
        pairs = list(zip(members, outs))
        flows = sum(_dep(self.outvars[o], self.deps) >> i & 1 for i, o in pairs)
        if not flows:
            return None
        kept = sum(_dep(self.outvars[o], self.kept) >> i & 1 for i, o in pairs)
        each = sum(_dep(self.outvars[o], self.each) >> i & 1 for i, o in pairs)
        read = sum(self.invars[i] in self.read for i in members)
        named = sum(self.paths[i].split("/")[0] in self.out_paths[o].split("/") for i, o in pairs)
        return kept, each, read, flows, named


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
        return rest, tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", aval)

    return tuple(one(i) for i in members)


def _dep(atom: Any, deps: dict[Any, int]) -> int:
    return deps.get(atom, 0) if is_var(atom) else 0


# Through these a value stays what it is: a parameter plus its update is the parameter's next value.
_KEEPS = frozenset(
    """add sub add_any select_n convert_element_type copy reshape optimization_barrier transpose
    sharding_constraint""".split()
)


def added_to(traced: Traced, matches: Matches, deps: dict[Any, int]) -> set[int]:
    """State that an update is added to and that no other state reads: parameters that no computation needs (those of a
    linear model do not stand in their own gradient)."""
    inner = _jax.open_jaxpr(traced.jaxpr)
    once = twice = 0  # arguments that at least one, at least two next values depend on
    for o in matches.state.values():
        d = _dep(inner.outvars[o], deps)
        once, twice = once | d, twice | once & d
    found = set()
    for i in matches.replaced:
        mine = _dep(inner.outvars[matches.state[i]], deps) >> i & 1
        alone = not (twice >> i & 1 or (once >> i & 1 and not mine))
        changed = inner.outvars[matches.state[i]] is not inner.invars[i]
        if alone and changed and inner.invars[i].aval.shape:
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


def tie(traced: Traced, state: dict[int, int], parameters: Collection[int], deps: dict[Any, int]) -> dict[int, int]:
    """{state index: parameter index} for state that belongs to one parameter: same shape, and it flows into that
    parameter's new value (moments) or that parameter flows into it (averages). Between several, the one whose path ends
    most alike (optimizers keep the parameters' tree inside their own)."""
    inner = _jax.open_jaxpr(traced.jaxpr)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for p in parameters:
        by_shape.setdefault(tuple(inner.invars[p].aval.shape), []).append(p)
    next_ = {p: _dep(inner.outvars[state[p]], deps) if p in state else 0 for p in parameters}
    parameters = set(parameters)
    ties = {}
    for i, out in state.items():
        aval = inner.invars[i].aval
        if i in parameters or not aval.shape or not jnp.issubdtype(aval.dtype, jnp.inexact):
            continue
        same = by_shape.get(tuple(aval.shape), [])
        into = [p for p in same if next_[p] >> i & 1]
        mine = _dep(inner.outvars[out], deps)
        related = into or [p for p in same if mine >> p & 1]
        scored = sorted(
            ((_common_suffix(traced.call.paths[i], traced.call.paths[p]), -p) for p in related), reverse=True
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
