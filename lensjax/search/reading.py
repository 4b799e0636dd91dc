"""A plan as a solution of the inner model: its mesh's roles, its rules and how it stores every group.

So a preset, a pinned plan or one from a file can be compared with what the search found, and with the bound.
"""

from __future__ import annotations

from lensjax.plan.plan import Plan, Spec
from lensjax.search.problem import Problem
from lensjax.search.rules import Pattern, Rule
from lensjax.search.solve import Solution
from lensjax.search.storage import Storage


def solution_of(problem: Problem, plan: Plan) -> Solution | None:
    """The solution that a plan is nearest to; None where the plan says what the space cannot (rules for axes that the
    tables do not know)."""
    names = [a.name for a in plan.mesh.axes]
    at = {n: i for i, n in enumerate(names)}
    seen = problem.narrowed(plan)
    rules = _rules(problem, seen, at) if seen is not None else None
    if rules is None or plan.mesh.order is not None:
        return None
    sizes = tuple(a.size for a in plan.mesh.axes)
    case = problem.model.case(Pattern(_roles(problem, rules, len(names)), rules), sizes, _again(plan))
    chosen = []
    for group, options in zip(problem.tables.groups, case.options):
        wanted = _storage(problem, plan, at, group.leaves)
        chosen.append(min(range(len(options)), key=lambda i: _distance(options[i].storage, wanted)))
    return Solution(case, tuple(chosen), case.seconds(chosen), case.bytes(chosen))


def _rules(problem: Problem, plan: Plan, at: dict[str, int]) -> tuple[Rule, ...] | None:
    axes, rules = problem.axes, []
    number: dict[str, list[int]] = {}
    for own, theirs in axes.logical.items():
        number.setdefault(problem.seen.logical.names[theirs], []).append(own)
    for name, mesh in plan.rules.activations.items():
        mine = list(axes.batch) if name == "batch" else number.get(name)
        if mine is None:
            return None
        if mesh:
            rules += [(a, tuple(at[m] for m in mesh)) for a in mine]
    return tuple(rules)


def _roles(problem: Problem, rules: tuple[Rule, ...], count: int) -> tuple[str, ...]:
    axes, roles = problem.axes, []
    for m in range(count):
        ruled = {a for a, mesh in rules if m in mesh}
        if ruled & set(axes.batch):
            roles.append("expert" if ruled - set(axes.batch) else "data")
        elif ruled and ruled <= set(axes.sequence):
            roles.append("sequence")
        else:
            roles.append("tensor" if ruled else "data")
    return tuple(roles)


def _again(plan: Plan) -> bool:
    return next(iter(plan.gather.values()), "once") == "again"


def _storage(problem: Problem, plan: Plan, at: dict[str, int], leaves: tuple[int, ...]) -> Storage:
    arguments = problem.program.arguments
    params = _axes([plan.leaves.get(arguments[i].path, ()) for i in leaves], at)
    state = _axes([plan.leaves.get(a.path, ()) for a in arguments if a.role == "optimizer" and a.follows in leaves], at)
    return Storage(params, tuple(sorted({*params, *state})))


def _axes(specs: list[Spec], at: dict[str, int]) -> tuple[int, ...]:
    return tuple(sorted({at[a] for spec in specs for dim in spec for a in dim}))


def _distance(own: Storage, wanted: Storage) -> tuple[int, int]:
    difference = set(own.params) ^ set(wanted.params), set(own.state) ^ set(wanted.state)
    return sum(map(len, difference)), len(own.state)
