"""The decorated step: plans on the first call (or on `init` / `plan_for`), then runs.

    first call: trace -> plan -> compile -> place the state -> run;     later calls: run

Nothing of the user's is given up before the step is known to compile: an error or an interrupt before that leaves the
state as it was, and the next call starts over.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lensjax import _jax
from lensjax._errors import PlanError, TraceError
from lensjax.execute.arguments import split_init
from lensjax.execute.checks import check_alive, check_local_batch, check_state, explain_failure
from lensjax.execute.executable import Executable, OtherSignature, build, run
from lensjax.execute.place import device_mesh, local_to_global, place
from lensjax.execute.planning import Options, cluster_for, make_plan
from lensjax.passes.shardings import named, resolve
from lensjax.plan.plan import Plan
from lensjax.program.program import Program, analyze
from lensjax.program.trace import Fixed, abstract, flatten_call, is_dynamic
from lensjax.search.price import Choice

log = logging.getLogger("lensjax")


class Step:
    """A training step with a plan. Made by `lensjax.parallelize`; call it like the function it wraps."""

    def __init__(self, fn: Callable[..., Any], options: Options):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options = options
        self._run: Executable | None = None
        self._ready: list[Executable] = []
        self._program: Program | None = None
        self._choice: Choice | None = None
        self.notices: list[str] = []
        self.extra: dict[str, Any] = {}

    # ---- running ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step; the first call plans and compiles. Raises a LensjaxError where the arguments do not fit."""
        if self._run is not None:
            try:
                return self._run(*args, **kwargs)
            except (OtherSignature, ValueError, TypeError, RuntimeError) as e:
                failure = e
            return self._again(args, kwargs, failure)
        return self._first(args, kwargs)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = flatten_call(self._fn, args, kwargs)
        if self._program is not None:
            check_state(self._program, call)
        check_alive(call.paths, call.leaves)
        program = self._analyze(args, kwargs)
        executable = self._build(program)
        return self._start(executable, args, kwargs)

    def _start(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        executable.compiled  # noqa: B018 - compiles; the state is still the user's
        args, kwargs = self._placed(executable, args, kwargs)
        result = run(executable, args, kwargs)
        if executable not in self._ready:
            self._ready.append(executable)
        self._run = executable
        return result

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any], failure: Exception) -> Any:
        """A call that the current executable did not take: another shape, a state placed elsewhere, or an error."""
        assert self._run is not None
        for executable in self._ready:
            leaves = executable.leaves(args, kwargs)
            if leaves is None:
                continue
            check_alive(executable.emitted.program.call.paths, leaves)
            if executable is self._run and not executable.misplaced(leaves):
                raise explain_failure(failure, executable) from failure
            return self._start(executable, args, kwargs)
        call = flatten_call(self._fn, args, kwargs)
        check_state(self._run.emitted.program, call)
        check_alive(call.paths, call.leaves)
        program = self._analyze(args, kwargs)
        note = f"another signature: the batch is {program.batch.size}; the plan {self.plan.name!r} is used again"
        self.notices.append(note)
        log.info(note)
        return self._start(self._build(program, self.plan), args, kwargs)

    def _placed(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The call's leaves on the mesh. A buffer that stands twice in a donated state is copied: it can be given up
        once."""
        emitted = executable.emitted
        leaves = executable.leaves(args, kwargs)
        assert leaves is not None
        seen: set[int] = set()
        out = []
        for i, (leaf, sharding) in enumerate(zip(leaves, emitted.arguments)):
            placed = place(leaf, sharding, own=i in emitted.donated)
            if i in emitted.donated:
                if id(placed) in seen:
                    placed = jax.numpy.copy(placed)
                seen.add(id(placed))
            out.append(placed)
        args, kwargs = emitted.program.call.rebuild(out)
        return unfixed(args), {k: unfixed((v,))[0] for k, v in kwargs.items()}

    # ---- planning -----------------------------------------------------------------------------------------------

    def _analyze(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        _jax.check_version()
        o = self._options
        return analyze(self._fn, args, kwargs, batch_argnums=o.batch_argnums, batch_axes=o.batch_axes)

    def _build(self, program: Program, plan: Plan | None = None) -> Executable:
        plan = plan or self._plan(program)
        mesh = device_mesh(plan.mesh)
        return build(self._fn, program, plan, mesh, self._options.donate)

    def _plan(self, program: Program) -> Plan:
        """The plan for a program; made once, and kept for every later shape."""
        if self._choice is None:
            self._choice = make_plan(program, cluster_for(self._options.cluster), self._options)
            self._program = program
        elif self._program is not None:
            check_state(self._program, program.call)
        return self._choice.plan

    def plan_for(self, *shapes: Any, **kwargs: Any) -> Plan:
        """Plans for arguments given as arrays or ShapeDtypeStructs, in the step's own order. Needs no devices when a
        cluster is given."""
        return self._plan(self._analyze(shapes, kwargs))

    def init(self, fn: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)` (which makes the state), with every leaf sharded from the start.

        `batch`: an example of the step's other arguments, or ShapeDtypeStructs of it: a tuple where there are several.
        Returns what `fn` returns.
        """
        if batch is None and self._choice is None:
            name = getattr(self._fn, "__name__", "step")
            raise PlanError(
                "init needs to know the batch: shardings need a plan, a plan needs a trace, a trace needs the batch",
                hint=f"state = {name}.init({getattr(fn, '__name__', 'create_state')}, ..., batch=batch)  "
                "# an example batch, or its ShapeDtypeStructs",
            )
        made, tree = self._init(fn, args, kwargs, batch)
        return jax.tree.unflatten(tree, made(*args))

    def _init(self, fn: Callable[..., Any], args: Any, kwargs: Any, batch: Any) -> tuple[Any, Any]:
        """(a jitted function from `args` to the state's leaves, the state's tree)."""
        state = jax.eval_shape(functools.partial(fn, **kwargs), *args)
        if batch is not None:
            shapes = split_init(self._fn, state, jax.tree.map(abstract_leaf, batch))
            self._plan(self._analyze(shapes, {}))
        # Flat, and unflattened with the tree that was planned: a TrainState made twice has two optimizers that are
        # equal but not the same object, and JAX takes these for two tree structures.
        shardings, tree = jax.tree.flatten(self._state_shardings(state))
        return jax.jit(lambda *a: jax.tree.leaves(fn(*a, **kwargs)), out_shardings=shardings), tree

    def _state_shardings(self, state: Any) -> Any:
        """The shardings of a state that the planned step takes, as a tree like it."""
        program, plan = self.program, self.plan
        mesh = device_mesh(plan.mesh)
        specs = resolve(program, plan).arguments
        by_suffix = {a.path.partition("/")[2]: s for a, s in zip(program.arguments, specs)}
        by_path = {a.path: s for a, s in zip(program.arguments, specs)}
        flat, tree = jax.tree_util.tree_flatten_with_path(state)
        paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]
        ordered = [s for a, s in zip(program.arguments, specs)]
        count = len(flat)
        same = [a.shape for a in program.arguments[:count]] == [tuple(leaf.shape) for _, leaf in flat]
        if same:  # the state is the leading arguments, whatever its own paths are
            return jax.tree.unflatten(tree, [named(mesh, s) for s in ordered[:count]])
        found = []
        for path, (_, leaf) in zip(paths, flat):
            spec = by_path.get(path, by_suffix.get(path))
            if spec is None or len(spec) != len(leaf.shape):
                raise TraceError(
                    f"init made {path!r} with shape {tuple(leaf.shape)}, which the step does not take as state",
                    hint="fn must return the step's state arguments, in their order",
                )
            found.append(named(mesh, spec))
        return jax.tree.unflatten(tree, found)

    # ---- looking ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan. Raises PlanError before there is one."""
        return self._planned().plan

    @property
    def choice(self) -> Choice:
        """The plan and everything it was compared with."""
        return self._planned()

    @property
    def program(self) -> Program:
        """The program that was planned."""
        self._planned()
        assert self._program is not None
        return self._program

    def _planned(self) -> Choice:
        if self._choice is None:
            raise PlanError(
                "there is no plan yet",
                hint="call the step, step.init(create_state, ..., batch=batch), or "
                "step.plan_for(state_shapes, batch_shapes)",
            )
        return self._choice

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program (compiles it when it is not yet)."""
        return self._executable().compiled

    def lower(self) -> jax.stages.Lowered:
        """StableHLO of the planned step on the devices that are there."""
        return self._executable().lowered

    def _executable(self) -> Executable:
        return self._run if self._run is not None else self._build(self.program)

    @property
    def abstract_state(self) -> Any:
        """The state arguments as ShapeDtypeStructs with shardings: what a checkpoint is restored into. One tree where
        the state is one argument, else a tuple of them."""
        program, plan = self.program, self.plan
        mesh = device_mesh(plan.mesh)
        specs = resolve(program, plan).arguments
        leaves = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named(mesh, s)) for a, s in zip(program.arguments, specs)
        ]
        args, _ = program.call.rebuild(leaves)
        index, _ = program.call.rebuild(range(len(program.call.leaves)))
        state = tuple(
            arg
            for arg, numbers in zip(args, index)
            if any(
                program.arguments[i].result is not None or program.arguments[i].role == "parameter"
                for i in jax.tree.leaves(numbers)
            )
        )
        return state[0] if len(state) == 1 else state

    def from_local(self, batch: Any) -> Any:
        """The global batch from this process's part of it (every leaf: the process's rows along the batch dimension).

        With one process it places the batch. Raises BatchError when the parts do not make up the planned batch.
        """
        program, plan = self.program, self.plan
        mesh = device_mesh(plan.mesh)
        specs = resolve(program, plan).arguments
        members = [i for i, a in enumerate(program.arguments) if a.role == "batch"]
        flat, tree = jax.tree.flatten(batch)
        check_local_batch(program, members, flat)
        return jax.tree.unflatten(tree, [local_to_global(x, named(mesh, specs[i])) for x, i in zip(flat, members)])

    def explain(self) -> str:
        """What was chosen, against every preset, and why: a text with a table."""
        from lensjax.report.explain import explain

        return explain(self.program, self.choice, self.notices)

    def explain_trace(self) -> str:
        """What each argument was taken for."""
        from lensjax.report.explain import explain_trace

        return explain_trace(self.program)

    def __repr__(self) -> str:
        planned = f"plan {self._choice.plan.name!r}" if self._choice is not None else "not planned yet"
        return f"<lensjax step {getattr(self._fn, '__name__', '?')}: {planned}>"


class Off:
    """The undecorated step behind the same face: `LENSJAX_OFF=1` or `plan="off"`."""

    def __init__(self, fn: Callable[..., Any]):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self.plan = None
        self.extra: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def init(self, fn: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def from_local(self, batch: Any) -> Any:
        return batch

    def explain(self) -> str:
        return "lensjax is off: the step runs as it was written."

    explain_trace = explain


def abstract_leaf(leaf: Any) -> Any:
    return abstract(leaf) if is_dynamic(leaf) else leaf


def unfixed(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(v.value if isinstance(v, Fixed) else v for v in values)
