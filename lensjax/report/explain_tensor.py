"""Why a tensor is split as it is: what the plan does with it, and what each other way to store it would cost.

The alternatives change this tensor's group alone (tensors that are stored and used alike: all layers of a stack, the
moments that follow). Their seconds and bytes are those of the search's model, from which the plan was proposed; the
plan's own prediction, from the partitioner, stands above.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lensjax._errors import PlanError
from lensjax.passes.shardings import resolve
from lensjax.plan.pins import matches
from lensjax.program.program import Program
from lensjax.report.flow import Flow
from lensjax.report.units import duration, size, spec, typed
from lensjax.search.choose import Choice
from lensjax.search.reading import solution_of


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One way to store a tensor's group: mesh axes that split the parameters and the state; seconds per step and peak
    bytes of the whole step with it, in the search's model, and whether that fits."""

    params: tuple[str, ...]
    state: tuple[str, ...]
    step_s: float
    peak_bytes: float
    fits: bool
    chosen: bool


def alternatives(choice: Choice, path: str) -> tuple[Alternative, ...]:
    """Every way to store the parameter at `path` under the chosen mesh and rules, fastest first. Raises PlanError for a
    path that is not a parameter's, or a plan that the search's model cannot describe."""
    problem = choice.problem
    solution = solution_of(problem, choice.plan) if problem is not None else None
    if problem is None or solution is None:
        raise PlanError("the plan was given, not searched: there are no alternatives to compare it with")
    group = _group(problem, path)
    names = [a.name for a in choice.plan.mesh.axes]
    out = []
    for i, option in enumerate(solution.case.options[group]):
        chosen = [*solution.chosen[:group], i, *solution.chosen[group + 1 :]]
        peak = solution.case.bytes(chosen)
        params, state = (_named(names, s) for s in (option.storage.params, option.storage.state))
        seconds = solution.case.seconds(chosen)
        out.append(Alternative(params, state, seconds, peak, peak <= choice.memory, i == solution.chosen[group]))
    return tuple(sorted(out, key=lambda a: (not a.chosen, not a.fits, a.step_s)))


def _named(names: list[str], axes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(names[a] for a in axes)


def find(program: Program, path: str) -> int:
    """The index of the one argument that a path or pattern names. Raises PlanError that lists near ones."""
    hits = [i for i, a in enumerate(program.arguments) if a.path == path or matches(path, a.path)]
    hits = hits or [i for i, a in enumerate(program.arguments) if a.path.endswith("/" + path)]
    hits = hits or [i for i, a in enumerate(program.arguments) if fnmatch.fnmatch(a.path, f"*{path}*")]
    parameters = [i for i in hits if program.arguments[i].role == "parameter"]
    if len(parameters) == 1 or len(hits) == 1:
        return (parameters or hits)[0]
    if not hits:
        import difflib

        near = difflib.get_close_matches(path, [a.path for a in program.arguments], n=3, cutoff=0.0)
        raise PlanError(f"the step has no tensor {path!r}", hint=f"near ones: {', '.join(near)}")
    raise PlanError(
        f"{path!r} names {len(hits)} tensors",
        hint="for example " + ", ".join(program.arguments[i].path for i in hits[:3]),
    )


def _group(problem: Any, path: str) -> int:
    i = find(problem.program, path)
    for g, group in enumerate(problem.tables.groups):
        if i in group.leaves or problem.program.arguments[i].follows in group.leaves:
            return g
    raise PlanError(f"{problem.program.arguments[i].path} is no parameter: only these are stored in one way or another")


def explain_tensor(program: Program, choice: Choice, path: str) -> Any:
    """Why the tensor at `path` is split as it is, as a rich renderable."""
    i = find(program, path)
    a = program.arguments[i]
    own = resolve(program, choice.plan).arguments[i]
    head = f"{a.path}: {typed(a.dtype, a.shape)}, {a.role}, split {spec(own)}"
    rows = alternatives(choice, path)
    mine = next((r for r in rows if r.chosen), rows[0])
    group = choice.problem.tables.groups[_group(choice.problem, path)]  # type: ignore[union-attr]
    more = len(group.leaves) - 1
    lines = [head + (f"; {more} more tensors are stored and used alike" if more > 0 else ""), _why(mine, rows)]
    table = Table("parameter over", "state over", "step", "against the plan", "peak", "fits", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for r in rows:
        apart = r.step_s - mine.step_s
        table.add_row(
            Text(_over(r.params)), Text(_over(r.state)), duration(r.step_s),
            "the plan" if r.chosen else ("+" if apart >= 0 else "") + duration(apart),
            size(r.peak_bytes), "yes" if r.fits else "no",
        )  # fmt: skip
    table.caption = "seconds and bytes of the search's model; only this tensor and those like it change"
    table.caption_justify = "left"
    return Group(*map(Flow, lines), table)


def _over(axes: tuple[str, ...]) -> str:
    return "+".join(axes) or "whole"


def _why(mine: Alternative, rows: tuple[Alternative, ...]) -> str:
    faster = [r for r in rows if not r.chosen and r.step_s < mine.step_s * (1 - 1e-6)]
    fitting = [r for r in faster if r.fits]
    if fitting:
        best = min(fitting, key=lambda r: r.step_s)
        return (
            f"the search's model finds {_over(best.params)} with state {_over(best.state)} faster by "
            f"{duration(mine.step_s - best.step_s)}; the partitioner did not confirm that, or was not asked"
        )
    if faster:
        best = min(faster, key=lambda r: r.step_s)
        return (
            f"a faster way ({_over(best.params)}, state {_over(best.state)}) does not fit: peak {size(best.peak_bytes)}"
        )
    return "no other way is faster"
