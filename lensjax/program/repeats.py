"""Repeated stretches of a body: the same operations on the same shapes, several times in a row.

Equations become numbers (equal numbers: the same operation on the same shapes). A stretch in which every number comes
again d places on has period d; the longest stretches are taken first. A period can be cut anywhere, so it is cut where
the fewest bytes cross from one repeat to the next: between layers that is the residual stream alone. Names and scopes
play no part: NNX records none.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lensjax import _jax
from lensjax.program.edit import is_var, shape_of
from lensjax.program.roles import itemsize

# Windows of this many equations tell where the program comes again; single equations find repeats of a few equations.
_WINDOWS = (8, 1)
_CANDIDATES = 96


@dataclasses.dataclass(frozen=True)
class Run:
    """`count` repeats of `period` equations of one body, from equation `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    def span(self, r: int) -> range:
        """Equations of repeat `r`."""
        return range(self.start + r * self.period, self.start + (r + 1) * self.period)

    def where(self, i: int) -> tuple[int, int] | None:
        """(repeat, position in it) of equation `i`; None outside."""
        return divmod(i - self.start, self.period) if self.start <= i < self.stop else None


def find_runs(eqns: Sequence[Any], keep: Callable[[Any], bool], outvars: Sequence[Any] = ()) -> list[Run]:
    """The repeated stretches of a body, in order, none overlapping another. A period has an equation that `keep`
    accepts, and every repeat reads something that the one before made. Within a run, equation k of every repeat does
    the same on the same shapes, and takes each operand from the same place in its own repeat, from the same place in a
    repeat before, or from outside the run."""
    numbers = np.array(_numbers(eqns), dtype=np.int64)
    kept = np.concatenate([[0], np.cumsum([keep(e) for e in eqns])]) if eqns else np.zeros(1)
    made = {v: (i, k) for i, e in enumerate(eqns) for k, v in enumerate(e.outvars)}
    taken = np.zeros(len(eqns), dtype=bool)
    found: list[Run] = []
    stretches = [(length + d, d, a) for d in _periods(numbers) for a, length in _matches(numbers, d)]
    for _, d, a in sorted(stretches, key=lambda x: (-x[0], x[1], x[2])):
        for first, last in _free(taken, a, a + _length(numbers, a, d)):
            if last - first < 2 * d or kept[first + d] == kept[first]:
                continue
            run = _consistent(eqns, made, _cut(eqns, made, first, last, d))
            if run is not None:
                found.append(run)
                taken[run.start : run.stop] = True
    return sorted(found, key=lambda r: r.start)


def _length(numbers: np.ndarray, a: int, d: int) -> int:
    """How far the stretch of period d from a goes on."""
    differs = np.flatnonzero(numbers[a : len(numbers) - d] != numbers[a + d :])
    return d + (int(differs[0]) if len(differs) else len(numbers) - d - a)


def _free(taken: np.ndarray, first: int, last: int) -> list[tuple[int, int]]:
    """The parts of [first, last) that no run has taken."""
    return [(first + a, first + a + n) for a, n in _stretches(~taken[first:last])]


def _stretches(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """(start, length) of the maximal stretches of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return ((int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2]))


def _matches(numbers: np.ndarray, d: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the stretches in which every number comes again d places on, at least d long."""
    if 2 * d > len(numbers):
        return iter(())
    return ((a, n) for a, n in _stretches(numbers[:-d] == numbers[d:]) if n >= d)


def _periods(numbers: np.ndarray) -> list[int]:
    """Distances at which windows of the program come again, the most frequent ones."""
    found: collections.Counter[int] = collections.Counter()
    for width in _WINDOWS:
        last: dict[Any, int] = {}
        for i in range(len(numbers) - width + 1):
            window = tuple(numbers[i : i + width])
            if window in last:
                found[i - last[window]] += 1
            last[window] = i
    return [d for d, _ in found.most_common(_CANDIDATES)]


# ---- where to cut ---------------------------------------------------------------------------------------------------


def _cut(eqns: Sequence[Any], made: dict[Any, tuple[int, int]], first: int, last: int, d: int) -> Run:
    """The run in the stretch [first, last) with the most repeats, and of these the one with the narrowest cuts."""
    width = np.zeros(last - first + 1)
    ends: dict[Any, int] = {}
    for i in range(first, last):
        for a in eqns[i].invars:
            if is_var(a) and first <= made.get(a, (-1, 0))[0]:
                ends[a] = i
    for v, end in ends.items():
        width[made[v][0] + 1 - first] += _nbytes(v)
        width[end + 1 - first] -= _nbytes(v)
    width = np.cumsum(width)
    count = (last - first) // d
    offsets = range((last - first) - count * d + 1)
    inner = [float(np.mean(width[o + d : o + count * d : d])) for o in offsets]
    best = min(offsets, key=lambda o: (inner[o], o))
    return Run(first + best, d, count)


def _nbytes(v: Any) -> int:
    size = itemsize(v.aval.dtype) if hasattr(v.aval, "dtype") else 0
    for n in shape_of(v):
        size *= n
    return size


def _consistent(eqns: Sequence[Any], made: dict[Any, tuple[int, int]], run: Run) -> Run | None:
    """The longest part of a run whose repeats are wired alike; None where no two are."""
    labels = [[_label(run, made, r, a) for i in run.span(r) for a in eqns[i].invars] for r in range(run.count)]

    def alike(r: int) -> bool:
        # What repeat r takes from further back than the run goes looks like something from outside.
        return all(x == y or (x is None and y is not None and y[0] > r) for x, y in zip(labels[r], labels[r + 1]))

    parts = [(n, -a) for a, n in _stretches(np.array([alike(r) for r in range(run.count - 1)], dtype=bool))]
    if not parts:
        return None
    n, a = max(parts)
    if not any(x is not None and x[0] > 0 for x in labels[-a + 1]):
        return None  # side by side (two projections of one value), not one after the other
    return Run(run.start - a * run.period, run.period, n + 1)


def _label(run: Run, made: dict[Any, tuple[int, int]], r: int, atom: Any) -> tuple[int, int, int] | None:
    """(how many repeats back, position, result) of what an operand of repeat `r` is; None for outside the run."""
    if not is_var(atom) or atom not in made:
        return None
    i, k = made[atom]
    place = run.where(i)
    return None if place is None else (r - place[0], place[1], k)


# ---- equations as numbers -------------------------------------------------------------------------------------------


def _numbers(eqns: Sequence[Any]) -> list[int]:
    """A number for each equation: equal for the same operation on the same shapes."""
    known: dict[Any, int] = {}
    return [known.setdefault(_key(e), len(known)) for e in eqns]


def _key(eqn: Any) -> Any:
    # Layers that draw random numbers differ in what they fold into the key, and in nothing else.
    seeds = eqn.primitive.name == "random_fold_in"
    ins = tuple(a.aval if is_var(a) or seeds else (a.aval, _value(a.val)) for a in eqn.invars)
    params = tuple((k, _param(eqn.params[k])) for k in sorted(eqn.params))
    return eqn.primitive.name, ins, tuple(v.aval for v in eqn.outvars), params


def _value(value: Any) -> Any:
    array = np.asarray(value)
    return (str(value), array.dtype.str) if array.ndim == 0 else hashlib.sha256(array.tobytes()).digest()


def _param(value: Any) -> Any:
    if _jax.is_jaxpr(value):
        return _structure(value)
    if isinstance(value, tuple | list):
        return tuple(_param(v) for v in value)
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value


def _structure(jaxpr: Any) -> Any:
    """A body without the identities of its variables."""
    inner = _jax.open_jaxpr(jaxpr)
    number = {v: i for i, v in enumerate([*inner.invars, *inner.constvars])}
    out = []
    for eqn in inner.eqns:
        out.append((_key(eqn), tuple(number.get(a, -1) if is_var(a) else -1 for a in eqn.invars)))
        for v in eqn.outvars:
            number[v] = len(number)
    results = tuple(number.get(a, -1) if is_var(a) else _value(a.val) for a in inner.outvars)
    return tuple(v.aval for v in inner.invars), tuple(out), results
