"""Whether and how gradients cross a slow tier as codes: the last decision about a plan, by the scorer of all others.

The tier is that of the outermost mesh axis of the batch, where something faster lies inside. A codec that was named is
used; "auto" takes one only where it removes at least `LEAST_GAIN` of the step and its own coding once more: on fast
networks compression rarely pays (Agarwal et al., arXiv:2103.00543), so the burden of proof is on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lensjax import _jax
from lensjax._errors import BatchError, CodecError, PlanError
from lensjax._units import duration
from lensjax.comm import Policy, parse_codec
from lensjax.comm.gate import CODING_BYTES, LEAST_GAIN
from lensjax.passes.shardings import batch_axes
from lensjax.passes.share_sizes import falls_back
from lensjax.plan.plan import Plan, Reduce
from lensjax.program.program import Program
from lensjax.search.candidates import Candidate
from lensjax.search.choose import Choice
from lensjax.topology.cluster import Cluster

AUTO = ("int8", "int4")  # mildest first
COUNT = 3  # plans that are priced with each codec


Compress = str | Mapping[str, str]


def check_compress(how: Any) -> None:
    """Raises PlanError for what is no way to compress."""
    shown = f"compress={how!r}"
    if isinstance(how, Mapping):
        if not all(isinstance(x, str) for pair in how.items() for x in pair) or "*" not in how:
            raise PlanError(
                f"{shown}; expected patterns of parameter paths and codecs' names, one of them '*'",
                hint='as in compress={"*/router/*": "exact", "*": "int8"}: of several that match the first wins, and '
                '"*" is for what no other matches',
            )
    elif not isinstance(how, str):
        raise PlanError(f"{shown}; expected a codec's name, 'auto' or 'off', or {{pattern: codec}}")
    main, pins = parts(how)
    if main == "off" and pins:
        raise PlanError(f"{shown}: nothing is compressed, and patterns say how", hint="give '*' a codec, or 'auto'")
    for codec in (*(() if main in ("off", "auto") else (main,)), *pins.values()):
        try:
            parse_codec(codec)
        except CodecError as e:
            raise PlanError(f"{shown}: {e.message}", hint=f"{e.hint}; or 'auto', or 'off'") from e


def parts(how: Compress) -> tuple[str, dict[str, str]]:
    """(what all gradients are compressed by, {pattern: codec} for single ones)."""
    if isinstance(how, str):
        return how, {}
    return how["*"], {pattern: codec for pattern, codec in how.items() if pattern != "*"}


def slow_tier(plan: Plan, cluster: Cluster) -> str | None:
    """The tier on which replicas are farthest apart; None where all of them are inside the fastest one."""
    shape, tier_of = plan.mesh.shape, {a.name: a.tier for a in plan.mesh.axes}
    outer = next((a for a in batch_axes(plan) if shape[a] > 1), None)
    if outer is None or tier_of[outer] == cluster.tiers[0].name:
        return None
    return tier_of[outer]


def compressed(
    choice: Choice,
    program: Program,
    cluster: Cluster,
    how: Compress,
    pricer: Callable[[Plan], Plan],
    progress: Callable[[str], None] | None = None,
) -> Choice:
    """The choice with codes on the slow tier where `how` ("off", "auto", a codec's name, or {pattern: codec} with "*"
    for the rest) asks for it and, for "auto", where it pays; the plan's findings say what was decided and why."""
    how, pins = parts(how)
    _check_patterns(pins, program)
    if how == "off" or any(r.codec != "exact" for r in choice.plan.reduce.values()):
        return choice
    tier = slow_tier(choice.plan, cluster)
    if tier is None:
        return noted(choice, f"compress={how!r} changes nothing: no gradient crosses a slow tier under this plan")
    if why := falls_back(program, coded(choice.plan, tier, "bf16")):
        return noted(choice, why)
    made: list[tuple[Candidate, Candidate]] = []
    reason = ""
    copies = bool(choice.plan.secondary)  # asked for: plans without them do not compete
    alike = [c for c in choice.candidates if c.plan is not None and bool(c.plan.secondary) == copies]
    for old in [c for c in alike if c.fits(choice.memory)][:COUNT]:
        assert old.plan is not None
        where = slow_tier(old.plan, cluster)
        for codec in AUTO if how == "auto" else (how,):
            if where is None:
                continue
            name = f"{old.name} {codec}"
            if progress is not None:
                progress(name)
            try:
                plan = pricer(coded(old.plan, where, codec, name, pins))
                plan = _hidden(plan, where, program, pricer, choice.memory)
                made.append((old, Candidate(name, plan)))
            except (PlanError, BatchError) as e:
                reason = reason or e.message
    able = [(old, new) for old, new in made if new.fits(choice.memory)]
    if not able:
        return noted(choice, f"compress={how!r}: " + (reason or "no plan with codes fits the memory"))
    old, best = min(able, key=lambda pair: pair[1].step_s)
    now = next((c for c in choice.candidates if c.plan == choice.plan), old)
    saved, least = now.step_s - best.step_s, _least(now, old, best, tier, cluster)
    candidates = tuple(sorted([*choice.candidates, *(new for _, new in made)], key=lambda c: c.step_s))
    choice = dataclasses.replace(choice, candidates=candidates)
    told = f"{duration(best.step_s)} a step against {duration(now.step_s)} with {now.name}, exact"
    if how == "auto" and saved < least:
        return noted(choice, f"compress='auto': off: the best with codes, {best.name}, is predicted to take {told}")
    assert best.plan is not None
    choice = dataclasses.replace(choice, plan=best.plan)
    return noted(choice, f"compress={how!r}: {told}")


