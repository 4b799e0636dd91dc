"""Candidates: plans with their price, and where they come from: presets by name, and what a strategy proposes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from lensjax._errors import BatchError, PartitionError, PlanError
from lensjax.cost.pricer import Pricer, content
from lensjax.plan.plan import Plan, Predicted
from lensjax.search.build import SEARCHED
from lensjax.search.problem import Problem
from lensjax.search.strategies import Proposal

# How often a search is repeated with less memory when the partitioner finds more than the inner model did.
ROUNDS = 3
# Predicted seconds that are closer than this part are the same: no model of a step can tell them apart.
TIE = 5e-4


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


def searched(
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
    seen = {content(c.plan) for c in presets if c.plan is not None}
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
        plans = [p for p in proposal.plans if content(p) not in seen]
        seen |= {content(p) for p in plans}
        plans = named(plans, {c.name for c in found})
        new = price_all([(p.name, lambda p=p: p) for p in plans], pricer, progress, problem.stop)
        found += new
        best = least([*found, *presets], problem.memory)
        large = [c for c in new if c.plan is not None and not c.fits(problem.memory) and c.step_s < best]
        if problem.stop() or (not large and (proposal.plans or round_)):
            break
        over = max((c.plan.predicted.peak_bytes / problem.memory for c in large), default=0.0)  # type: ignore[union-attr]
        # Nothing was proposed: the model may hold too much for too large, so it gets a little more.
        allowed = allowed / over * 0.98 if over else allowed * 1.15
    return found, first


def named(plans: Sequence[Plan], taken: set[str]) -> list[Plan]:
    """The plans, each with a name of its own."""
    out = []
    for plan in plans:
        number = next(n for n in itertools.count(1) if f"{plan.name}{'' if n == 1 else f' #{n}'}" not in taken)
        plan = plan.replace(name=plan.name if number == 1 else f"{plan.name} #{number}")
        taken = {*taken, plan.name}
        out.append(plan)
    return out


def rank(candidate: Candidate) -> tuple[float, float]:
    """The faster first, and of two that are equally fast the one that holds less."""
    p = candidate.plan.predicted if candidate.plan is not None else None
    return candidate.step_s, p.peak_bytes if p is not None else math.inf


def least(candidates: Iterable[Candidate], memory: float) -> float:
    """Seconds of the fastest that fits; infinite where nothing does."""
    return min((c.step_s for c in candidates if c.fits(memory)), default=math.inf)


def preferred(candidates: Sequence[Candidate], memory: float) -> Candidate | None:
    """The fastest that fits; of those that are as fast as it (`TIE`) the one that a preset names, since what is simpler
    is easier to trust. None where nothing fits. `candidates`: best first."""
    fitting = [c for c in candidates if c.fits(memory)]
    alike = [c for c in fitting if c.step_s <= fitting[0].step_s * (1 + TIE)]
    return next((c for c in alike if not c.searched), next(iter(alike), None))
