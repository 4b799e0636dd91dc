"""Where a forward computation can be cut so that little has to be kept: its layers, whether or not they have names.

The width of a place is how many bytes later forward code reads from before it. Layers end at narrow places. Two sets of
cuts are made, the layers that the parameters' paths number ("block_3/kernel") and those of a dynamic program that asks
for no names, and the one that would hold less is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lensjax import _jax
from lensjax.program.boundary import BackwardPass
from lensjax.program.edit import is_var
from lensjax.program.values import Table, is_solid, reads_memory, results, table

CANDIDATES = 250  # narrowest places that the dynamic program looks at
THRESHOLDS = 120  # limits on what one segment may drop
# Layers that the user numbered are taken unless nameless cuts hold this much less.
PREFERENCE = 0.7
# A cast or transpose of a parameter is that parameter: what counts is where it is computed with.
VIEWS = frozenset(
    "convert_element_type copy transpose reshape squeeze slice broadcast_in_dim sharding_constraint".split()
)
_NUMBERED = re.compile(r"^(.*?/)?([^/]*?)(\d+)(?=/|$)")


@dataclasses.dataclass(frozen=True)
class Segment:
    """Forward equations [start, stop), and the layer they belong to: the common path of the parameters read there; ""
    outside of the layers."""

    start: int
    stop: int
    name: str


@dataclasses.dataclass(frozen=True)
class Forward:
    """Facts of one forward computation. `forward`: variable -> last forward reader; `backward`: variable -> first
    backward reader."""

    span: BackwardPass
    forward: Mapping[Any, int]
    backward: Mapping[Any, int]


def forward_of(jaxpr: Any, span: BackwardPass, table: Table) -> Forward:
    inner = _jax.open_jaxpr(jaxpr)
    forward: dict[Any, int] = {}
    backward: dict[Any, int] = {}
    for i, eqn in enumerate(inner.eqns):
        for v in eqn.invars:
            if is_var(v) and v in table.made:
                if i < span.split:
                    forward[v] = i
                elif i >= span.stop:
                    forward[v] = span.split  # kept for what comes after this differentiation
                elif table.made[v] < span.split:
                    backward.setdefault(v, i)
    for v in inner.outvars:  # metrics and batch statistics exist to the end
        if is_var(v) and table.made.get(v, span.split) < span.split:
            forward[v] = span.split
    return Forward(span, forward, backward)


def segments(
    jaxpr: Any, span: BackwardPass, table: Table, names: Mapping[Any, str], whole: frozenset[int]
) -> tuple[Segment, ...]:
    """The segments of one forward computation, in order.

    `names`: variable -> path of the parameter that it is; `whole`: positions of equations that are segments of their
    own (stacks of scanned layers). Reaches from `span.start` to `span.split`.
    """
    inner = _jax.open_jaxpr(jaxpr)
    facts = forward_of(jaxpr, span, table)
    grid = _Grid(inner, facts, table, whole)
    numbered = _numbered_cuts(inner, facts, grid, names)
    free = grid.best()
    if numbered and grid.holds(numbered) * PREFERENCE <= grid.holds(free):
        paths = _path_of(inner, span, names)
        made = [(a, z, _majority(paths[a - span.start : z - span.start])) for a, z in itertools.pairwise(numbered)]
        inside = [n for n, (_, _, name) in enumerate(made) if layer_name(name)]
        return tuple(Segment(a, z, name if inside[0] <= n <= inside[-1] else "") for n, (a, z, name) in enumerate(made))
    if grid.whole:
        return tuple(Segment(a, z, "") for a, z in itertools.pairwise(free))
    paths = _path_of(inner, span, names)
    made = [(a, z, _majority(paths[a - span.start : z - span.start])) for a, z in itertools.pairwise(free)]
    return tuple(Segment(a, z, name or f"segment {n}") for n, (a, z, name) in enumerate(made))


class _Grid:
    """What every pair of candidate places would keep and drop as one segment, as matrices."""

    def __init__(self, inner: Any, facts: Forward, table: Table, whole: frozenset[int]):
        span = self.span = facts.span
        self.whole = {i for i in whole if span.start <= i < span.split}
        self.stored = stored_values(inner, facts)
        rows = [
            (i, facts.forward.get(v, -1), table.bytes[v], v in self.stored)
            for v, i in table.made.items()
            if span.start <= i < span.split
        ]
        self.rows = np.array(rows, dtype=np.int64).reshape(-1, 4)
        self.width = self._widths()

    def _widths(self) -> np.ndarray:
        size = self.span.split - self.span.start
        w = np.zeros(size + 2)
        d, u, b = (self.rows[:, i] for i in range(3))
        later = u > d
        np.add.at(w, d[later] - self.span.start + 1, b[later])
        np.add.at(w, np.minimum(u[later], self.span.split) - self.span.start + 1, -b[later])
        return np.cumsum(w)[: size + 1]

    def candidates(self, also: Sequence[int] = ()) -> list[int]:
        w, start, split = self.width, self.span.start, self.span.split
        p = np.arange(1, split - start)
        narrow = p[(w[p] <= w[p - 1]) & (w[p] <= w[p + 1]) & (w[p] != w[p + 1])]
        narrow = narrow[np.argsort(w[narrow], kind="stable")][:CANDIDATES]
        around = [x for i in self.whole for x in (i, i + 1)]
        return sorted({start, split, *(int(x) + start for x in narrow), *around, *also})

    def matrices(self, places: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(kept, dropped)[a, c]: bytes that the segment from place a to place c keeps for later forward code, and that
        it drops and the backward needs."""
        k = len(places)
        at = np.array(places)
        seg = lambda x: np.searchsorted(at, x, side="right") - 1
        inside = self.rows[(self.rows[:, 0] >= at[0]) & (self.rows[:, 0] < at[-1])]
        d, u, b, stored = (inside[:, i] for i in range(4))
        home, use = seg(d), np.where(u >= 0, seg(np.minimum(u, self.span.split)), -1)
        kept, drop = np.zeros((k + 1, k + 2)), np.zeros((k + 1, k + 2))
        later = use > home
        _rectangle(kept, home[later], home[later] + 1, use[later] + 1, b[later])
        back = stored > 0
        first = np.maximum(use, home) + 1
        _rectangle(drop, home[back], first[back], np.full(int(back.sum()), k + 1), b[back])
        kept, drop = (np.cumsum(m[:k, :k], axis=1) for m in (_upward(kept), _upward(drop)))
        for n, a in enumerate(places[:-1]):
            if a in self.whole:
                drop[n, n + 1] = 0.0
        return kept, drop

    def best(self, places: Sequence[int] | None = None) -> list[int]:
        """The cuts, among `places`, that hold least: what all segments keep and the most that one drops."""
        places = self.candidates() if places is None else list(places)
        kept, drop = self.matrices(places)
        kept[:, -1] = 0.0
        k = len(places)
        held = np.array([[any(places[a] <= i < places[c] for i in self.whole) for c in range(k)] for a in range(k)])
        apart = np.arange(k)[None, :] - np.arange(k)[:, None]
        allowed = (apart == 1) | ((apart > 1) & ~held)
        pairs = np.triu_indices(k, 1)
        best: tuple[float, int, list[int]] | None = None
        for limit in np.unique(np.quantile(drop[pairs], np.linspace(0, 1, THRESHOLDS))):
            usable = allowed & ((drop <= limit) | (apart == 1))
            price = np.where(usable, kept, np.inf)
            path = _shortest(price)
            total = sum(kept[a, c] for a, c in itertools.pairwise(path)) + max(
                drop[a, c] for a, c in itertools.pairwise(path)
            )
            option = (float(total), -len(path), path)
            best = option if best is None or option < best else best
        assert best is not None
        return [places[c] for c in best[2]]

    def holds(self, cuts: Sequence[int]) -> float:
        """Bytes that these cuts hold at most: what is kept, and the largest segment made again."""
        kept, drop = self.matrices(cuts)
        n = np.arange(len(cuts) - 1)
        return float(kept[n[:-1], n[:-1] + 1].sum() + drop[n, n + 1].max())


