"""What holds the memory of one device from the start of a step to its end, by class: the planner's own liveness.

The moments are the planner's steps in their order, loops written out once in their place; they are not seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lensjax.cost.heap import Buffer, live, pack
from lensjax.cost.levels_host import off_device
from lensjax.cost.memory import PLAIN, Habits, habits_of, heap_of, outside
from lensjax.cost.price import lowered_for
from lensjax.partition import partition
from lensjax.partition.data import Partitioned
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.topology.cluster import Cluster


@dataclasses.dataclass(frozen=True, eq=False)
class Composition:
    """Bytes per device over a step.

    classes:   class -> bytes at each moment, float[moments], those that live throughout first: the roles of the
               arguments ("parameter", "optimizer", "batch", ...), "results", "activations", "gradients",
               "communication", "temporaries" (`lensjax.cost.purpose`).
    at:        the moment of the peak.
    fragments: what the block of temporaries is larger than what is ever alive in it at once.
    """

    classes: Mapping[str, np.ndarray]
    at: int
    fragments: float

    @property
    def peak_by(self) -> dict[str, float]:
        """Class -> bytes at the peak; they sum up to what must fit."""
        held = {k: float(v[self.at]) for k, v in self.classes.items()}
        return {k: v for k, v in {**held, "fragments": self.fragments}.items() if v}

    @property
    def moments(self) -> int:
        return max(map(len, self.classes.values()), default=1)

    @property
    def peak(self) -> float:
        """What must fit: equal to the prediction's."""
        return sum(self.peak_by.values())


# From what lives throughout to what comes and goes.
_ORDER = ("results", "activations", "gradients", "communication", "temporaries")


def composition(p: Partitioned, habits: Habits = PLAIN, roles: Sequence[str] | None = None) -> Composition:
    """The composition of a partitioned step; the arguments as in `lensjax.cost.memory.memory`."""
    heap = heap_of(p, habits, roles)
    most, when = live(heap.buffers)
    moments = max((b.end for b in heap.buffers), default=0) + 1
    fixed: dict[str, float] = {}
    for i, value in enumerate(p.arguments):
        role = roles[i] if roles is not None and i < len(roles) else "arguments"
        fixed[role] = fixed.get(role, 0.0) + value.bytes
    fixed["results"] = outside(p)[1]
    classes = {k: np.full(moments, v) for k, v in fixed.items() if v}
    for kind in _ORDER:
        pieces = [b for b in heap.pieces if b.kind == kind and b.size]
        if pieces:
            classes[kind] = _alive(pieces, moments)
    return Composition(classes, when, pack(heap.buffers) - most)


def _alive(pieces: Sequence[Buffer], moments: int) -> np.ndarray:
    change = np.zeros(moments + 1)
    for b in pieces:
        change[b.start] += b.size
        change[b.end + 1] -= b.size
    return np.cumsum(change)[:moments]


def composition_of(program: Program, plan: Plan, cluster: Cluster) -> Composition:
    """The composition of a program under a plan: of what `lensjax.cost.price.price` prices. Raises as it does."""
    partitioned = partition(lower(emit(program, plan, abstract_mesh(plan)), lowered_for(plan, cluster)))
    roles = [a.role for a in program.arguments]
    habits = habits_of(cluster.device, alone=not partitioned.collectives)
    return composition(off_device(partitioned).program, habits, roles)
