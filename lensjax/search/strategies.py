"""Strategies: who proposes plans. A package can bring its own through the entry point group `lensjax.strategies`.

A strategy is a function from a `Problem` to a `Proposal`: plans, best first, and the seconds that no plan of its space
undercuts in the inner model. Whatever it proposes is partitioned and priced like everything else, and every preset
competes: a strategy can find a better plan, never a worse one. See docs/search.md.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

from lensjax._errors import PlanError
from lensjax.plan.plan import Plan
from lensjax.search.inner import Case
from lensjax.search.problem import Problem
from lensjax.search.solve import Searched, Solution, best_first

GROUP = "lensjax.strategies"
# How many plans are partitioned, and how many of them may share their rules.
HANDFUL, ALIKE = 4, 1
# Choices that `exhaustive` goes through at most.
EXHAUSTIVE = 200_000


@dataclasses.dataclass(frozen=True)
class Proposal:
    """`plans`, best first; `bound`: seconds that nothing in the strategy's space undercuts, None where it has none;
    `searched`: how the inner search went, for reports."""

    plans: Sequence[Plan]
    bound: float | None = None
    searched: Searched | None = None


Strategy = Callable[[Problem], Proposal]


def family(s: Solution) -> Hashable:
    """Solutions that say the same: the rules without the order of the mesh, whether weights are gathered again, and
    whether parameters and state are split."""
    p = s.case.pattern
    ruled = frozenset((a, frozenset(p.roles[m] for m in mesh)) for a, mesh in p.rules)
    stored = frozenset(
        (bool(o[i].storage.params), bool(o[i].storage.state), o[i].storage.params == o[i].storage.state)
        for o, i in zip(s.case.options, s.chosen)
    )
    return ruled, s.case.again if any(x[0] for x in stored) else None, stored


def milp(problem: Problem) -> Proposal:
    """Branch and bound over meshes and rules, a mixed-integer program for how every tensor is stored: exact."""
    found = best_first(
        problem.floors(), problem.cases, problem.memory, HANDFUL, family=family, each=ALIKE, stop=problem.stop
    )
    return _proposal(problem, found)


def greedy(problem: Problem) -> Proposal:
    """As `milp`, but every group is stored alike: by far fewer choices, for programs with very many groups."""
    kept = []
    for floor, shape in sorted(problem.floors(), key=lambda x: x[0]):
        if (len(kept) >= HANDFUL and floor > kept[-1].seconds) or problem.stop():
            break
        for case in problem.cases(shape):
            kept += [s for s in uniform(case) if s.bytes <= problem.memory]
        kept = sorted(kept, key=lambda s: (s.seconds, len(s.case.sizes)))[:HANDFUL]
    return dataclasses.replace(_plans(problem, kept), bound=None)


def uniform(case: Case) -> list[Solution]:
    """The solutions of a case in which every group that can is stored in one way."""
    ways = dict.fromkeys(o.storage for options in case.options for o in options)
    out = []
    for way in ways:
        chosen = [nearest(options, way) for options in case.options]
        out.append(Solution(case, tuple(chosen), case.seconds(chosen), case.bytes(chosen)))
    return out


def nearest(options: Sequence, way) -> int:
    """The option that splits the most of what `way` splits, and nothing else."""
    fitting = [
        (len(o.storage.params) + len(o.storage.state), i)
        for i, o in enumerate(options)
        if set(o.storage.params) <= set(way.params) and set(o.storage.state) <= set(way.state)
    ]
    return max(fitting, key=lambda x: (x[0], -x[1]))[1]


def exhaustive(problem: Problem) -> Proposal:
    """Every choice there is, for small programs and clusters. Raises PlanError where there are too many."""
    cases = [c for s in problem.shapes for c in problem.cases(s)]
    count = sum(math.prod(len(o) for o in c.options) for c in cases)
    if count > EXHAUSTIVE:
        raise PlanError(
            f"{count} plans are too many for the strategy 'exhaustive' (at most {EXHAUSTIVE})", hint="use 'milp'"
        )
    kept = sorted(
        (s for c in cases if (s := brute_force(c, problem.memory)) is not None),
        key=lambda s: (s.seconds, len(s.case.sizes), s.bytes),
    )
    found = _plans(problem, kept[:HANDFUL])
    return dataclasses.replace(found, bound=kept[0].seconds if kept else math.inf)


def brute_force(case: Case, limit: float) -> Solution | None:
    """The best of all choices of a case, one after the other."""
    best = None
    for chosen in itertools.product(*(range(len(o)) for o in case.options)):
        if case.bytes(list(chosen)) <= limit:
            seconds = case.seconds(list(chosen))
            if best is None or seconds < best.seconds:
                best = Solution(case, chosen, seconds, case.bytes(list(chosen)))
    return best


def presets_only(problem: Problem) -> Proposal:
    """Nothing but the presets, which are priced in any case."""
    return Proposal(())


def _proposal(problem: Problem, found: Searched) -> Proposal:
    plans = _plans(problem, found.solutions)
    return dataclasses.replace(plans, bound=found.bound, searched=found)


def _plans(problem: Problem, solutions: Sequence[Solution]) -> Proposal:
    plans = []
    for s in solutions:
        try:
            plans.append(problem.plan(s))
        except PlanError:  # a pin that this mesh cannot have
            continue
    return Proposal(tuple(plans))


SHIPPED: dict[str, Strategy] = {
    "milp": milp,
    "greedy": greedy,
    "exhaustive": exhaustive,
    "presets-only": presets_only,
}


def names() -> list[str]:
    """The strategies there are, those of installed packages included."""
    return sorted({*SHIPPED, *(e.name for e in importlib.metadata.entry_points(group=GROUP))})


def strategy(name: str) -> Strategy:
    """The strategy of that name. Raises PlanError that lists the names."""
    if name in SHIPPED:
        return SHIPPED[name]
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            return entry.load()
    raise PlanError(f"no search strategy {name!r}", hint=f"there are: {', '.join(names())}")
