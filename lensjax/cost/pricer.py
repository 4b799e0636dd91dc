"""Pricing many plans of one program: lowered once for each structure, partitioned for each plan.

Two plans have one structure when their passes insert the same equations and only the shardings in them differ (the
same tensors split, over whatever mesh). Then the second is written into the first's lowered module, which saves most of
what lowering takes; the price is that of `price`, to the bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend import core as jcore
from jax.sharding import PartitionSpec

from lensjax import _jax
from lensjax.cost.price import lowered_for, priced
from lensjax.partition import Partitioned, Template, partition, template
from lensjax.passes.emit import Emitted, abstract_mesh, emit, lower
from lensjax.plan.plan import Plan
from lensjax.program.edit import all_equations, is_var, map_bodies
from lensjax.program.program import Program
from lensjax.topology.cluster import Cluster


class Pricer:
    """Prices plans of one program on one cluster. Equal plans are priced once."""

    def __init__(self, program: Program, cluster: Cluster):
        self.program, self.cluster = program, cluster
        self._templates: dict[tuple, Template | None] = {}
        self._priced: dict[Any, Plan] = {}

    def __call__(self, plan: Plan) -> Plan:
        """The plan with its prediction. Raises PlanError or BatchError where it does not apply."""
        # By content, not by name or by what it predicted before.
        key = _Key(dataclasses.replace(plan, name="", predicted=None))
        if key not in self._priced:
            self._priced[key] = self.price(plan)
        return dataclasses.replace(plan, predicted=self._priced[key].predicted)

    def price(self, plan: Plan) -> Plan:
        emitted = emit(self.program, plan, abstract_mesh(plan))
        return priced(emitted, self._partitioned(emitted, plan), self.cluster)

    def partitioned(self, plan: Plan) -> Partitioned:
        """What each device holds, computes and sends under a plan."""
        return self._partitioned(emit(self.program, plan, abstract_mesh(plan)), plan)

    def _partitioned(self, emitted: Emitted, plan: Plan) -> Partitioned:
        platform = lowered_for(plan, self.cluster)
        if emitted.pinned is None or any(e.primitive.name == "shard_map" for e in all_equations(self.program.jaxpr)):
            return partition(lower(emitted, platform))  # a loop over shares; or its mesh is part of the program
        marked = _Marked(emitted)
        key = (platform, marked.structure)
        if key not in self._templates:
            source = template(lower(marked.emitted, platform))
            # Where equal constraints of one value were merged, another plan's cannot be written apart.
            whole = set(source.marks) == set(marked.specs)
            self._templates[key] = source if whole else None
            return partition(source)
        source = self._templates[key]
        if source is None:
            return partition(lower(emitted, platform))
        return partition(
            source,
            mesh=plan.mesh.shape,
            arguments={
                i: _entries(s.spec, len(n)) for i, (s, n) in enumerate(zip(emitted.arguments, source.arguments))
            },
            results={
                i: _entries(s.spec, len(n))
                for i, (s, n) in enumerate(zip(emitted.results, source.results))
                if s is not None
            },
            marks=marked.specs,
        )


class _Key:
    """A plan as a dictionary key (plans hold mappings, and compare by value)."""

    def __init__(self, plan: Plan):
        self.plan, self.text = plan, plan.to_json()

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


def _entries(spec: PartitionSpec, rank: int) -> tuple:
    """A PartitionSpec as a partition spec, None where a dimension is left open."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(
        None if e is PartitionSpec.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in entries
    )


class _Marked:
    """An emitted program whose sharding constraints are numbered: `emitted` carries the marks, `specs` says what each
    asks for, `structure` is equal for programs that differ in nothing else."""

    def __init__(self, emitted: Emitted):
        self.specs: dict[int, Any] = {}
        self._number: dict[Any, int] = {}
        self._facts: list[Any] = [tuple(i for i, s in enumerate(emitted.results) if s is not None)]
        jaxpr = self._body(emitted.pinned)
        self.emitted = dataclasses.replace(emitted, run=jcore.jaxpr_as_fun(_jax.close(jaxpr)))
        self.structure = tuple(self._facts)

    def _body(self, jaxpr: Any) -> Any:
        eqns = []
        for eqn in _jax.open_jaxpr(jaxpr).eqns:
            name = eqn.primitive.name
            atoms = tuple(self._named(a) if is_var(a) else str(a) for a in eqn.invars)
            self._facts.append(
                (
                    name,
                    atoms,
                    tuple(str(v.aval) for v in eqn.outvars),
                    str(eqn.params.get("new_dtype")),
                    eqn.params.get("length"),
                )
            )
            if name == "sharding_constraint":
                mark = len(self.specs)
                self.specs[mark] = _entries(eqn.params["sharding"].spec, len(eqn.outvars[0].aval.shape))
                source = eqn.source_info
                eqn = eqn.replace(
                    source_info=source.replace(name_stack=source.name_stack.extend(f"lensjax.mark.{mark}"))
                )
            else:
                eqn = map_bodies(eqn, lambda body, _: self._body(body))
            for v in eqn.outvars:
                self._named(v)
            eqns.append(eqn)
        inner = _jax.open_jaxpr(jaxpr)
        self._facts.append(tuple(self._named(a) if is_var(a) else str(a) for a in inner.outvars))
        return _jax.rebuild(jaxpr, eqns=eqns)

    def _named(self, v: Any) -> int:
        return self._number.setdefault(v, len(self._number))
