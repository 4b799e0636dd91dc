"""Companions of a step: other functions of the same state (evaluation, generation, a second player's step).

    evaluate = train_step.companion(evaluate)
    metrics = evaluate(state.params, batch)

A companion plans only what is new. The state keeps the shardings that it has under the step's plan, on the same mesh; a
batch is found among the other arguments, of any size: where it does not divide over all mesh axes that split the step's
batch, it is split over those it divides over, and each size is compiled once. So every size gives the same numbers, and
nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from lensjax import _jax
from lensjax._errors import BatchError, PlanError, TraceError
from lensjax.execute.captured import Watch
from lensjax.execute.executable import Executable
from lensjax.execute.place import device_mesh
from lensjax.execute.planning import Options
from lensjax.execute.step import Step
from lensjax.passes.shardings import resolve, ways
from lensjax.plan.plan import Plan, Rules, Spec
from lensjax.program.program import Argument, Program, analyze
from lensjax.program.trace import Call, abstract, argument_names, flatten_call, unfixed
from lensjax.search.candidates import Candidate
from lensjax.search.choose import Choice


class Companion(Step):
    """A function of a step's state, run on the step's mesh with the state as the step's plan has it. Made by
    `step.companion`; call it like the function it wraps."""

    def __init__(self, fn: Callable[..., Any], parent: Step, options: Options):
        super().__init__(fn, options)
        self._parent = parent

    def _analyze(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        _jax.check_version()
        o = self._options
        state = state_arguments(self._parent.program)
        batch = [a for a in self._parent.program.arguments if a.role == "batch"]
        try:
            program = analyze(
                self._fn, args, kwargs, batch_argnums=o.batch_argnums, batch_axes=o.batch_axes,
                held=lambda call: [i for i in range(len(call.leaves)) if find(call, i, state, batch) is not None],
            )  # fmt: skip
        except (TypeError, KeyError, IndexError, AttributeError, ValueError, TraceError) as e:
            names = {*argument_names(self._fn, len(args)), *kwargs}
            misfit = unlike(flatten_call(self._fn, args, kwargs), names, state, batch)
            if not misfit or isinstance(e, BatchError):
                raise  # the function's own error
            said = e.message if isinstance(e, TraceError) else f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
            name = getattr(self._user, "__name__", "the companion")
            raise TraceError(
                f"{name} does not run with these arguments: {said}",
                hint="; ".join(misfit) + f" (the step {getattr(self._parent._user, '__name__', '')} has them so)",
            ) from e
        self._watch = Watch(self._user, program.captured)
        return program

    def _plan(self, program: Program) -> Plan:
        made = plan_for_companion(self._parent.program, self._parent.plan, program)
        if self._choice is None:
            self._choice = Choice(made, (Candidate(made.name, made),), self._parent.choice.memory)
            self._program = program
        return made

    def _build(self, program: Program, plan: Plan | None = None) -> Executable:
        return super()._build(program, self._plan(program))

    def _gives_up(self, program: Program) -> bool:
        """An evaluation that hands on a part of the state as it is (a weight, for a log) replaces nothing."""
        inner = _jax.open_jaxpr(program.jaxpr)
        pairs = [(a.result, v) for a, v in zip(program.arguments, inner.invars) if a.result is not None]
        return any(inner.outvars[result] is not v for result, v in pairs)

    def _traced_already(self, call: Call) -> None:
        """Where a companion's arguments lie is part of its plan: the call decides."""

    def _check_state(self, program: Program, call: Call) -> None:
        """A companion takes any shapes: each is planned from the step's plan."""

    def companion(self, fn: Callable[..., Any], **options: Any) -> Step:
        """Another companion of the same step."""
        return self._parent.companion(fn, **options)

    @property
    def abstract_state(self) -> Any:
        raise PlanError("a companion has no state of its own", hint="ask the step: train_step.abstract_state")

    def save(self, directory: Any, state: Any, number: int) -> None:
        raise PlanError("a companion has no state of its own", hint="the step saves it: train_step.save(...)")

    def restore(self, directory: Any, number: int | None = None) -> Any:
        raise PlanError("a companion has no state of its own", hint="the step restores it: train_step.restore(...)")

    def init(self, fn: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        raise PlanError("a companion has no state of its own", hint="the step makes it: state = train_step.init(...)")


def state_arguments(program: Program) -> list[Argument]:
    """The arguments of a step that are its state."""
    return [a for a in program.arguments if a.role in ("parameter", "optimizer", "other") or a.result is not None]


def find(call: Call, i: int, state: Sequence[Argument], batch: Sequence[Argument]) -> Argument | None:
    """The leaf of a step's state that argument leaf `i` of a companion is: of that shape and type, and of the same path
    from the end; failing this, the only kind of tensor that it can be (no leaf of the step's batch looks like it)."""
    leaf = abstract(call.leaves[i])
    same = [a for a in state if (a.shape, a.dtype) == (leaf.shape, leaf.dtype)]
    if not same:
        return None
    path = call.paths[i]
    inner = path.partition("/")[2]
    for wanted in (path, inner):
        named = [a for a in same if wanted and f"/{a.path}".endswith(f"/{wanted}")]
        if named:
            return min(named, key=lambda a: (len(a.path), a.role != "parameter"))
    rest = lambda shape, axis: tuple(n for d, n in enumerate(shape) if d != axis)
    looks = any(a.dtype == leaf.dtype and rest(a.shape, a.batch_axis) == rest(leaf.shape, a.batch_axis) for a in batch)
    return None if looks or not leaf.shape else same[0]


def unlike(call: Call, names: set[str], state: Sequence[Argument], batch: Sequence[Argument]) -> list[str]:
    """What of a companion's call is unlike what its step takes, a line each: arguments that are no arrays, leaves that
    the state has under the same argument and this call has not, a batch of another shape or type. `names`: the call's
    arguments."""
    out = [f"{path} is a {type(unfixed(x)).__name__}, no array" for path, x in call.statics if _is_whole_argument(path)]
    paths = dict(zip(call.paths, map(abstract, call.leaves)))
    fixed = {path for path, _ in call.statics}
    for a in batch:
        if a.path.partition("/")[0] in names and a.path not in paths and a.path not in fixed:
            out.append(f"{a.path} is not there as one array, in the step it is {_say(a)}")
    ours = {a.path: a for a in state}
    for path, leaf in paths.items():
        a = next((b for b in batch if b.path == path), None)
        if a is not None and leaf.ndim != len(a.shape):
            out.append(f"{path} is {_say(leaf)}, in the step {_say(a)}")
        elif a is not None:
            same = [n == m for d, (n, m) in enumerate(zip(leaf.shape, a.shape)) if d != a.batch_axis]
            if not all(same) or leaf.dtype != a.dtype:
                out.append(f"{path} is {_say(leaf)}, in the step {_say(a)}")
        elif path in ours and (ours[path].shape, ours[path].dtype) != (leaf.shape, leaf.dtype):
            out.append(f"{path} is {_say(leaf)}, in the step {_say(ours[path])}")
    shared = {p.partition("/")[0] for p in ours} & {p.partition("/")[0] for p in paths}
    if missing := [p for p in ours if p.partition("/")[0] in shared and p not in paths]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        out.append(f"{missing[0]}{more} of the step's state {'are' if more else 'is'} not there")
    if not any(find(call, i, state, batch) is not None for i in range(len(call.leaves))):
        out.append("no argument is of the step's state")
    return out


def _is_whole_argument(path: str) -> bool:
    return "/" not in path


def _say(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def plan_for_companion(step: Program, plan: Plan, program: Program) -> Plan:
    """The plan of a companion: the step's mesh and rules, the state as it lies."""
    mesh = device_mesh(plan.mesh)
    specs = dict(zip((a.path for a in step.arguments), resolve(step, plan).arguments))
    state = state_arguments(step)
    batch = [a for a in step.arguments if a.role == "batch"]
    leaves = {}
    for i, leaf in enumerate(program.call.leaves):
        a = program.arguments[i]
        if a.role == "batch":
            continue
        spec = lies(leaf, mesh)
        if spec is None:
            found = find(program.call, i, state, batch)
            spec = specs[found.path] if found is not None else ()
        if any(spec):
            leaves[a.path] = spec
    return Plan(
        mesh=plan.mesh,
        name=plan.name,
        rules=_rules(plan, program),
        leaves=leaves,
        gather=plan.gather,
        provenance=plan.provenance,
    )


def lies(leaf: Any, mesh: Any) -> Spec | None:
    """The spec in which an array lies on the mesh; None for what lies elsewhere or nowhere yet."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
        return None
    entries = [*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec))]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def _rules(plan: Plan, program: Program) -> Rules:
    """The step's rules for activations, as far as they mean something here: of logical axes that this program has, and
    of the mesh axes over which this batch divides."""
    rules = plan.rules.activations
    split: tuple[str, ...] = ()
    if program.batch.axes:
        for axis in rules.get("batch", ()):
            if program.batch.size % ways(plan, (*split, axis)) == 0:
                split = (*split, axis)
    if not set(rules) - {"batch"}:
        return Rules(activations={"batch": split})
    names = set(program.logical.names)
    return Rules(activations={n: split if n == "batch" else axes for n, axes in rules.items() if n in names})
