"""Choosing: the search and every preset are priced by one scorer, and the fastest that fits is taken.

The inner search proposes a handful of plans from its model (`strategies`); the partitioner then says what each really
sends, computes and holds, and the price of that decides. Presets go the same way, so the choice is never worse than the
best of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence

from lensjax._errors import BatchError, DoesNotFit, PartitionError, PlanError
from lensjax._units import size
from lensjax.cost.pricer import Pricer
from lensjax.passes.shardings import resolve, ways
from lensjax.plan.grammar import AXES
from lensjax.plan.levels import parse
from lensjax.plan.pins import Pin, check_applicable
from lensjax.plan.plan import Micro, Plan, Predicted
from lensjax.program.program import Program
from lensjax.search.build import NAMES, SEARCHED
from lensjax.search.levels import levels
from lensjax.search.pipeline import Pipelined
from lensjax.search.pipelines import pipelines
from lensjax.search.presets import pinnable
from lensjax.search.problem import Problem
from lensjax.search.reading import solution_of
from lensjax.search.strategies import Proposal, strategy
from lensjax.topology.cluster import Cluster

# How often a search is repeated with less memory when the partitioner finds more than the inner model did.
ROUNDS = 3
# Plans that do not fit, fastest first, that are tried with recompute and offload.
RECOMPUTED = 3
# Where nothing fits even so: into how many pieces each device's part of the batch is cut.
MICRO_BATCHES = (2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan with its price (`plan.predicted`), or the reason why it does not apply. `inner_s`: seconds of the search's
    own model, None where it was not asked; `judged`: what a judge predicts that was passed in (see `judged`)."""

    name: str
    plan: Plan | None
    reason: str = ""
    inner_s: float | None = None
    judged: Predicted | None = None

    @property
    def searched(self) -> bool:
        """Whether a search proposed it (it is no preset that could be named)."""
        return self.name.startswith(SEARCHED)

    @property
    def step_s(self) -> float:
        """Predicted seconds per step; infinite where the plan does not apply."""
        return self.plan.predicted.step_s if self.plan is not None and self.plan.predicted else float("inf")

    def fits(self, memory: float) -> bool:
        return self.plan is not None and self.plan.predicted is not None and self.plan.predicted.peak_bytes <= memory


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen plan and everything it was compared with, best first. `memory`: bytes per device that were allowed.

    bound: seconds that no plan of the searched space undercuts in the search's model; gap: by how much the chosen plan
    is above it in that model (0.02 is two percent), None where that is not known. `searched` shapes of `shapes` were
    opened; fewer only where the rest cannot be better, or time was up (`complete` is False).
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    memory: float
    bound: float | None = None
    gap: float | None = None
    searched: int = 0
    shapes: int = 0
    complete: bool = True
    problem: Problem | None = dataclasses.field(default=None, compare=False, repr=False)
    pricer: Pricer | None = dataclasses.field(default=None, compare=False, repr=False)

    @functools.cached_property
    def pipelines(self) -> tuple[Pipelined, ...]:
        """Plans with pipeline stages that would be more than one percent faster, fastest first; no executor runs them
        yet, so they do not compete. Found when first asked for."""
        if self.problem is None or self.plan.predicted is None:
            return ()
        plans = [c.plan for c in self.candidates if c.plan is not None]
        return pipelines(self.problem, self.plan.predicted.step_s, plans)

    def what_if(self, plan: Plan) -> Plan:
        """Another plan (`choice.plan.replace(...)`) with its prediction, by the scorer that chose. Raises PlanError or
        BatchError where it does not apply."""
        if self.pricer is None:
            raise PlanError("this choice was made without a search: there is nothing to compare with")
        return self.pricer(plan)


