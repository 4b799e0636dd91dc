"""How a group of parameters may be stored, and what each way takes: the choices that ZeRO-1 to 3, FSDP and HSDP are.

Over the mesh axes that split the batch (or the sequence), parameters may be split over some, and optimizer state and
gradients over these or more: nothing split is plain data parallelism, state over all is ZeRO-1 and 2, both over all
ZeRO-3, both over the inner axis HSDP. A split parameter is gathered before it is read: once and kept, or again for the
backward.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from lensjax.cost.communication import COMBINE
from lensjax.program.program import Program
from lensjax.search.links import Links
from lensjax.search.presets import split
from lensjax.search.rules import Laid
from lensjax.search.sums import Dims
from lensjax.search.tables import Group, Tables

# Options of so many meshes are kept for a pattern.
KEPT = 256

# Mesh axes of each dimension.
Axes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Storage:
    """Mesh axes that split the parameters, and the optimizer state and gradients, of a group."""

    params: tuple[int, ...]
    state: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The mesh axes in the order in which they divide a dimension: a part of the state is a part of the part of
        the parameters that the same device holds."""
        return (*self.params, *(m for m in self.state if m not in self.params))


@dataclasses.dataclass(frozen=True)
class Option:
    """One choice for a group: seconds of communication `net` and of computation `work` by region, bytes that it holds
    throughout (`held`), and by how much it divides the group's stored buffers (`share`: 1 whole, 0.125 in eight).
    `squares`: by region, the sum of the squares of the seconds of each call of `net`. `pulled`, `pulled_squares`: of
    these what gathers weights, once for each piece of the batch."""

    storage: Storage
    net: np.ndarray
    work: np.ndarray
    held: float
    share: float
    squares: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1))
    pulled: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1))
    pulled_squares: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1))


def storages(axes: Sequence[int]) -> tuple[Storage, ...]:
    """All ways to store a group over these mesh axes, simplest first."""
    return _storages(tuple(axes))


