"""A search problem: a step, a cluster, what the user decided, and the space with its inner model, made when asked for.

This is what a strategy gets (see `strategies`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from lensjax.cost.compute import LAUNCH, MEMORY_EFFICIENCY
from lensjax.partition.whole import Whole, whole
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.pins import Pin
from lensjax.plan.plan import Micro, Plan
from lensjax.program.program import Program
from lensjax.search.build import build_plan
from lensjax.search.inner import Case, Model
from lensjax.search.links import Links
from lensjax.search.presets import enumerate_presets, preset
from lensjax.search.solve import Solution
from lensjax.search.space import Axes, Shape, axes_of, shapes
from lensjax.search.tables import Tables, tables
from lensjax.topology.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Problem:
    """`memory`: bytes per device that a plan may hold. `stop()` says when the time that was given is up. `micro`: in
    how many micro-batches each device goes through its part of the batch."""

    program: Program
    cluster: Cluster
    memory: float
    pins: tuple[Pin, ...] = ()
    stop: Callable[[], bool] = lambda: False
    micro: int = 1

    @property
    def tier_of(self) -> dict[int, str]:
        return {t.size: t.name for t in self.cluster.tiers}

    @functools.cached_property
    def unsplit(self) -> Whole:
        """The step before anything is split. Raises PlanError for a step that names a mesh of its own."""
        one = preset("dp", self.program, 1)
        return whole(lower(emit(self.program, one, abstract_mesh(one)), "cpu"))

    @functools.cached_property
    def tables(self) -> Tables:
        """The unsplit step's cost tables. Raises as `unsplit` does."""
        return self.tables_of(self.program, self.unsplit)

    def tables_of(self, program: Program, unsplit: Whole) -> Tables:
        """The cost tables of a program, or of a part of one, on this problem's devices."""
        device = self.cluster.device
        bandwidth = device.memory_bandwidth * MEMORY_EFFICIENCY
        return tables(program, unsplit, device, bandwidth, LAUNCH.get(device.platform, 0.0))

    @functools.cached_property
    def axes(self) -> Axes:
        return axes_of(self.program, self.tables)

    @functools.cached_property
    def model(self) -> Model:
        return Model(self.program, self.tables, Links(self.cluster, self.cluster.devices), self.micro)

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Every mesh with its rules."""
        found = tuple(shapes(self.program, self.axes, self.cluster.devices))
        examples = self.program.batch.size
        return tuple(s for s in found if self.micro == 1 or examples % (s.ways("data", "expert") * self.micro) == 0)

    def with_memory(self, memory: float) -> Problem:
        """The same problem with other memory; what was made from the program and the cluster is kept."""
        other = dataclasses.replace(self, memory=memory)
        made = ("unsplit", "tables", "axes", "model", "shapes")
        other.__dict__.update({k: self.__dict__[k] for k in made if k in self.__dict__})
        return other

    def in_micro_batches(self, count: int) -> Problem:
        """The same problem with the batch in so many pieces; what does not depend on that is kept."""
        other = dataclasses.replace(self, micro=count)
        other.__dict__.update({k: self.__dict__[k] for k in ("unsplit", "tables", "axes") if k in self.__dict__})
        return other

    def floors(self) -> Iterator[tuple[float, Shape]]:
        """Each shape with the seconds that it cannot undercut."""
        for s in self.shapes:
            yield self.model.floor(s.pattern, s.sizes), s

    def cases(self, shape: Shape) -> Iterator[Case]:
        """The cases of a shape: gathering split weights again for the backward, or keeping them. None where its
        activations alone do not fit."""
        if self.model.least(shape.pattern, shape.sizes) > self.memory:
            return
        for again in (True, False):
            yield self.model.case(shape.pattern, shape.sizes, again)

    def plan(self, solution: Solution) -> Plan:
        """The plan of a solution. Raises PlanError where a pin does not apply to it."""
        made = build_plan(self.program, self.tables, self.axes, solution, pins=self.pins, tier_of=self.tier_of)
        if self.micro == 1:
            return made
        return made.replace(micro=Micro(self.micro), name=f"{made.name} in {self.micro} micro-batches")

    def preset_names(self) -> Sequence[str]:
        return enumerate_presets(self.cluster.devices, [t.size for t in self.cluster.tiers])

    def preset(self, name: str) -> Plan:
        """The plan of a preset, pins applied. Raises PlanError where it does not apply."""
        return preset(name, self.program, self.cluster.devices, pins=self.pins, tier_of=self.tier_of)