def price_all(
    makers: Iterable[tuple[str, Callable[[], Plan]]],
    pricer: Pricer,
    progress: Callable[[str], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Candidate]:
    """Prices named plans; what does not apply keeps its reason. The first that applies is priced whatever the time."""
    plans: list[tuple[int, str, Plan, int]] = []
    out: dict[int, Candidate] = {}
    for i, (name, make) in enumerate(makers):
        try:
            plan = make()
            plans.append((i, name, plan, 0 if plans and stop() else pricer.constraints(plan)))
        except (PlanError, BatchError) as e:
            out[i] = Candidate(name, None, e.message)
    # The one with the most constraints first: the others' may stand in its lowered program.
    for k, (i, name, plan, _) in enumerate(sorted(plans, key=lambda found: -found[3])):
        if k and stop():
            out[i] = Candidate(name, None, "the time for planning was up")
            continue
        if progress is not None:
            progress(name)
        try:
            out[i] = Candidate(name, pricer(plan))
        except (PlanError, BatchError) as e:
            out[i] = Candidate(name, None, e.message)
    return [out[i] for i in sorted(out)]


def tier_names(cluster: Cluster) -> dict[int, str]:
    return {t.size: t.name for t in cluster.tiers}


def choose(
    program: Program,
    cluster: Cluster,
    *,
    memory: float | None = None,
    pins: Sequence[Pin] = (),
    progress: Callable[[str], None] | None = None,
    search: str | None = None,
    budget: float | None = None,
) -> Choice:
    """The fastest plan that fits `memory` bytes per device (the device's own where not given).

    search: the strategy (see `lensjax.search.strategies`; "milp" where not given). budget: seconds to stop after with
    the best so far. Raises DoesNotFit, with what binds and the nearest plan, when none fits.
    """
    propose = strategy(search or "milp")
    check_applicable(pins, {a.path: a.shape for a in pinnable(program)}, (*AXES, *NAMES.values()))
    limit = cluster.device.memory if memory is None else memory
    deadline = math.inf if budget is None else time.perf_counter() + budget
    stop = lambda: time.perf_counter() > deadline
    problem = Problem(program, cluster, limit, tuple(pins), stop)
    pricer = Pricer(program, cluster)
    makers = [(n, lambda n=n: problem.preset(n)) for n in problem.preset_names()]
    candidates = price_all(makers, pricer, progress, stop)
    found, proposal = _search(problem, pricer, propose, candidates, progress)
    candidates = sorted([*found, *candidates], key=_rank)
    candidates = sorted([*candidates, *_with_levels(candidates, pricer, limit, stop)], key=_rank)
    if not any(c.fits(limit) for c in candidates):
        pieces = _in_micro_batches(problem, candidates, pricer, propose, progress)
        candidates = sorted([*candidates, *pieces], key=_rank)
    fitting = [c for c in candidates if c.fits(limit)]
    if not fitting:
        plans = [c.plan for c in candidates if c.plan is not None]
        raise nothing_fits(program, candidates, limit, pipelines(problem, math.inf, plans, progress))
    candidates = [_with_inner(problem, c, proposal) for c in candidates]
    best = next(c for c in candidates if c.fits(limit))
    assert best.plan is not None
    went = proposal.searched
    return Choice(
        best.plan,
        tuple(candidates),
        limit,
        bound=proposal.bound,
        gap=_gap(best, proposal),
        searched=went.examined if went else 0,
        shapes=went.total if went else 0,
        complete=went.complete if went else True,
        problem=problem,
        pricer=pricer,
    )


def _search(
    problem: Problem,
    pricer: Pricer,
    propose: Callable[[Problem], Proposal],
    presets: Sequence[Candidate],
    progress: Callable[[str], None] | None,
) -> tuple[list[Candidate], Proposal]:
    """What the strategy proposes, priced. Where the partitioner finds that a proposal holds too much, the strategy is
    asked again with as much less memory as its model was wrong by."""
    if problem.cluster.devices == 1 or problem.stop():
        return [], Proposal(())
    found: list[Candidate] = []
    seen = {_content(c.plan) for c in presets if c.plan is not None}
    first, allowed = Proposal(()), problem.memory
    for round_ in range(ROUNDS):
        if progress is not None:
            progress("searching")
        try:
            proposal = propose(problem.with_memory(allowed) if round_ else problem)
        except (PlanError, PartitionError) as e:
            return [*found, Candidate(f"{SEARCHED}plans", None, e.message)], first
        except Exception as e:  # a strategy's fault must not take the presets away; the report shows it
            why = f"the search failed on this step: {type(e).__name__}: {e}"
            return [*found, Candidate(f"{SEARCHED}plans", None, why)], first
        first = proposal if not round_ else first
        plans = [p for p in proposal.plans if _content(p) not in seen]
        seen |= {_content(p) for p in plans}
        named = _named(plans, {c.name for c in found})
        new = price_all([(p.name, lambda p=p: p) for p in named], pricer, progress, problem.stop)
        found += new
        best = min((c.step_s for c in (*found, *presets) if c.fits(problem.memory)), default=math.inf)
        large = [c for c in new if c.plan is not None and not c.fits(problem.memory) and c.step_s < best]
        if problem.stop() or (not large and (proposal.plans or round_)):
            break
        over = max((c.plan.predicted.peak_bytes / problem.memory for c in large), default=0.0)  # type: ignore[union-attr]
        # Nothing was proposed: the model may hold too much for too large, so it gets a little more.
        allowed = allowed / over * 0.98 if over else allowed * 1.15
    return found, first


def _named(plans: Sequence[Plan], taken: set[str]) -> list[Plan]:
    """The plans, each with a name of its own."""
    out = []
    for plan in plans:
        number = next(n for n in itertools.count(1) if f"{plan.name}{'' if n == 1 else f' #{n}'}" not in taken)
        plan = plan.replace(name=plan.name if number == 1 else f"{plan.name} #{number}")
        taken = {*taken, plan.name}
        out.append(plan)
    return out


def _content(plan: Plan) -> str:
    return plan.replace(name="").to_json()


def _with_inner(problem: Problem, c: Candidate, proposal: Proposal) -> Candidate:
    if proposal.bound is None or c.plan is None or c.plan.layers or c.plan.micro != Micro():
        return c  # the bound is that of plans without recompute, the batch at once
    try:
        solution = solution_of(problem, c.plan)
    except PlanError:
        return c
    return dataclasses.replace(c, inner_s=solution.seconds if solution is not None else None)


def _gap(best: Candidate, proposal: Proposal) -> float | None:
    if proposal.bound is None or best.inner_s is None or not 0 < proposal.bound < math.inf:
        return None
    return max(0.0, best.inner_s / proposal.bound - 1)


def _with_levels(
    candidates: Sequence[Candidate], pricer: Pricer, limit: float, stop: Callable[[], bool]
) -> list[Candidate]:
    """The fastest plans that do not fit, with levels under which they do; those slower than one that fits are left."""
    best = min((c.step_s for c in candidates if c.fits(limit)), default=math.inf)
    large = [c for c in candidates if c.plan is not None and not c.fits(limit) and c.step_s < best]
    out = []
    for c in large[:RECOMPUTED]:
        assert c.plan is not None
        made = levels(pricer.program, c.plan, pricer.cluster, limit, pricer) if not stop() else None
        if made is not None:
            kinds = "+".join(sorted({p.kind for text in made.layers.values() for p in parse(text)} - {"keep"}))
            name = f"{c.name} with {kinds}"
            out.append(Candidate(name, dataclasses.replace(made, name=name)))
    return out


def _in_micro_batches(
    problem: Problem,
    candidates: Sequence[Candidate],
    pricer: Pricer,
    propose: Callable[[Problem], Proposal],
    progress: Callable[[str], None] | None,
) -> list[Candidate]:
    """Plans in micro-batches, more until that brings nothing: when nothing fits else, a device goes through its part
    of the batch piece by piece. The fastest plans that do not fit are tried, and what the strategy proposes when it
    knows of the pieces. What a step does not let do (see `Program.split`) keeps its reason."""
    out: list[Candidate] = []
    best = math.inf
    fastest = [c for c in candidates if c.plan is not None][:RECOMPUTED]
    for count in MICRO_BATCHES:
        named = [(f"{c.name} in {count} micro-batches", c.plan.replace(micro=Micro(count))) for c in fastest if c.plan]
        made = price_all([(n, lambda n=n, p=p: p.replace(name=n)) for n, p in named], pricer, progress, problem.stop)
        # Each piece's gradients are summed whole: split parameters may gain less than that costs.
        held = {c.name: c.plan.predicted.peak_bytes for c in fastest if c.plan and c.plan.predicted}
        fastest = [c for c, m in zip(fastest, made) if m.fits(held[c.name])]
        if problem.program.split.micro and problem.cluster.devices > 1 and not problem.stop():
            made += _search(problem.in_micro_batches(count), pricer, propose, made, progress)[0]
        out += made
        now = min((m.step_s for m in made if m.fits(problem.memory)), default=math.inf)
        if problem.stop() or (best < math.inf and now >= best):
            break
        best = min(best, now)
    return out


def _rank(candidate: Candidate) -> tuple[float, float]:
    """The faster first, and of two that are equally fast the one that holds less."""
    p = candidate.plan.predicted if candidate.plan is not None else None
    return candidate.step_s, p.peak_bytes if p is not None else math.inf


def nothing_fits(
    program: Program, candidates: Sequence[Candidate], limit: float, piped: Sequence[Pipelined] = ()
) -> Exception:
    """The error for a step that no candidate makes fit: what binds, by how much, and the nearest plan; `piped`: what
    pipelines would fit, fastest first."""
    applicable = [c for c in candidates if c.plan is not None]
    if not applicable:
        names: dict[str, list[str]] = {}
        for c in candidates:
            names.setdefault(c.reason, []).append(c.name)
        if len(names) == 1:
            return PlanError(f"no plan applies to this step: {next(iter(names))}")
        reasons = "\n".join(f"  {', '.join(who)}: {reason}" for reason, who in names.items())
        return PlanError(f"no plan applies to this step:\n{reasons}")
    nearest = min(applicable, key=lambda c: c.plan.predicted.peak_bytes)  # type: ignore[union-attr]
    plan = nearest.plan
    assert plan is not None and plan.predicted is not None
    over = plan.predicted.peak_bytes - limit
    parts = sorted(((k, v) for k, v in plan.predicted.memory.items() if k != "host"), key=lambda kv: -kv[1])
    parts_held = ", ".join(f"{k} {size(v)}" for k, v in parts if v > 0)
    largest = "\n".join(f"    {path}: {size(held)}" for path, held in largest_leaves(program, plan))
    return DoesNotFit(
        f"nothing fits {size(limit)} per device. The nearest plan is {nearest.name}: "
        f"peak {size(plan.predicted.peak_bytes)}, {size(over)} too much.\n  it holds: {parts_held}\n"
        f"  the largest state tensors per device:\n{largest}"
        + (f"\n  with pipeline stages (not executable yet) it would fit: {piped[0]}" if piped else ""),
        hint="use more devices, or a smaller batch or sequence (recomputing layers and micro-batches were tried, and "
        "are not enough); "
        + (
            f"memory={plan.predicted.peak_bytes:.3g} takes {nearest.name} all the same"
            if nearest.searched
            else f'plan="{nearest.name}" runs it all the same'
        ),
    )


def largest_leaves(program: Program, plan: Plan, count: int = 5) -> list[tuple[str, float]]:
    """(path, bytes per device) of the largest tensors of the state under a plan."""
    sizes = []
    for a, spec in zip(program.arguments, resolve(program, plan).arguments):
        if a.role != "batch":
            sizes.append((a.path, a.nbytes / math.prod(ways(plan, axes) for axes in spec)))
    return sorted(sizes, key=lambda x: -x[1])[:count]