@functools.cache
def _storages(axes: tuple[int, ...]) -> tuple[Storage, ...]:
    subsets = [s for n in range(len(axes) + 1) for s in itertools.combinations(axes, n)]
    return tuple(Storage(p, s) for s in subsets for p in subsets if set(p) <= set(s))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What counts of a leaf: `count` leaves of this shape, stacked or not, with these mesh axes by rule (axes of each
    dimension); bytes of one, and of all the state that follows it."""

    shape: tuple[int, ...]
    stacked: bool
    spec: Axes
    nbytes: float
    state: float
    count: int


def leaves_of(t: Tables, program: Program, spec_of: Callable[[Dims], Axes]) -> list[list[Leaf]]:
    """The leaves of each group, equal ones counted together. `spec_of`: mesh axes of each dimension, by rule."""
    moments: dict[int, float] = {}
    for a in program.arguments:
        if a.role == "optimizer" and a.follows is not None:
            moments[a.follows] = moments.get(a.follows, 0.0) + a.nbytes
    out = []
    for group in t.groups:
        found: dict[tuple, list[int]] = {}
        for i in group.leaves:
            spec = spec_of(t.argument_dims[i])
            found.setdefault((program.arguments[i].shape, spec), []).append(i)
        leaves = []
        for (shape, spec), i in found.items():
            nbytes = float(program.arguments[i[0]].nbytes)
            leaves.append(Leaf(shape, group.layer is not None, spec, nbytes, moments.get(i[0], 0.0), len(i)))
        out.append(leaves)
    return out


@functools.lru_cache(maxsize=200_000)
def parts(
    shape: tuple[int, ...],
    stacked: bool,
    spec: Axes,
    axes: tuple[int, ...],
    along: tuple[int, ...],
    sizes: tuple[int, ...],
) -> int:
    """In how many parts a leaf is stored when `axes` may split it further, of those of `along`: presets' rule, leaves
    that do not divide or are small stay whole."""
    names = {str(i): n for i, n in enumerate(sizes)}
    entries = tuple(tuple(str(m) for m in dim if shape[d] % sizes[m] == 0) for d, dim in enumerate(spec))
    entries = split(shape, entries, [str(m) for m in axes], names, stacked, [str(m) for m in along])
    return math.prod(names[a] for dim in entries for a in dim)


class Storing:
    """The options of every group under one pattern; `options` prices them for one set of mesh sizes. The last KEPT are
    kept: they do not depend on the memory that there is, nor on the pieces of the batch, and a search is repeated."""

    def __init__(self, t: Tables, laid: Laid, leaves: list[list[Leaf]]):
        self.t, self.laid, self.leaves = t, laid, leaves
        self.reducing = laid.pattern.axes("data", "expert", "sequence")
        self.axes = [
            tuple(m for m in self.reducing if not laid.weights[g, m]) for g in range(len(t.groups))
        ]  # fmt: skip
        self.options = functools.lru_cache(maxsize=KEPT)(self._options)

    def _options(self, sizes: tuple[int, ...], links: Links, again: bool) -> list[list[Option]]:
        together: dict[int | None, float] = {}
        for group, leaves in zip(self.t.groups, self.leaves):
            trips = self.t.regions[group.forward] if group.layer is not None else 1
            size = sum(x.nbytes * x.count * group.wire / _item(x) for x in leaves) / trips
            together[group.layer] = together.get(group.layer, 0.0) + size
        seconds = [functools.cache(functools.partial(_seconds, sizes, links, together[g.layer])) for g in self.t.groups]
        return [self._group(g, group, sizes, seconds[g], again) for g, group in enumerate(self.t.groups)]

    def _group(self, g: int, group: Group, sizes: tuple[int, ...], seconds, again: bool) -> list[Option]:
        trips = self.t.regions[group.forward] if group.layer is not None else 1
        regions = len(self.t.regions)
        found: dict[tuple, Option] = {}
        for storage in storages(tuple(m for m in self.axes[g] if sizes[m] > 1)):
            net, work, squares = np.zeros(regions), np.zeros(regions), np.zeros(regions)
            travels = functools.partial(_travels, net, squares, seconds, sum(leaf.count for leaf in self.leaves[g]))
            held, stored, whole = 0.0, 0.0, 0.0
            travel = np.zeros(3)  # bytes that are gathered, reduced with a scatter, reduced whole
            updated = 0.0
            for leaf in self.leaves[g]:
                base = parts(leaf.shape, leaf.stacked, leaf.spec, (), (), sizes)
                p = parts(leaf.shape, leaf.stacked, leaf.spec, storage.params, storage.order, sizes)
                s = parts(leaf.shape, leaf.stacked, leaf.spec, storage.state, storage.order, sizes)
                n = leaf.nbytes * leaf.count
                held += n / p + leaf.state * leaf.count / s
                stored, whole = stored + n / s, whole + n
                used = n / base * group.wire / _item(leaf)
                travel += np.array([used if p > base else 0.0, used if s > base else 0.0, used if s == base else 0.0])
                updated += n / p if s > p else 0.0
            share = stored / whole if whole else 1.0
            key = (held, share, tuple(travel), updated, storage if travel[0] or travel[1] else ())
            rest = tuple(m for m in self.reducing if m not in storage.state and not self.laid.weights[g, m])
            every = tuple(m for m in self.reducing if not self.laid.weights[g, m])
            ways = math.prod(sizes[m] for m in storage.state)
            if travel[0]:
                if again and group.layer is not None:
                    travels(group.forward, trips, "all_gather", storage.params, travel[0])
                    travels(group.backward, trips, "all_gather", storage.params, travel[0])
                elif group.layer is not None:
                    work[0] += seconds("all_gather", storage.params, travel[0])  # before the loop: nothing runs beside
                else:
                    travels(0, 1, "all_gather", storage.params, travel[0])
            pulled, pulled_squares = net.copy(), squares.copy()
            call = trips if group.layer is not None else 1
            if travel[1]:
                travels(group.backward, call, "reduce_scatter", storage.state, travel[1])
                travels(group.backward, call, "all_reduce", rest, travel[1] / ways)
            if travel[2]:
                travels(group.backward, call, "all_reduce", every, travel[2])
            if updated:
                more = tuple(m for m in storage.state if m not in storage.params)
                work[0] += seconds("all_gather", more, updated)  # the step's last: nothing runs beside it
            work[0] += self.t.stored_bytes[g] * share / self.t.bandwidth
            found.setdefault(key, Option(storage, net, work, held, share, squares, pulled, pulled_squares))
        return list(found.values())


def _seconds(
    sizes: tuple[int, ...], links: Links, together: float, op: str, axes: tuple[int, ...], nbytes: float
) -> float:
    """Seconds of one call, or of this part of the call that it is combined into: collectives of one kind that do not
    wait for each other become calls of up to COMBINE bytes. `together`: bytes of all that travel at the same time."""
    call = max(nbytes, min(together, COMBINE))
    return float(links.seconds(op, sizes, axes, call)) * nbytes / call if call else 0.0


def _travels(
    net: np.ndarray,
    squares: np.ndarray,
    seconds: Callable[[str, tuple[int, ...], float], float],
    leaves: int,
    region: int,
    trips: int,
    op: str,
    axes: tuple[int, ...],
    nbytes: float,
) -> None:
    """Adds what a group sends, `nbytes` in so many trips, to the seconds and square seconds of a region: leaf by leaf,
    small ones together."""
    one = seconds(op, axes, nbytes / trips)
    net[region] += trips * one
    squares[region] += trips * one**2 / max(1.0, min(leaves, nbytes / trips / COMBINE))


def _item(leaf: Leaf) -> float:
    """Bytes of an element."""
    return leaf.nbytes / max(1, math.prod(leaf.shape))
