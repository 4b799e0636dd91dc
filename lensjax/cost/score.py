"""What a partitioned step takes on a cluster: seconds, bytes on each tier, peak memory."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lensjax.cost.communication import Prices
from lensjax.cost.compute import multiplies, seconds
from lensjax.cost.levels_host import off_device
from lensjax.cost.memory import habits_of, memory
from lensjax.cost.timeline import timeline
from lensjax.partition.data import Partitioned
from lensjax.plan.plan import Plan, Predicted
from lensjax.topology.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Cost:
    """Per step and device. Seconds, bytes, operations.

    step_s:     compute_s + exposed_s.
    compute_s:  kernels, one after the other.
    comm_s:     collectives, one after the other; `comm_by_axes` by mesh axes ("data", "data+model").
    exposed_s:  what communication adds after overlap.
    tiers:      wire bytes sent on each tier, ring factor included, for the device that sends most.
    peak_bytes: with `held` saying what holds them: the roles that were given (or "arguments"), "results",
                "gradients", "activations", "communication", "temporaries" (see `lensjax.cost.purpose`), "fragments".
    flops:      of matmuls and convolutions, on one device.
    host_bytes: in the host's memory. Copies to and from it run beside everything else: a step takes at least as long as
                its host link is busy. State that waits there between steps is fetched and sent back at the end, with
                nothing to hide behind.
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    comm_by_axes: Mapping[str, float]
    tiers: Mapping[str, float]
    peak_bytes: float
    held: Mapping[str, float]
    flops: float
    host_bytes: float = 0.0


def cost(
    p: Partitioned,
    cluster: Cluster,
    *,
    order: Sequence[int] | None = None,
    roles: Sequence[str] | None = None,
    overlap: bool = True,
) -> Cost:
    """Prices a partitioned step.

    order: device ids row-major over the mesh (None: 0, 1, 2, ...). roles: what each argument is for, to say what holds
    memory. overlap: False prices a program in which nothing hides behind anything.
    """
    p, host_bytes, moved, waited = off_device(p)
    link = cluster.device.host_bandwidth
    prices = Prices(cluster, p.mesh, order)
    compute = functools.partial(seconds, device=cluster.device)
    times = timeline(p.schedule, prices, compute, overlap)
    tiers = {t.name: 0.0 for t in cluster.tiers}
    for c in p.collectives:
        for tier, sent in prices.wire(c).items():
            tiers[tier] += sent * c.trips
    peak = memory(p, habits_of(cluster.device, alone=not p.collectives and not moved), roles)
    return Cost(
        step_s=max(times.total, moved / link if moved else 0.0) + (waited / link if waited else 0.0),
        compute_s=times.compute,
        comm_s=times.comm,
        exposed_s=times.exposed,
        comm_by_axes=_by_axes(p, prices),
        tiers=tiers,
        peak_bytes=peak.peak,
        held=_held(p, peak, roles),
        flops=sum(o.flops * o.trips for o in p.operations if multiplies(o)),
        host_bytes=host_bytes,
    )


def score(p: Partitioned, cluster: Cluster, plan: Plan, program: Any) -> Predicted:
    """`cost` as a plan keeps it: the device order from the plan, the roles from the program."""
    roles = [a.role for a in program.arguments]
    c = cost(p, cluster, order=plan.mesh.order, roles=roles)
    detail = {"compute": c.compute_s, "communication": c.comm_s, "exposed": c.exposed_s}
    detail |= {f"axis:{axes}": s for axes, s in c.comm_by_axes.items()}
    held = {**c.held, "host": c.host_bytes} if c.host_bytes else c.held
    return Predicted(c.step_s, c.peak_bytes, c.tiers, detail, held, findings(p, cluster))


def findings(p: Partitioned, cluster: Cluster) -> tuple[str, ...]:
    """What the prediction does not know, for people."""
    found = []
    if p.unknown_trips:
        found.append(f"{p.unknown_trips} loop(s) whose trip count depends on data: priced as one trip each")
    # A gate ties values together; a barrier of one value only holds it.
    barriers = sum(n.name == "stablehlo.optimization_barrier" and len(n.inputs) > 1 for n in p.body.nodes)
    if barriers and cluster.device.platform == "cuda":
        # Measured on compile-only H100s: unrolled decoders with remat hold 1.2 to 1.55 times the planned peak.
        found.append(
            f"{barriers} recomputed region(s) outside of loops: on GPUs XLA may postpone their weight gradients and "
            "hold half as much again as planned; scan over the layers to be sure"
        )
    return tuple(found)


def _by_axes(p: Partitioned, prices: Prices) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    items = p.collectives
    for c, s in zip(items, prices.calls([(c, i) for i, c in enumerate(items)])):
        found["+".join(c.axes)] += s * c.trips
    return dict(found)


def _held(p: Partitioned, peak: Any, roles: Sequence[str] | None) -> dict[str, float]:
    held: defaultdict[str, float] = defaultdict(float)
    for i, value in enumerate(p.arguments):
        held[roles[i] if roles is not None and i < len(roles) else "arguments"] += value.bytes
    held["results"] += peak.results
    for kind, size in peak.held.items():
        held[kind] += size
    return {k: v for k, v in held.items() if v}
