"""The audit: everything that a compiled step says about itself, in one object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lensjax.verify.artifact import Artifact
from lensjax.verify.collectives import Found, collectives
from lensjax.verify.finding import Case, Finding
from lensjax.verify.fragments import Fragmentation, fragmentation
from lensjax.verify.hlo import Module, parse_hlo
from lensjax.verify.memory import Peak, peak
from lensjax.verify.prices import Priced
from lensjax.verify.rules import findings
from lensjax.verify.timeline import Timeline, timeline
from lensjax.verify.traffic import Traffic, traffic

if TYPE_CHECKING:
    from lensjax.topology.cluster import Cluster
    from lensjax.verify.facts import Facts


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
    """A compiled step, read. `unknown`: what the parser did not understand, one sentence each; `notes`: what the
    compile does not prove. `timeline` is None without a cluster, `fragmentation` where no allocator is asked (only GPUs
    have one).
    """

    artifact: Artifact
    module: Module
    found: Found
    traffic: Traffic
    peak: Peak
    timeline: Timeline | None
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    mesh: Mapping[str, int]
    fragmentation: Fragmentation | None = None
    device_memory: float = 0.0  # bytes; 0 without a cluster


def audit(
    artifact: Artifact,
    *,
    mesh: Mapping[str, int],
    cluster: Cluster | None = None,
    order: Sequence[int] | None = None,
    facts: Facts | None = None,
) -> Audit:
    """Reads a compiled step. `mesh`: axis -> size; `order`: device id of each mesh position; `facts`: see `facts`."""
    module = parse_hlo(artifact.hlo)
    found = collectives(module)
    priced = Priced(cluster, module.devices, order) if cluster is not None else None
    flow = traffic(found.collectives, mesh, priced.bytes if priced else None)
    line = timeline(module, found, cluster.device, priced.price()) if cluster is not None and priced else None
    case = Case(artifact, module, found, flow, dict(mesh), facts, cluster, priced, line)
    notes = (*artifact.notes, *_said(facts))
    most = peak(artifact, module, names=_names(facts))
    room = cluster.device.memory if cluster is not None else 0.0
    return Audit(
        artifact, module, found, flow, most, line, findings(case), found.unknown, notes, dict(mesh),
        fragmentation(artifact), room,
    )  # fmt: skip


def _said(facts: Facts | None) -> tuple[str, ...]:
    """What could not be looked at, for people."""
    if facts is None:
        return ("the partitioner could not be asked about this step: only what the compiled program shows is audited",)
    return (f"batch not followed: {facts.reason}",) if facts.reason else ()


def _names(facts: Facts | None) -> dict[int, str]:
    """Parameter number of the compiled module -> the user's name of the argument."""
    if facts is None or facts.program is None:
        return {}
    arguments = facts.program.arguments
    return {i: arguments[leaf].path for i, leaf in enumerate(facts.kept) if leaf < len(arguments)}
