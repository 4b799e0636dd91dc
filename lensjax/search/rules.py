"""A rule set under the tables: which mesh axes split every class of values, and what must be sent for it.

A rule set is a list of (logical axis, mesh axes) in the order in which they claim mesh axes, as in a plan's activation
rules. A mesh axis splits one dimension of a value. From the dimensions of a matmul's operands and of its result follows
what has to move: an operand that lies otherwise than the matmul works is gathered or exchanged, a sum over a split
dimension is reduced, and scattered where the result lies split (Megatron-LM's pairs and its sequence parallelism are
the cases where little is left).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lensjax.search.sums import Contraction, Dims
from lensjax.search.tables import STORED, Tables

Rule = tuple[int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """`roles`: of each mesh axis, outermost first: "data", "expert", "sequence", "tensor". `rules`: see the module."""

    roles: tuple[str, ...]
    rules: tuple[Rule, ...]

    def axes(self, *roles: str) -> tuple[int, ...]:
        return tuple(i for i, r in enumerate(self.roles) if r in roles)


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of activations: `bytes` unsplit, divided by the sizes of the axes in `split` where it is sent; over
    `axes`, `trips` times, in `region`, of which each trip has it `times` times."""

    op: str
    axes: tuple[int, ...]
    split: tuple[int, ...]
    bytes: float
    trips: int
    region: int
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Laid:
    """A pattern applied to tables. bool arrays: `classes` [classes, axes] and `kernels` [kernels, axes] say which mesh
    axes split them; `weights` [groups, axes] the same for a group's tensors by rule."""

    pattern: Pattern
    classes: np.ndarray
    kernels: np.ndarray
    weights: np.ndarray
    sent: tuple[Sent, ...]

    @functools.cached_property
    def calls(self) -> tuple[tuple[Any, ...], ...]:
        """What is sent, by kind: (op, axes, split, bytes, trips, regions, times), the last four as arrays."""
        kinds: dict[tuple, list[Sent]] = {}
        for s in self.sent:
            kinds.setdefault((s.op, s.axes, s.split), []).append(s)
        return tuple(
            (*kind, *(np.array([getattr(s, name) for s in members]) for name in ("bytes", "trips", "region", "times")))
            for kind, members in kinds.items()
        )


def lay(t: Tables, pattern: Pattern) -> Laid:
    layout = Layout(t, pattern)
    width = len(pattern.roles)
    classes = np.zeros((len(t.classes), width), bool)
    for c, (kind, dims) in enumerate(t.classes):
        if kind != STORED:
            classes[c, layout.used(dims)] = True
    number: dict[Dims, int] = {}  # many kernels run over the same dimensions
    alike = [number.setdefault(dims, len(number)) for dims in t.kernel_axes]
    kinds = np.zeros((len(number), width), bool)
    for dims, k in number.items():
        kinds[k, layout.used(dims)] = True
    kernels = kinds[np.array(alike, int)]
    weights = np.zeros((len(t.groups), width), bool)
    for g, group in enumerate(t.groups):
        weights[g, layout.used(t.argument_dims[group.leaves[0]])] = True
    return Laid(pattern, classes, kernels, weights, tuple(layout.sent()))


class Layout:
    """Where a pattern's rules lay values: mesh axes of each dimension, and what matmuls have to send for it."""

    def __init__(self, t: Tables, pattern: Pattern):
        self.t, self.pattern = t, pattern
        self.summed_by_groups = set(pattern.axes("data", "expert", "sequence"))
        self.cache: dict[Dims, tuple[tuple[int, ...], ...]] = {}
        self.ruling: dict[int, list[int]] = {}  # logical axis -> the rules that are about it
        for i, (axis, _) in enumerate(pattern.rules):
            self.ruling.setdefault(axis, []).append(i)

    def spec(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        """Mesh axes of each dimension."""
        if dims not in self.cache:
            entries: list[tuple[int, ...]] = [()] * len(dims)
            taken: set[int] = set()
            # An unrolled network has rules for the axes of every layer: only those of these dimensions count.
            for i in sorted({i for dim in dims if dim for i in self.ruling.get(dim[0], ())}):
                axis, mesh = self.pattern.rules[i]
                for d, dim in enumerate(dims):
                    free = tuple(m for m in mesh if m not in taken)
                    if free and dim and dim[0] == axis and not entries[d]:
                        entries[d] = free
                        taken.update(free)
            self.cache[dims] = tuple(entries)
        return self.cache[dims]

    def used(self, dims: Dims) -> list[int]:
        return [m for axes in self.spec(dims) for m in axes]

    def sent(self) -> list[Sent]:
        found: dict[tuple, Sent] = {}
        for c in self.t.contractions:
            for key, s in self.moves(c):
                found.setdefault(key, s)
        return list(found.values())

    def moves(self, c: Contraction) -> list[tuple[tuple, Sent]]:
        dims = self.dims
        result = dims(c.result)
        sums = [dims(c.operands[0])[d] for d in c.summed[0]]
        work = self.spec((*result, *sums))
        at = {m: d for d, axes in enumerate(work) for m in axes}  # mesh axis -> factor: result dimension, then sums
        out: list[tuple[tuple, Sent]] = []
        for v, pairs, summed in zip(c.operands, c.pairs, c.summed):
            factor = {**pairs, **{d: len(result) + k for k, d in enumerate(summed)}}
            own = {m: factor.get(d) for d, axes in enumerate(self.spec(dims(v))) for m in axes}
            present = set(factor.values())
            moved: dict[str, list[int]] = {}
            for m, f in own.items():
                if f is not None and at.get(m) == f:
                    continue
                exchanged = m in at and (at[m] in present or c.passes)
                moved.setdefault("all_to_all" if exchanged else "all_gather", []).append(m)
            for op, axes in moved.items():
                rest = [m for m in own if m not in axes] if op == "all_gather" else list(own)
                out.append(self.event(op, axes, rest, v, c, (v,)))
        lies = {m: d for d, axes in enumerate(self.spec(result)) for m in axes}
        moved = {}
        for m, f in at.items():
            if f >= len(result):
                if not (c.weight and m in self.summed_by_groups):
                    moved.setdefault("reduce_scatter" if m in lies else "all_reduce", []).append(m)
            elif m in lies and lies[m] != f:
                moved.setdefault("all_to_all", []).append(m)
            elif m not in lies:
                moved.setdefault("all_gather", []).append(m)
        for op, axes in moved.items():
            rest = list(lies) if op in ("all_reduce", "all_to_all") else [m for m in lies if m not in axes]
            summed = op in ("all_reduce", "reduce_scatter") and c.total >= 0
            key = (c.total if summed else c.result, "result")
            out.append(self.event(op, axes, rest, c.result, c, key))
        return out

    def dims(self, v: int) -> Dims:
        return self.t.value_dims[v]

    def event(
        self, op: str, axes: Sequence[int], split: Sequence[int], v: int, c: Contraction, key: tuple
    ) -> tuple[tuple, Sent]:
        axes, trips = tuple(sorted(axes)), self.t.regions[c.region] * c.times
        sent = Sent(op, axes, tuple(sorted(split)), self.t.values[v].bytes, trips, c.region, c.times)
        return (*key, op, axes, c.region), sent
