"""The price of a plan: what is priced is what runs.

price(plan) = score(partition(lower(passes(program, plan))))
"""

from __future__ import annotations

import dataclasses

from lensjax.cost.score import score
from lensjax.partition import partition
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.topology.cluster import Cluster


def price(program: Program, plan: Plan, cluster: Cluster) -> Plan:
    """The plan with its prediction for a cluster. Needs no device. Raises PlanError or BatchError where it does not
    apply."""
    emitted = emit(program, plan, abstract_mesh(plan))
    predicted = score(partition(lower(emitted, "cpu")), cluster, plan, program)
    predicted = dataclasses.replace(predicted, findings=(*predicted.findings, *emitted.notes))
    return dataclasses.replace(plan, predicted=predicted)