def _rectangle(m: np.ndarray, row: Any, first: Any, last: Any, value: Any) -> None:
    """Marks +value on rows 0..row, columns first..last-1 (as differences: see `_upward` and cumsum)."""
    np.add.at(m, (row, first), value)
    np.add.at(m, (row, np.minimum(last, m.shape[1] - 1)), -value)


def _upward(m: np.ndarray) -> np.ndarray:
    return np.cumsum(m[::-1], axis=0)[::-1]


def _shortest(price: np.ndarray) -> list[int]:
    k = len(price)
    cost, back = np.full(k, np.inf), np.zeros(k, dtype=int)
    cost[0] = 0.0
    for c in range(1, k):
        option = cost[:c] + price[:c, c]
        back[c] = int(option.argmin())
        cost[c] = option[back[c]]
    path = [k - 1]
    while path[-1]:
        path.append(int(back[path[-1]]))
    return path[::-1]


def stored_values(inner: Any, facts: Forward) -> set[Any]:
    """Forward values that XLA stores for the backward: what it reads, pulled back through element-wise chains (which
    are fused, and made again for nothing) to what is worth storing, or in memory anyway because a matmul reads it."""
    span = facts.span
    need = {v for v in facts.backward}
    eqns = inner.eqns[span.start : span.split]
    made = {v for e in eqns for v in results(e)}
    written = {a for e in eqns if reads_memory(e) for a in e.invars if is_var(a)}
    for eqn in reversed(eqns):
        if not is_solid(eqn) and any(v in need and v not in written for v in results(eqn)):
            need -= {v for v in eqn.outvars if v not in written}
            need |= {a for a in eqn.invars if is_var(a) and a in made}
    return need


