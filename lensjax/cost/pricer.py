"""Pricing many plans of one program: lowered once for each skeleton, partitioned for each plan.

Where a plan's constraints stand in places that a lowered program has too, they are written into a copy of it, and those
that the plan has not are taken out (`marks`). That saves most of what lowering takes; the price is that of `price`, to
the bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from lensjax.cost.marks import Marked, Place, entries, marked
from lensjax.cost.price import lowered_for, priced
from lensjax.partition import Partitioned, Template, partition, template, without
from lensjax.passes.emit import Emitted, abstract_mesh, emit, lower
from lensjax.plan.plan import Plan
from lensjax.program.edit import all_equations
from lensjax.program.program import Program
from lensjax.topology.cluster import Cluster


class Pricer:
    """Prices plans of one program on one cluster. Equal plans are priced once."""

    def __init__(self, program: Program, cluster: Cluster):
        self.program, self.cluster = program, cluster
        # (platform, skeleton) -> the lowered programs that have it, each with its places and what was left of it for
        # other plans.
        self._lowered: dict[Any, list[_Lowered]] = {}
        self._emitted: dict[str, Emitted] = {}
        self._priced: dict[str, Plan] = {}

    def __call__(self, plan: Plan) -> Plan:
        """The plan with its prediction. Raises PlanError or BatchError where it does not apply."""
        return self.known(plan, self.price)

    def known(self, plan: Plan, price: Callable[[Plan], Plan]) -> Plan:
        """The plan with its prediction: what was found for it before, else what `price` finds."""
        key = content(plan)
        if key not in self._priced:
            self._priced[key] = price(plan)
        return dataclasses.replace(plan, predicted=self._priced[key].predicted)

    def is_known(self, plan: Plan) -> bool:
        """Whether this plan was priced before."""
        return content(plan) in self._priced

    def share(self, other: Pricer) -> None:
        """Takes over what another pricer of the same program and cluster has found."""
        self._lowered, self._priced = other._lowered, other._priced

    def price(self, plan: Plan) -> Plan:
        emitted = self._emit(plan)
        return priced(emitted, self._partitioned(emitted), self.cluster)

    def partitioned(self, plan: Plan) -> Partitioned:
        """What each device holds, computes and sends under a plan."""
        return self._partitioned(self._emit(plan))

    def constraints(self, plan: Plan) -> int:
        """How many sharding constraints a plan inserts. Of several plans, the one with the most is best priced first:
        its lowered program may serve the others. Raises as a price does."""
        key = content(plan)
        if key in self._priced:
            return 0
        if key not in self._emitted:
            self._emitted[key] = self._emit(plan)
        pinned = self._emitted[key].pinned
        if pinned is None:
            return 0
        return sum(e.primitive.name == "sharding_constraint" for e in all_equations(pinned))

    def _emit(self, plan: Plan) -> Emitted:
        found = self._emitted.pop(content(plan), None)  # once: an emission is as large as the program
        emitted = found or emit(self.program, plan, abstract_mesh(plan))
        return dataclasses.replace(emitted, plan=plan)

    def _partitioned(self, emitted: Emitted) -> Partitioned:
        plan = emitted.plan
        platform = lowered_for(plan, self.cluster)
        if emitted.pinned is None or any(e.primitive.name == "shard_map" for e in all_equations(self.program.jaxpr)):
            return partition(lower(emitted, platform))  # a loop over shares; or its mesh is part of the program
        this = marked(emitted)
        source, numbers = self._source(this, platform)
        if source is None:
            return partition(lower(emitted, platform))
        return partition(
            source,
            mesh=plan.mesh.shape,
            arguments={i: entries(s.spec, len(n)) for i, (s, n) in enumerate(zip(emitted.arguments, source.arguments))},
            results={
                i: entries(s.spec, len(n))
                for i, (s, n) in enumerate(zip(emitted.results, source.results))
                if s is not None
            },
            marks={n: this.specs[i] for i, n in enumerate(numbers)},
        )

    def _source(self, this: Marked, platform: str) -> tuple[Template | None, Sequence[int]]:
        """A template with exactly the constraints of a program, and the numbers that they have in it; None where it
        cannot be written into one."""
        known = self._lowered.setdefault((platform, this.skeleton), [])
        for lowered in known:
            numbers = this.within(lowered.places)
            if numbers is not None:
                return lowered.only(numbers), numbers
        source = template(lower(this.emitted, platform))
        # Where equal constraints of one value were merged, another plan's cannot be written apart.
        whole = set(source.marks) == set(this.specs)
        known.append(_Lowered(this.places, source if whole else None))
        return known[-1].source, range(len(this.places))


class _Lowered:
    """A lowered program with the places of its constraints, and its copies with fewer of them."""

    def __init__(self, places: tuple[Place, ...], source: Template | None):
        self.places, self.source = places, source
        self._fewer: dict[tuple[int, ...], Template] = {}

    def only(self, numbers: tuple[int, ...]) -> Template | None:
        if self.source is None or len(numbers) == len(self.places):
            return self.source
        if numbers not in self._fewer:
            self._fewer[numbers] = without(self.source, set(range(len(self.places))) - set(numbers))
        return self._fewer[numbers]


def content(plan: Plan) -> str:
    """What a plan says, not its name or what it predicted before. Kept with the plan, as it is long."""
    if "content" not in plan.__dict__:
        plan.__dict__["content"] = json.dumps(plan.replace(name="").to_dict())
    return plan.__dict__["content"]
