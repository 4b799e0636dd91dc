"""How long a step takes when communication hides behind independent computation.

Two resources, compute and network, each doing one thing at a time. A collective starts when what it sends is ready and
the network is free; of the operations that are ready the earliest in the program runs next, of the collectives the one
that the longest chain waits for. Loops run body after body, with nothing carried over from one to the next. This is
list scheduling (Graham 1969), which is what XLA's latency-hiding scheduler does with a cost model
(xla/service/latency_hiding_scheduler.cc). TPUs always have it; for GPUs a step is compiled with it (`passes.emit`).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence

from lensjax.cost.communication import Prices
from lensjax.partition.data import Collective, Operation, Region

Item = Operation | Collective | Region


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a region, all its trips: `total` with overlap, `compute` and `comm` each alone."""

    total: float
    compute: float
    comm: float

    @property
    def exposed(self) -> float:
        """Seconds that communication adds."""
        return self.total - self.compute


def timeline(region: Region, prices: Prices, compute: Callable[[Operation], float], overlap: bool = True) -> Times:
    """Times of a region. `compute` gives the seconds of one operation; without `overlap` everything waits in turn."""
    waits = _dependencies(region.items)
    stages = _stages(region.items, waits)
    where = [i for i, x in enumerate(region.items) if isinstance(x, Collective)]
    priced = prices.calls([(region.items[i], stages[i]) for i in where])  # type: ignore[misc]
    seconds = dict(zip(where, priced))
    inner: dict[int, Times] = {}
    for i, x in enumerate(region.items):
        if isinstance(x, Region):
            inner[i] = timeline(x, prices, compute, overlap)
            seconds[i] = inner[i].total
        elif isinstance(x, Operation):
            seconds[i] = compute(x)
    nested = [t for t in inner.values()]
    comm = sum(priced) + sum(t.comm for t in nested)
    work = sum(seconds[i] for i, x in enumerate(region.items) if isinstance(x, Operation))
    work += sum(t.compute for t in nested)
    total = _makespan(region.items, waits, seconds) if overlap else sum(seconds.values())
    return Times(total * region.trips, work * region.trips, comm * region.trips)


def _dependencies(items: tuple[Item, ...]) -> list[set[int]]:
    """For each item, the items that make what it reads."""
    made: dict[int, int] = {}
    waits: list[set[int]] = []
    for i, x in enumerate(items):
        waits.append({made[v] for v in x.reads if v in made})
        made.update((v, i) for v in x.writes)
    return waits


def _stages(items: tuple[Item, ...], waits: list[set[int]]) -> list[int]:
    """How many collectives each item waits for in turn: those with equal numbers can be combined."""
    stages: list[int] = []
    for i, x in enumerate(items):
        before = max((stages[j] for j in waits[i]), default=0)
        stages.append(before + (isinstance(x, Collective | Region)))
    return stages


def _makespan(items: tuple[Item, ...], waits: list[set[int]], seconds: dict[int, float]) -> float:
    left = [len(w) for w in waits]
    after: dict[int, list[int]] = defaultdict(list)
    for i, w in enumerate(waits):
        for j in w:
            after[j].append(i)
    done, rest = [0.0] * len(items), _rests(after, seconds)
    queues = (_Queue(range(len(items))), _Queue([-t for t in rest]))  # compute, network
    free = [0.0, 0.0]

    def enqueue(i: int) -> None:
        when = max((done[j] for j in waits[i]), default=0.0)
        queues[isinstance(items[i], Collective)].add(when, i)

    for i in range(len(items)):
        if not left[i]:
            enqueue(i)
    while queues[0] or queues[1]:
        kind = min((k for k in (0, 1) if queues[k]), key=lambda k: queues[k].start(free[k]))
        start, i = queues[kind].next(free[kind])
        if isinstance(items[i], Region):  # a loop uses both
            start = max(start, free[1])
            free[1] = start + seconds[i]
        done[i] = free[kind] = start + seconds[i]
        for j in after[i]:
            left[j] -= 1
            if not left[j]:
                enqueue(j)
    return max(done, default=0.0)


def _rests(after: dict[int, list[int]], seconds: dict[int, float]) -> list[float]:
    """For each item, the seconds from its start to the end of all that waits for it, with nothing in the way."""
    rest = [0.0] * len(seconds)
    for i in reversed(range(len(rest))):
        rest[i] = seconds[i] + max((rest[j] for j in after[i]), default=0.0)
    return rest


class _Queue:
    """What waits for one resource: items by when they are ready, and those that are, by rank, then by their place in
    the program. The times asked for never go back."""

    def __init__(self, rank: Sequence[float]):
        self.rank = rank
        self.later: list[tuple[float, int]] = []
        self.ready: list[tuple[float, int]] = []

    def __bool__(self) -> bool:
        return bool(self.later or self.ready)

    def add(self, when: float, i: int) -> None:
        heapq.heappush(self.later, (when, i))

    def start(self, now: float) -> float:
        """When the next item can start on a resource that is free at `now`."""
        return now if self.ready else max(now, self.later[0][0])

    def next(self, now: float) -> tuple[float, int]:
        """(start, item): the first by rank among those that are ready now; else the first that is ready."""
        while self.later and self.later[0][0] <= now:
            i = heapq.heappop(self.later)[1]
            heapq.heappush(self.ready, (self.rank[i], i))
        return (now, heapq.heappop(self.ready)[1]) if self.ready else heapq.heappop(self.later)
