"""A plan's price from its compiled step: a second, independent estimate of what the planner predicts.

    judge(program, cluster)(plan).predicted

Seconds are those of the timeline of the compiled schedule, bytes those of the compiled collectives, memory the
compiler's own. It takes a compile (seconds to minutes), so it is for the last few plans of a search, or for all of a
short list where the partitioner cannot be asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lensjax._errors import CompileError
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.plan import Plan, Predicted
from lensjax.program.program import Program
from lensjax.topology.cluster import Cluster
from lensjax.verify.aot import compile_for
from lensjax.verify.audit import Audit, audit
from lensjax.verify.place import platform_for


def judge(
    program: Program, cluster: Cluster, *, backend: str | None = None, time_limit: float = 600.0
) -> Callable[[Plan], Plan]:
    """What turns a plan into the plan with the prediction of its compiled step, for a program on a cluster.

    Without the cluster's own compiler the CPU's is used, and the prediction's findings say what that does not show. The
    function raises PlanError or BatchError where a plan does not apply, CompileError as `compile_for`.
    """
    platform = platform_for(cluster, backend)

    def of(plan: Plan) -> Plan:
        emitted, order = emit(program, plan, abstract_mesh(plan)), plan.mesh.order
        lowered, flags = lower(emitted, platform), {**emitted.options(platform), **plan.flags}
        artifact = compile_for(lowered, cluster, backend=platform, order=order, flags=flags, time_limit=time_limit)
        made = audit(artifact, mesh=plan.mesh.shape, cluster=cluster, order=order)
        return dataclasses.replace(plan, predicted=predicted(made))

    return of


def predicted(made: Audit) -> Predicted:
    """What an audit found, as a prediction. Raises CompileError where nothing could be timed."""
    line = made.timeline
    if line is None:
        raise CompileError("the compiled step has no timeline", hint="name a cluster to time it on")
    exposed = sum(line.exposed.values())
    detail = {"compute": line.compute, "communication": sum(line.busy.values()) - line.compute, "exposed": exposed}
    notes = (*made.notes, *(f"not understood in the compiled step: {u}" for u in made.unknown))
    return Predicted(line.step, made.peak.bytes, dict(made.traffic.tiers), detail, {}, notes)
