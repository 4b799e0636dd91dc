"""What was planned against what was compiled: a plan's proof.

The planner's figures are taken first (they are part of the plan, or are worked out before the compile). Then the same
program with the same shardings goes through the target's own compiler, and every figure stands beside its planned one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lensjax._errors import PartitionError, UnsupportedJax
from lensjax.cost.price import price
from lensjax.partition import Collective as Planned
from lensjax.partition import partition
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.plan import Plan, Predicted
from lensjax.program.program import Program, analyze
from lensjax.verify.aot import compile_for
from lensjax.verify.audit import Audit, audit
from lensjax.verify.facts import Facts, doubled, lowered_facts
from lensjax.verify.finding import LATENT, SMALL, Finding, size
from lensjax.verify.lines import where
from lensjax.verify.place import platform_for
from lensjax.verify.traffic import mesh_axes, step_bytes

if TYPE_CHECKING:
    from lensjax.topology.cluster import Cluster

# Total bytes along some axes, against the plan, up to which another kind of collective is a rewrite of a planned one:
# a ring of n permutes in place of a reduce-scatter sends n/(n-1) of its bytes.
REWRITTEN = 1.15
_REDUCTIONS = ("all-reduce", "reduce-scatter")
SURPRISE = 0.02  # part of all traffic by which a kind of collective may differ from the plan's without a word


@dataclasses.dataclass(frozen=True)
class Row:
    """Bytes that a device sends per step in one kind of collective along some mesh axes."""

    kind: str
    axes: tuple[str, ...]
    planned: float
    compiled: float


@dataclasses.dataclass(frozen=True, eq=False)
class Proof:
    """A plan, compiled. `traffic`: planned and compiled bytes by kind and mesh axes; `findings`: the audit's, and every
    difference from the plan that is worth a word."""

    plan: Plan
    predicted: Predicted
    audit: Audit
    traffic: tuple[Row, ...]
    findings: tuple[Finding, ...]

    @property
    def backend(self) -> str:
        return self.audit.artifact.backend

    @property
    def tiers(self) -> Mapping[str, tuple[float, float]]:
        """Tier -> (planned bytes, compiled bytes)."""
        names = dict.fromkeys([*self.predicted.tiers, *self.audit.traffic.tiers])
        return {n: (self.predicted.tiers.get(n, 0.0), self.audit.traffic.tiers.get(n, 0.0)) for n in names}

    @property
    def holds(self) -> bool:
        """No warning and no error."""
        return all(f.severity == "note" for f in self.findings)

    def __str__(self) -> str:
        from lensjax.verify.show import text

        return text(self)


def prove(
    program: Program,
    plan: Plan,
    cluster: Cluster,
    *,
    backend: str | None = None,
    again: Callable[[], Program] | None = None,
    time_limit: float = 600.0,
) -> Proof:
    """Compiles a program under a plan for a cluster and compares. Needs no device.

    `again`: makes the same program with twice the batch; without it the batch is not followed through the step.
    Raises PlanError where the plan does not apply, CompileError as `compile_for`.
    """
    predicted = plan.predicted or price(program, plan, cluster).predicted
    assert predicted is not None
    platform = platform_for(cluster, backend)
    emitted = emit(program, plan, abstract_mesh(plan))
    lowered, flags = lower(emitted, platform), {**emitted.options(platform), **plan.flags}
    artifact = compile_for(
        lowered, cluster, backend=platform, order=plan.mesh.order, flags=flags, time_limit=time_limit
    )
    known = _facts(lowered, program, plan, platform, again)
    made = audit(artifact, mesh=plan.mesh.shape, cluster=cluster, order=plan.mesh.order, facts=known)
    rows = compare(known.parts.collectives if known else (), made, plan.mesh.shape)
    return Proof(plan, predicted, made, rows, (*made.findings, *differences(predicted, made, rows)))


def _facts(
    lowered: Any, program: Program, plan: Plan, platform: str, again: Callable[[], Program] | None
) -> Facts | None:
    def twice():
        other = again() if again else None
        assert other is not None
        return partition(lower(emit(other, plan, abstract_mesh(plan)), platform))

    try:
        return lowered_facts(lowered, program, twice if again else None)
    except (PartitionError, UnsupportedJax):
        return None  # what the compiled program shows is still audited


def twice_the_batch(program: Program, step: Callable[..., Any]) -> Callable[[], Program]:
    """For `prove`: makes the program of the same call of `step` with twice the batch."""
    return lambda: analyze(step, *doubled(program))


def compare(planned: tuple[Planned, ...], made: Audit, mesh: Mapping[str, int]) -> tuple[Row, ...]:
    """Planned and compiled bytes by kind of collective and mesh axes, most first."""
    total: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for c in planned:
        along = tuple(a for a in mesh if a in {x.partition(":")[0] for x in c.axes})
        total.setdefault((c.op.replace("_", "-"), along), [0.0, 0.0])[0] += c.trips * ring_bytes(c)
    for c in made.found.collectives:
        key = (c.kind, mesh_axes(c.groups, mesh))
        total.setdefault(key, [0.0, 0.0])[1] += step_bytes(c)
    rows = [Row(kind, axes, p, c) for (kind, axes), (p, c) in total.items() if p or c]
    return tuple(sorted(rows, key=lambda r: -max(r.planned, r.compiled)))


def ring_bytes(c: Planned) -> float:
    """Bytes that a device sends in a planned collective, ring algorithm; its `bytes` are the full buffer."""
    if c.op == "collective_permute":
        return c.bytes
    return c.bytes * (c.group - 1) / c.group * (2 if c.op == "all_reduce" else 1)


def differences(predicted: Predicted, made: Audit, rows: tuple[Row, ...]) -> tuple[Finding, ...]:
    """What the compiled step does and the plan does not, as findings."""
    found = []
    total = max(sum(r.planned for r in rows), sum(r.compiled for r in rows), 1.0)
    for row in rows:
        extra = row.compiled - row.planned
        if extra > max(SURPRISE * total, LATENT) and extra > SMALL * row.compiled:
            found.append(_unplanned(row, extra, made, _rewritten(row, rows)))
    room = predicted.peak_bytes
    if made.artifact.backend != "cpu" and made.peak.bytes > 1.15 * room:
        found.append(Finding(
            "more_memory", "warning", "", made.peak.bytes - room,
            f"the compiled step needs {size(made.peak.bytes)} on each device, the plan says {size(room)}",
            "see the largest buffers; the plan may still fit",
        ))  # fmt: skip
    return tuple(found)


def _rewritten(row: Row, rows: tuple[Row, ...]) -> bool:
    """Whether others send as much less: along the same axes, or, of a reduction, reductions along these and others (one
    over two axes, or a scatter over one of them and a reduction over the other)."""
    same = [r for r in rows if r.axes == row.axes]
    if sum(r.compiled for r in same) <= REWRITTEN * sum(r.planned for r in same):
        return True
    sums = [r for r in rows if r.kind in _REDUCTIONS and set(r.axes) & set(row.axes)]
    return row in sums and sum(r.compiled for r in sums) <= sum(r.planned for r in sums)


def _unplanned(row: Row, extra: float, made: Audit, rewritten: bool) -> Finding:
    mine = [
        c for c in made.found.collectives
        if c.kind == row.kind and mesh_axes(c.groups, made.mesh) == row.axes
    ]  # fmt: skip
    worst = max(mine, key=step_bytes)
    if rewritten:
        return Finding(
            "rewritten_traffic", "note", where(worst.stack), extra,
            f"{row.kind} along {'+'.join(row.axes)} sends {size(row.compiled)} per step on each device, planned were "
            f"{size(row.planned)}; others send as much less: the compiler wrote one kind as another (TPU: a "
            "reduce-scatter beside its matmul becomes a ring of permutes)",
            "nothing to do",
        )  # fmt: skip
    return Finding(
        "unplanned_traffic", "warning", where(worst.stack), extra,
        f"{row.kind} along {'+'.join(row.axes) or 'no axis'}: {size(row.compiled)} per step on each device, the plan "
        f"says {size(row.planned)}",
        "the compiler moves more than the plan accounts for: price the plan with this difference in mind",
    )  # fmt: skip