# ---- layers that the user numbered ----------------------------------------------------------------------------------


def layer_name(path: str) -> str:
    """The path up to its first numbered part ("params/block_3/attn/kernel" -> "params/block_3"); "" without one."""
    found = _NUMBERED.match(path)
    return path[: found.end()] if found else ""


def _layer_of(inner: Any, span: BackwardPass, names: Mapping[Any, str]) -> list[str]:
    return [_common([layer_name(p) for p in ps]) for ps in _direct(inner, span, names)]


def _path_of(inner: Any, span: BackwardPass, names: Mapping[Any, str]) -> list[str]:
    return [_common([layer_name(p) or os.path.dirname(p) for p in ps]) for ps in _direct(inner, span, names)]


def _direct(inner: Any, span: BackwardPass, names: Mapping[Any, str]) -> list[list[str]]:
    return [
        [names[a] for a in e.invars if is_var(a) and a in names] if e.primitive.name not in ("scan", *VIEWS) else []
        for e in inner.eqns[span.start : span.split]
    ]


def _numbered_cuts(inner: Any, facts: Forward, grid: _Grid, names: Mapping[Any, str]) -> list[int] | None:
    """Cuts at the narrowest place between the first readings of two layers' parameters; None without at least two
    layers."""
    span = facts.span
    layers = _layer_of(inner, span, names)
    other = [bool(ps) and not any(layer_name(p) for p in ps) for ps in _direct(inner, span, names)]
    first: list[tuple[int, str]] = []
    for i, layer in enumerate(layers):
        now = layer or ("" if other[i] and first else None)
        if now is not None and (not first or first[-1][1] != now):
            first.append((i, now))
    if len({name for _, name in first if name}) < 2:
        return None
    cuts = {span.start, span.split, *(x for i in grid.whole for x in (i, i + 1))}
    begin = 0
    for n, (i, _) in enumerate(first):
        if n == 0:  # what comes before the first layer is no layer: cut where the last narrow place is
            while begin < i and grid.width[i - 1] <= grid.width[i]:
                i -= 1
            places = np.array([i])
        else:
            places = np.arange(begin + 1, i + 1)
        if len(places):
            w = grid.width[places]
            cuts.add(span.start + int(places[np.flatnonzero(w == w.min())[-1]]))
        begin = first[n][0]
    return sorted(cuts)


def _majority(paths: Sequence[str]) -> str:
    found = [x for x in paths if x]
    return max(set(found), key=lambda x: (found.count(x), x)) if found else ""


def named_views(jaxpr: Any, names: Mapping[Any, str]) -> dict[Any, str]:
    """`names` (variable -> path of a parameter) with the parameters' views."""
    found = dict(names)
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in VIEWS and is_var(eqn.invars[0]) and eqn.invars[0] in found:
            found[eqn.outvars[0]] = found[eqn.invars[0]]
    return found


def _common(paths: Sequence[str]) -> str:
    found = {p for p in paths if p}
    if not found:
        return ""
    return os.path.commonpath(["/" + p for p in found]).strip("/")


def regrouped(jaxpr: Any, span: BackwardPass, run: Sequence[Segment], whole: frozenset[int]) -> list[Segment]:
    """The same stretch of neighbouring segments, cut anew where it holds least: several layers as one, or a layer in
    parts (Chen et al. 2016: for equal layers, groups of the square root of their number)."""
    values = table(jaxpr)
    grid = _Grid(_jax.open_jaxpr(jaxpr), forward_of(jaxpr, span, values), values, whole)
    first, last = run[0].start, run[-1].stop
    cuts = grid.best([p for p in grid.candidates([s.start for s in run] + [last]) if first <= p <= last])
    return [
        Segment(a, z, _majority([s.name for s in run if s.start < z and a < s.stop]))
        for a, z in itertools.pairwise(cuts)
    ]
