"""The price of a plan: what is priced is what runs.

price(plan) = score(partition(lower(passes(program, plan))))
"""

from __future__ import annotations

import dataclasses

from lensjax.cost.score import score
from lensjax.partition import Partitioned, partition
from lensjax.passes.emit import Emitted, abstract_mesh, emit, lower
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.topology.cluster import Cluster


def price(program: Program, plan: Plan, cluster: Cluster) -> Plan:
    """The plan with its prediction for a cluster. Needs no device. Raises PlanError or BatchError where it does not
    apply."""
    emitted = emit(program, plan, abstract_mesh(plan))
    return priced(emitted, partition(lower(emitted, lowered_for(plan, cluster))), cluster)


def priced(emitted: Emitted, partitioned: Partitioned, cluster: Cluster) -> Plan:
    """The plan of an emission with its prediction, from what each device then holds, computes and sends."""
    predicted = score(partitioned, cluster, emitted.plan, emitted.program)
    predicted = dataclasses.replace(predicted, findings=(*predicted.findings, *emitted.notes))
    return dataclasses.replace(emitted.plan, predicted=predicted)


def lowered_for(plan: Plan, cluster: Cluster) -> str:
    """The platform that a plan is lowered for to be priced. A program for CPUs says nothing about host memory (on them
    it is the same memory), so a plan that offloads is lowered for GPUs."""
    levels = any("offload" in level for level in plan.layers.values())
    away = (levels or bool(plan.host)) and cluster.device.platform != "cpu"
    return "cuda" if away else "cpu"