def _check_patterns(pins: Mapping[str, str], program: Program) -> None:
    """Raises PlanError for a pattern that matches no parameter: a misspelt one would code what it should protect."""
    try:
        Policy(pins=pins).check([a.path for a in program.arguments if a.role == "parameter"])
    except CodecError as e:
        raise PlanError(f"compress: {e.message}", hint=e.hint) from e


def _hidden(plan: Plan, tier: str, program: Program, pricer: Callable[[Plan], Plan], memory: float) -> Plan:
    """The plan, or the one with each scanned layer's gradients crossing while the next layer is computed, where that is
    predicted to gain as much as codes have to: it sends 1/L more."""
    eqns = _jax.open_jaxpr(program.jaxpr).eqns
    if plan.micro.any_number or plan.reduce[tier].inside or not any(e.primitive.name == "scan" for e in eqns):
        return plan
    other = pricer(plan.replace(reduce={**plan.reduce, tier: dataclasses.replace(plan.reduce[tier], inside=True)}))
    assert plan.predicted is not None and other.predicted is not None
    gain = plan.predicted.step_s - other.predicted.step_s
    worth = gain > LEAST_GAIN * plan.predicted.step_s and Candidate(other.name, other).fits(memory)
    return other if worth else plan


def coded(plan: Plan, tier: str, codec: str, name: str | None = None, pins: Mapping[str, str] = {}) -> Plan:
    old = plan.reduce.get(tier, Reduce())
    reduce = {**plan.reduce, tier: Reduce(codec, old.bucket, pins=pins, inside=old.inside)}
    return plan.replace(reduce=reduce, name=plan.name if name is None else name)


def _least(now: Candidate, old: Candidate, best: Candidate, tier: str, cluster: Cluster) -> float:
    """Seconds that codes must save: the scorer has counted the coding once, here it is asked for again."""
    assert old.plan is not None and old.plan.predicted is not None
    values = old.plan.predicted.tiers.get(tier, 0.0) / 4  # of float32, at most
    return LEAST_GAIN * now.step_s + 2 * CODING_BYTES * values / cluster.device.memory_bandwidth


def noted(choice: Choice, note: str) -> Choice:
    predicted = choice.plan.predicted
    if predicted is None:
        return choice
    plan = dataclasses.replace(
        choice.plan, predicted=dataclasses.replace(predicted, findings=(*predicted.findings, note))
    )
    return dataclasses.replace(choice, plan=plan)
