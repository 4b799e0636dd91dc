"""Levels and micro-batches, chosen with everything else: plans that do not fit compete with what makes them fit.

The inner search knows neither. So the strategy is also asked what would be fastest if memory were no matter; the
fastest plans get levels (which may pay where memory is plenty: what is made again is not written and read), and those
that still do not fit go through their batch piece by piece. All of it is priced by the scorer of all other plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from lensjax.cost.levels import groups
from lensjax.cost.pricer import Pricer, content
from lensjax.plan.levels import parse
from lensjax.plan.plan import Micro, Plan
from lensjax.search.candidates import Candidate, least, named, price_all, rank, searched
from lensjax.search.levels import levels
from lensjax.search.problem import Problem
from lensjax.search.strategies import Proposal

# Plans, fastest first, that are tried with levels and in micro-batches.
TRIED = 3
# Proposals of the strategy that are priced when memory is no matter.
ROOMY = 2
# Into how many pieces each device's part of the batch is cut.
MICRO_BATCHES = (2, 4, 8, 16)
# A plan in micro-batches, or with a level on all layers, must promise so much of the step to be looked at.
WORTH = 0.005

Propose = Callable[[Problem], Proposal]
Progress = Callable[[str], None] | None


def joint(
    problem: Problem,
    pricer: Pricer,
    propose: Propose,
    candidates: Sequence[Candidate],
    bound: float | None,
    progress: Progress = None,
) -> list[Candidate]:
    """The candidates, best first, and beside them what levels and micro-batches make of the fastest. `bound`: that of
    the strategy's proposal (see `Proposal`)."""
    found = sorted(candidates, key=rank)
    found = sorted([*found, *_roomy(problem, pricer, propose, found, bound, progress)], key=rank)
    found = sorted([*found, *_with_levels(problem, pricer, found, progress)], key=rank)
    return sorted([*found, *_in_micro_batches(problem, pricer, propose, found, progress)], key=rank)


def _state(c: Candidate) -> float:
    """Bytes that neither levels nor micro-batches make less: parameters and optimizer state."""
    assert c.plan is not None and c.plan.predicted is not None
    return sum(c.plan.predicted.memory.get(role, 0.0) for role in ("parameter", "optimizer"))


def _too_large(candidates: Sequence[Candidate], memory: float) -> list[Candidate]:
    """The fastest plans that do not fit, but may when they hold fewer activations, and are faster than what fits."""
    best = least(candidates, memory) * (1 - WORTH)
    priced = [c for c in candidates if c.plan is not None and c.plan.micro == Micro()]
    return [c for c in priced if not c.fits(memory) and c.step_s < best and _state(c) < memory][:TRIED]


def _roomy(
    problem: Problem,
    pricer: Pricer,
    propose: Propose,
    candidates: Sequence[Candidate],
    bound: float | None,
    progress: Progress,
) -> list[Candidate]:
    """The first that the strategy proposes when memory is no matter, priced; nothing where memory did not bind."""
    program = problem.program
    if problem.cluster.devices == 1 or problem.stop() or not any(c.plan is not None for c in candidates):
        return []
    first = next(c.plan for c in candidates if c.plan is not None)
    if not program.split.micro and not groups(program, first, problem.cluster):
        return []
    try:
        proposal = propose(problem.with_memory(math.inf))
    except Exception:  # a strategy's fault is in the report already, where it was asked with the memory there is
        return []
    if bound is not None and proposal.bound is not None and proposal.bound >= bound:
        return []
    seen = {content(c.plan) for c in candidates if c.plan is not None}
    new = named([p for p in proposal.plans[:ROOMY] if content(p) not in seen], {c.name for c in candidates})
    return price_all([(p.name, lambda p=p: p) for p in new], pricer, progress, problem.stop)


def _with_levels(
    problem: Problem, pricer: Pricer, candidates: Sequence[Candidate], progress: Progress
) -> list[Candidate]:
    """The fastest plans with levels: those that do not fit with the cheapest under which they do, and each with one
    level on all of its layers where that is predicted to be faster."""
    memory, cluster = problem.memory, problem.cluster
    out: list[Candidate] = []
    for c in _too_large(candidates, memory):
        assert c.plan is not None
        if problem.stop():
            return out
        if progress is not None:
            progress(f"{c.name} with levels")
        made = levels(pricer.program, c.plan, cluster, memory, pricer)
        if made is not None:
            out.append(_levelled(c, made))
    # XLA:CPU undoes recompute, so that it can only cost time there.
    if cluster.device.platform != "cpu":
        out += _one_level(problem, pricer, [c for c in candidates if c.plan is not None and _state(c) < memory][:TRIED])
    return _once(out)


def _one_level(problem: Problem, pricer: Pricer, fastest: Sequence[Candidate]) -> list[Candidate]:
    """Plans with one level on all of their layers, as far as that makes them faster."""
    out: list[Candidate] = []
    kinds: Sequence[str] | None = None
    for c in fastest:
        assert c.plan is not None
        found = groups(pricer.program, c.plan, problem.cluster)
        offered = dict.fromkeys(o.level for g in found for o in g.options[1:] if not o.host)
        faster = []
        for kind in offered if kinds is None else kinds:
            if problem.stop():
                return out
            name = f"{c.name} with {kind}"
            made = Candidate(name, pricer(c.plan.replace(layers={"*": kind}, name=name)))
            if made.step_s < c.step_s * (1 - WORTH):
                faster.append(kind)
                out.append(made)
        kinds = faster  # what the fastest plan gains nothing by is not asked of the others
    return out


def _levelled(c: Candidate, made: Plan) -> Candidate:
    kinds = "+".join(sorted({p.kind for text in made.layers.values() for p in parse(text)} - {"keep"}))
    name = f"{c.name} with {kinds}"
    return Candidate(name, dataclasses.replace(made, name=name))


def _once(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each name once: the faster."""
    out: dict[str, Candidate] = {}
    for c in sorted(candidates, key=rank):
        out.setdefault(c.name, c)
    return list(out.values())


def _in_micro_batches(
    problem: Problem, pricer: Pricer, propose: Propose, candidates: Sequence[Candidate], progress: Progress
) -> list[Candidate]:
    """Plans in micro-batches, more until that brings nothing. The fastest plans that do not fit are tried, and what the
    strategy proposes when it knows of the pieces, where its bound is below what fits. What a step does not let do (see
    `Program.split`) keeps its reason."""
    memory, out = problem.memory, []
    best = least(candidates, memory)
    fastest = _too_large(candidates, memory)
    if best == math.inf:
        fastest = [c for c in candidates if c.plan is not None][:TRIED]
    for count in MICRO_BATCHES if fastest else ():
        pieces = [(f"{c.name} in {count} micro-batches", c.plan.replace(micro=Micro(count))) for c in fastest if c.plan]
        made = price_all([(n, lambda n=n, p=p: p.replace(name=n)) for n, p in pieces], pricer, progress, problem.stop)
        # Each piece's gradients are summed whole: split parameters may gain less than that costs.
        held = {c.name: c.plan.predicted.peak_bytes for c in fastest if c.plan and c.plan.predicted}
        fastest = [c for c, m in zip(fastest, made) if m.fits(held[c.name])]
        if problem.program.split.micro and problem.cluster.devices > 1 and not problem.stop():
            made += searched(problem.in_micro_batches(count), pricer, propose, [*candidates, *made], progress)[0]
        out += made
        now = least(made, memory)
        if problem.stop() or (min(now, best) < math.inf and now >= best) or not problem.program.split.micro:
            break  # more pieces only take longer
        best = min(best, now)
    return out
