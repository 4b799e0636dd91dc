"""A second judge of plans, passed in: one that compiles them (`lensjax.verify.judge`).

It is asked about the last few candidates of a search, where its answer decides; or about every preset, where the
partitioner cannot be driven and there is no other way to price a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lensjax._errors import BatchError, CompileError, PlanError, UnsupportedJax
from lensjax.plan.pins import Pin
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.search.candidates import Candidate
from lensjax.search.choose import Choice, nothing_fits, tier_names
from lensjax.search.presets import enumerate_presets, preset
from lensjax.topology.cluster import Cluster

Judge = Callable[[Plan], Plan]
"""A plan -> the plan with another prediction. Raises PlanError, BatchError or CompileError."""

COUNT = 3  # candidates that are compiled


def judged(choice: Choice, judge: Judge, count: int = COUNT, progress: Callable[[str], None] | None = None) -> Choice:
    """A choice whose `count` fastest fitting candidates were judged; the fastest by the judge that fits is the plan.

    Each judged candidate keeps both predictions (`Candidate.judged`), so that their disagreement can be shown. A plan
    that the judge cannot take keeps the reason. Where none can be taken, or none fits by the judge, the choice stands
    as it was, and the candidates say so.
    """
    seen: dict[str, Candidate] = {}
    for candidate in [c for c in choice.candidates if c.fits(choice.memory)][:count]:
        assert candidate.plan is not None
        if progress is not None:
            progress(f"compiling {candidate.name}")
        try:
            verdict = judge(candidate.plan).predicted
            seen[candidate.name] = dataclasses.replace(candidate, judged=verdict)
        except (PlanError, BatchError, CompileError) as e:
            seen[candidate.name] = dataclasses.replace(candidate, reason=f"not judged: {e.message}")
    candidates = tuple(seen.get(c.name, c) for c in choice.candidates)
    able = [c for c in seen.values() if c.judged is not None and c.judged.peak_bytes <= choice.memory]
    best = min(able, key=lambda c: c.judged.step_s, default=None)  # type: ignore[union-attr]
    if best is None or best.plan is None:
        return dataclasses.replace(choice, candidates=candidates)
    return dataclasses.replace(choice, plan=best.plan, candidates=candidates)


def disagreement(candidate: Candidate) -> float | None:
    """By how much the judge's step time is above the planner's (0.1 is ten percent); None where it was not judged."""
    if candidate.judged is None or candidate.plan is None or not candidate.step_s:
        return None
    return candidate.judged.step_s / candidate.step_s - 1


def by_judging(
    program: Program,
    cluster: Cluster,
    judge: Judge,
    why: str,
    *,
    memory: float | None = None,
    pins: Sequence[Pin] = (),
    names: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Choice:
    """The fastest preset that fits, each priced by the judge alone.

    `why`: what keeps the planner's own price from being had; every prediction says it. Presets that need what the
    partitioner knows of a step (tensor and expert parallelism) do not apply, and say so. `names`: these presets only.
    Raises DoesNotFit or PlanError as `choose`.
    """
    limit = cluster.device.memory if memory is None else memory
    found, priced = [], priced_by(judge)
    for name in names if names is not None else enumerate_presets(cluster.devices, [t.size for t in cluster.tiers]):
        if progress is not None:
            progress(f"compiling {name}")
        try:
            plan = priced(preset(name, program, cluster.devices, pins=pins, tier_of=tier_names(cluster)))
            assert plan.predicted is not None
            said = (f"priced by compiling it, since {why}", *plan.predicted.findings)
            plan = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, findings=said))
            found.append(Candidate(name, plan))
        except (PlanError, BatchError) as e:
            found.append(Candidate(name, None, e.message))
    found.sort(key=lambda c: c.step_s)
    fitting = [c for c in found if c.fits(limit)]
    if names is not None and len(names) == 1 and found[0].plan is not None:
        fitting = found  # what was asked for by name is given, as by the planner
    if not fitting:
        raise nothing_fits(program, found, limit)
    assert fitting[0].plan is not None
    return Choice(fitting[0].plan, tuple(found), limit)


def priced_by(judge: Judge) -> Judge:
    """A judge that says of a plan that it cannot compile why, as a plan that does not apply."""

    def of(plan: Plan) -> Plan:
        try:
            return judge(plan)
        except (CompileError, UnsupportedJax) as e:
            raise PlanError(e.message, hint=e.hint) from e

    return of
