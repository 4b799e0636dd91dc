"""A search problem: a step, a cluster, what the user decided, and the space with its inner model, made when asked for.

This is what a strategy gets (see `strategies`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from lensjax.cost.by_layers import expanded, restricted
from lensjax.cost.compute import LAUNCH, MEMORY_EFFICIENCY
from lensjax.partition.whole import Whole, whole
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.pins import Pin
from lensjax.plan.plan import Micro, Plan
from lensjax.program.folded import Folded, folded
from lensjax.program.program import Program
from lensjax.search.build import build_plan
from lensjax.search.inner import Case, Model
from lensjax.search.links import Links
from lensjax.search.moments import Tags
from lensjax.search.presets import enumerate_presets, preset
from lensjax.search.solve import Solution
from lensjax.search.space import Axes, Shape, axes_of, shapes
from lensjax.search.tables import Tables, tables
from lensjax.topology.cluster import Cluster

# Names of what the equal layers of a folded step do: forward, backward, and outside of them.
TAGS = ("lensjax.layers.forward", "lensjax.layers.backward", "lensjax.layers.outside")
# What is made of the program and the cluster alone.
_MADE = ("fold", "unsplit", "own", "tables", "axes")


@dataclasses.dataclass(frozen=True)
class Problem:
    """`memory`: bytes per device that a plan may hold. `stop()` says when the time that was given is up. `micro`: in
    how many micro-batches each device goes through its part of the batch. `folds`: whether many equal layers that are
    written out are read as a few that stand for all (`lensjax.program.folded`); then `axes`, `shapes` and what they
    number are those of the step that is `seen`."""

    program: Program
    cluster: Cluster
    memory: float
    pins: tuple[Pin, ...] = ()
    stop: Callable[[], bool] = lambda: False
    micro: int = 1
    folds: bool = True

    @functools.cached_property
    def fold(self) -> Folded | None:
        """The step by two shorter ones; None where all of it is read. Pins may name single layers."""
        return folded(self.program) if self.folds and not self.pins else None

    @property
    def seen(self) -> Program:
        """The step that is read: the whole one, or one with fewer of its equal layers."""
        return self.fold.longer.program if self.fold is not None else self.program

    @functools.cached_property
    def written_out(self) -> Problem:
        """The same problem with all layers read."""
        return self if self.fold is None else dataclasses.replace(self, folds=False)

    def narrowed(self, plan: Plan) -> Plan | None:
        """A plan as one of the step that is seen; None where it says of single layers what that cannot."""
        return plan if self.fold is None else restricted(plan, self.fold.longer, self.program)

    @property
    def tier_of(self) -> dict[int, str]:
        return {t.size: t.name for t in self.cluster.tiers}

    @functools.cached_property
    def unsplit(self) -> Whole:
        """The step before anything is split. Raises PlanError for a step that names a mesh of its own."""
        one = preset("dp", self.seen, 1)
        read = self.fold.tagged(*TAGS) if self.fold is not None else self.program
        return whole(lower(emit(read, one, abstract_mesh(one)), "cpu"))

    @functools.cached_property
    def tables(self) -> Tables:
        """The unsplit step's cost tables; groups are of all its parameters. Raises as `unsplit` does."""
        return self.own if self.fold is None else written_out(self.own, self.fold)

    @functools.cached_property
    def own(self) -> Tables:
        """The tables with the parameters of the step that is seen."""
        return self.tables_of(self.seen, self.unsplit)

    def tables_of(self, program: Program, unsplit: Whole) -> Tables:
        """The cost tables of a program, or of a part of one, on this problem's devices."""
        device = self.cluster.device
        bandwidth = device.memory_bandwidth * MEMORY_EFFICIENCY
        tags = Tags(*TAGS, self.fold.further) if self.fold is not None and program is self.seen else None
        return tables(program, unsplit, device, bandwidth, LAUNCH.get(device.platform, 0.0), tags)

    @functools.cached_property
    def axes(self) -> Axes:
        return axes_of(self.seen, self.own)

    @functools.cached_property
    def model(self) -> Model:
        return Model(self.program, self.tables, Links(self.cluster, self.cluster.devices), self.micro)

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Every mesh with its rules."""
        found = tuple(shapes(self.seen, self.axes, self.cluster.devices))
        examples = self.program.batch.size
        return tuple(s for s in found if self.micro == 1 or examples % (s.ways("data", "expert") * self.micro) == 0)

    def with_memory(self, memory: float) -> Problem:
        """The same problem with other memory; what was made from the program and the cluster is kept."""
        other = dataclasses.replace(self, memory=memory)
        made = (*_MADE, "model", "shapes")
        other.__dict__.update({k: self.__dict__[k] for k in made if k in self.__dict__})
        return other

    def in_micro_batches(self, count: int) -> Problem:
        """The same problem with the batch in so many pieces; what does not depend on that is kept."""
        other = dataclasses.replace(self, micro=count)
        other.__dict__.update({k: self.__dict__[k] for k in _MADE if k in self.__dict__})
        if "model" in self.__dict__:
            own = self.model
            other.__dict__["model"] = Model(self.program, self.tables, own.links, count, like=own)
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
        made = build_plan(self.seen, self.own, self.axes, solution, pins=self.pins, tier_of=self.tier_of)
        made = made if self.fold is None else expanded(made, self.fold)
        if self.micro == 1:
            return made
        return made.replace(micro=Micro(self.micro), name=f"{made.name} in {self.micro} micro-batches")

    def preset_names(self) -> Sequence[str]:
        return enumerate_presets(self.cluster.devices, [t.size for t in self.cluster.tiers])

    def preset(self, name: str) -> Plan:
        """The plan of a preset, pins applied. Raises PlanError where it does not apply."""
        made = preset(name, self.seen, self.cluster.devices, pins=self.pins, tier_of=self.tier_of)
        return made if self.fold is None else expanded(made, self.fold)


def written_out(t: Tables, fold: Folded) -> Tables:
    """The tables of the longer of a fold's steps, with the parameters of all layers: each like the one that plays its
    part."""
    at = {i: k for k, i in enumerate(fold.longer.kept)} | fold.like
    groups = tuple(
        dataclasses.replace(g, leaves=tuple(sorted(j for i in g.leaves for j in fold.alike[i]))) for g in t.groups
    )
    dims = tuple(t.argument_dims[at[i]] if i in at else () for i in range(len(fold.program.arguments)))
    fixed = sum(a.nbytes for a in fold.program.arguments if a.role in ("other", "key"))
    return dataclasses.replace(t, groups=groups, argument_dims=dims, fixed_bytes=float(fixed))
