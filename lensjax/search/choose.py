"""Choosing: the search and every preset are priced by one scorer, and the fastest that fits is taken.

The inner search proposes a handful of plans from its model (`strategies`); the partitioner then says what each really
sends, computes and holds, and the price of that decides. Presets go the same way, so the choice is never worse than the
best of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

from lensjax._errors import DoesNotFit, PlanError
from lensjax._units import size
from lensjax.cost.by_layers import exact, pricer_of
from lensjax.cost.pricer import Pricer
from lensjax.passes.shardings import resolve, ways
from lensjax.plan.grammar import AXES
from lensjax.plan.pins import Pin, check_applicable
from lensjax.plan.plan import Micro, Plan
from lensjax.program.program import Program
from lensjax.search.build import NAMES
from lensjax.search.candidates import Candidate, preferred, price_all, searched
from lensjax.search.joint import joint
from lensjax.search.pipeline import Pipelined
from lensjax.search.pipelines import pipelines
from lensjax.search.presets import pinnable
from lensjax.search.problem import Problem
from lensjax.search.reading import solution_of
from lensjax.search.settle import settled
from lensjax.search.strategies import Proposal, strategy
from lensjax.topology.cluster import Cluster


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
    """The fastest plan that fits `memory` bytes per device (the device's own where not given; see `preferred`).

    search: the strategy (see `lensjax.search.strategies`; "milp" where not given). budget: seconds to stop after with
    the best so far. Raises DoesNotFit, with what binds and the nearest plan, when none fits.
    """
    propose = strategy(search or "milp")
    check_applicable(pins, {a.path: a.shape for a in pinnable(program)}, (*AXES, *NAMES.values()))
    limit = cluster.device.memory if memory is None else memory
    deadline = math.inf if budget is None else time.perf_counter() + budget
    stop = lambda: time.perf_counter() > deadline
    problem = Problem(program, cluster, limit, tuple(pins), stop)
    pricer = pricer_of(program, cluster)
    makers = [(n, lambda n=n: problem.preset(n)) for n in problem.preset_names()]
    candidates = price_all(makers, pricer, progress, stop)
    found, proposal = searched(problem, pricer, propose, candidates, progress)
    candidates = settled([*found, *candidates], pricer, limit, progress)
    candidates = settled(joint(problem, pricer, propose, candidates, proposal.bound, progress), pricer, limit, progress)
    if not any(c.fits(limit) for c in candidates):
        plans = [c.plan for c in candidates if c.plan is not None]
        raise nothing_fits(program, candidates, limit, pipelines(problem, math.inf, plans, progress))
    candidates = [_with_inner(problem, c, proposal) for c in candidates]
    best = preferred(candidates, limit)
    assert best is not None and best.plan is not None
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
        pricer=exact(pricer),
    )


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
