"""From a solution of the inner model to a plan that can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lensjax import _jax
from lensjax.plan.pins import Pin
from lensjax.plan.plan import Axis, MeshPlan, Plan, Rules, Spec
from lensjax.program.program import Program
from lensjax.search.inner import Case
from lensjax.search.presets import model_spec, pinned, split
from lensjax.search.solve import Solution
from lensjax.search.space import Axes
from lensjax.search.storage import Storage
from lensjax.search.tables import Tables

# What names of plans that a search proposed begin with.
SEARCHED = "searched "
NAMES = {"tensor": "tp", "sequence": "cp", "expert": "ep"}


def build_plan(
    program: Program,
    t: Tables,
    axes: Axes,
    solution: Solution,
    *,
    pins: Sequence[Pin] = (),
    tier_of: Mapping[int, str] | None = None,
) -> Plan:
    """The plan of a solution, pins applied. Raises PlanError where a pin does not apply."""
    case = solution.case
    storage = {g: case.options[g][i].storage for g, i in enumerate(solution.chosen)}
    names = mesh_names(case.pattern.roles, list(storage.values()))
    mesh = MeshPlan(
        tuple(Axis(n, s, _tier(case.sizes, i, tier_of or {})) for i, (n, s) in enumerate(zip(names, case.sizes)))
    )
    sizes = mesh.shape
    activations = rules_of(program, axes, case, names)
    model = {axes.logical[a]: names[m[0]] for a, m in case.pattern.rules if _rules_weights(axes, a, case)}
    group = {i: storage[g] for g, x in enumerate(t.groups) for i in x.leaves}
    leaves = _leaves(program, model, group, names, sizes)
    leaves = pinned(program, pins, leaves, sizes)
    gathers = any(s.params for s in storage.values())
    named = {k: v for k, v in activations.items() if k != "batch" and k in _names(program, model)}
    return Plan(
        mesh=mesh,
        name=name_of(case, names, storage),
        rules=Rules(params=named, optimizer=named, grads=named, activations=activations),
        leaves=leaves,
        gather={"*": "again" if case.again else "once"} if gathers else {},
    )


def _names(program: Program, model: Mapping[int, str]) -> set[str]:
    return {program.logical.names[a] for a in model} if model else set()


def _rules_weights(axes: Axes, a: int, case: Case) -> bool:
    return a not in axes.batch and a not in axes.sequence and a in axes.logical


def rules_of(program: Program, axes: Axes, case: Case, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The plan's activation rules, in order."""
    found: dict[str, tuple[str, ...]] = {}
    only_batch = all(a in axes.batch for a, _ in case.pattern.rules)
    for a, mesh in case.pattern.rules:
        if a in axes.batch:
            found["batch"] = tuple(names[m] for m in mesh if case.sizes[m] > 1)
        elif not only_batch and a in axes.logical:
            found[program.logical.names[axes.logical[a]]] = tuple(names[m] for m in mesh)
    found.setdefault("batch", ())
    return found


def mesh_names(roles: Sequence[str], storage: Sequence[Storage]) -> tuple[str, ...]:
    """Names of the mesh axes: what a data axis splits names it."""
    names: list[str] = [NAMES.get(r, "") for r in roles]
    for i in reversed(range(len(roles))):
        if names[i]:
            continue
        splits = (
            "fsdp" if any(i in s.params for s in storage) else "zero1" if any(i in s.state for s in storage) else "dp"
        )
        names[i] = next(n for n in (splits, "dp", "zero1", "fsdp") if n not in names)
    return tuple(names)


def name_of(case: Case, names: Sequence[str], storage: Mapping[int, Storage]) -> str:
    parts = [f"{n}={s}" for n, s in zip(names, case.sizes)]
    return SEARCHED + ",".join(parts)


def _tier(sizes: Sequence[int], i: int, tier_of: Mapping[int, str]) -> str:
    """The smallest tier that holds the axis and every axis inside it."""
    inside = 1
    for s in sizes[i:]:
        inside *= s
    fitting = [size for size in tier_of if size >= inside]
    return tier_of[min(fitting)] if fitting else ""


def _leaves(
    program: Program,
    model: Mapping[int, str],
    storage: Mapping[int, Storage],
    names: Sequence[str],
    sizes: Mapping[str, int],
) -> dict[str, Spec]:
    logical = program.logical if model else None
    invars = _jax.open_jaxpr(program.jaxpr).invars
    stacked = {i for layer in program.layers for i in layer.parameters}
    out = {}
    for i, a in enumerate(program.arguments):
        like = i if a.follows is None else a.follows
        if a.role not in ("parameter", "optimizer") or like not in storage:
            continue
        spec: Spec = ((),) * len(a.shape)
        if logical is not None:
            spec = model_spec(model, [logical.major(invars[like], d) for d in range(len(a.shape))], a.shape, sizes)
        own = storage[like].params if a.role == "parameter" else storage[like].state
        along = [names[m] for m in storage[like].order]
        spec = split(a.shape, spec, [names[m] for m in own], sizes, like in stacked, along)
        if any(spec):
            out[a.path] = spec
    return out
