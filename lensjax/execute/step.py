"""The decorated step: plans on the first call (or on `init` / `plan_for`), then runs.

    first call: trace -> plan -> compile -> place the state -> run;     later calls: run

Nothing of the user's is given up before the step is known to compile: an error or an interrupt before that leaves the
state as it was, and the next call starts over.
"""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.execute import extra, finite
from lensjax.execute.arguments import Reading, split_arrays, split_init
from lensjax.execute.captured import Watch
from lensjax.execute.checkpoint import Checkpoints
from lensjax.execute.checks import advice, another, check_alive, check_state, traced
from lensjax.execute.copies import Copied
from lensjax.execute.executable import Executable, OtherSignature, build, run
from lensjax.execute.in_place import InPlace
from lensjax.execute.nnx import give_back, holds_modules, is_module, stop, take
from lensjax.execute.out_of_memory import ran_out, told
from lensjax.execute.place import device_mesh, place
from lensjax.execute.planned import Planned
from lensjax.execute.planning import Options, agreed_plan, cluster_for
from lensjax.execute.processes import unconnected
from lensjax.execute.state import abstract_values, made_shapes, state_shardings
from lensjax.plan.plan import Plan
from lensjax.program.program import Program, analyze
from lensjax.program.trace import Call, abstract, flatten_call, is_dynamic, same, unfixed
from lensjax.search.choose import Choice

if TYPE_CHECKING:
    pass

log = logging.getLogger("lensjax")


class Step(Copied, Planned):
    """A training step with a plan. Made by `lensjax.parallelize`; call it like the function it wraps."""

    def __init__(self, fn: Callable[..., Any], options: Options):
        functools.update_wrapper(self, fn, updated=())
        self._user = fn
        self._fn = fn  # what is traced: the user's function, or the pure step behind it (see _adopt)
        self._modules: InPlace | None = None
        self._options = options
        self._run: Executable | None = None
        self._watch: Watch | None = None
        self._ready: list[Executable] = []
        self._ahead: tuple[Program, Executable] | None = None  # built before the first call, for this program
        self._program: Program | None = None
        self._choice: Choice | None = None
        self._bound: dict[int, Step] = {}  # by identity: each keeps its instance, which need not be hashable
        self.notices: list[str] = []
        self.extra: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}  # compiled for any number of micro-batches
        self._checkpoints = Checkpoints()
        self._numerics: Any = None  # JAX's settings when the step was traced
        self._agreed: set[Any] = set()  # shapes of local batches that all processes have

    # ---- running ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step; the first call plans and compiles. Raises a LensjaxError where the arguments do not fit.

        NNX modules among the arguments are updated in place, after the step succeeded.
        """
        if _jax.jit_disabled():
            return self._user(*args, **kwargs)  # as it was written: for a debugger
        if self._run is None:
            self._adopt(args, kwargs)
        elif self._watch is not None:
            self._watch.check()
        call = self._looked_at if finite.looked_for() else self._pure_call
        if self._modules is not None:
            return self._modules.call(call, args, kwargs)
        return call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A decorated method: one step for each instance."""
        if instance is None:
            return self
        if id(instance) not in self._bound:
            self._bound[id(instance)] = Step(types.MethodType(self._user, instance), self._options)
        return self._bound[id(instance)]

    def _adopt(self, *trees: Any) -> None:
        """Takes the step for one that updates NNX modules in place, where there are some among its arguments."""
        if self._modules is None and holds_modules(self._fn, *trees):
            self._modules = InPlace(self._fn)
            self._fn = self._modules.pure

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Arguments as the traced function takes them."""
        self._adopt(args, kwargs)
        return self._modules.take(args, kwargs).tree if self._modules is not None else (args, kwargs)

    def _pure_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._run is None:
            return self._first(args, kwargs)
        try:
            return self._run(*args, **kwargs)
        except (OtherSignature, ValueError, TypeError, RuntimeError) as e:
            failure = e
        self._check_memory(self._run, args, kwargs, failure)
        return self._again(args, kwargs, failure)

    def _looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """While JAX was asked to stop at what is not finite."""
        if traced(jax.tree.leaves((args, kwargs))):
            return self._pure_call(args, kwargs)
        return finite.run(self._pure_call, self._fn, args, kwargs, self.extra)

    def _check_memory(self, executable: Executable, args: Any, kwargs: Any, failure: Exception) -> None:
        """Raises OutOfMemory, with what is held and what would fit, where that is the failure."""
        if ran_out(failure):
            leaves = jax.tree.leaves((args, kwargs))
            raise told(executable.emitted, cluster_for(self._options.cluster), failure, leaves) from failure

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = flatten_call(self._fn, args, kwargs)
        if traced(call.leaves):
            return self._fn(*args, **kwargs)
        if self._program is not None:
            self._check_state(self._program, call)
        check_alive(call.paths, call.leaves, self._program)
        program = self._traced_already(call) or self._analyze(args, kwargs)
        ahead = self._ahead is not None and self._ahead[0] is program
        executable = self._executable() if ahead else self._build(program)
        return self._start(executable, args, kwargs)

    def _traced_already(self, call: Call) -> Program | None:
        """The planned program, where this call is of its signature: `init` and `plan_for` traced it."""
        known = self._program
        if known is None or self._numerics != _jax.numerics():
            return None
        before = known.call
        same_tree = (call.tree, call.dynamic, call.paths) == (before.tree, before.dynamic, before.paths)
        fixed = len(call.statics) == len(before.statics) and all(
            same(a, b) for (_, a), (_, b) in zip(call.statics, before.statics)
        )
        if not same_tree or not fixed or list(map(abstract, call.leaves)) != list(map(abstract, before.leaves)):
            return None
        if self._watch is not None:
            self._watch.check()
        return known

    def _start(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = executable.leaves(args, kwargs)
        assert leaves is not None
        executable.prepare(leaves)  # the state is still the user's
        executable.elsewhere.update(i for i, x in enumerate(leaves) if executable.comes_elsewhere(i, x))
        try:
            args, kwargs = self._placed(executable, leaves)
            result = run(executable, args, kwargs)
        except (OtherSignature, RuntimeError) as e:
            if isinstance(e, OtherSignature) or "deleted" in str(e):  # by another thread, meanwhile
                check_alive(executable.emitted.program.call.paths, leaves, executable.emitted.program)
            self._check_memory(executable, args, kwargs, e)
            raise
        if executable not in self._ready:
            self._ready.append(executable)
        self._run = executable
        return result

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any], failure: Exception) -> Any:
        """A call that the current executable did not take: another shape, a state placed elsewhere, or an error."""
        assert self._run is not None
        if traced(jax.tree.leaves((args, kwargs))):
            return self._fn(*args, **kwargs)  # inside the user's own jit or grad: part of that program
        for executable in self._ready:
            leaves = executable.leaves(args, kwargs)
            if leaves is None:
                continue
            check_alive(executable.emitted.program.call.paths, leaves, executable.emitted.program)
            if executable is self._run and not (executable.misplaced(leaves) or executable.shared(leaves)):
                raise failure
            return self._start(executable, args, kwargs)
        call = flatten_call(self._fn, args, kwargs)
        self._check_state(self._run.emitted.program, call)
        check_alive(call.paths, call.leaves, self._program)
        program = self._analyze(args, kwargs)
        changed = self._run.numerics != _jax.numerics()
        note = f"{another(self._run.emitted.program, program, changed)}: the plan {self.plan.name!r} is used again"
        made = self._build(program, self.plan)
        result = self._start(made, args, kwargs)
        if made.parts is not None:
            note += made.parts.said
        self.notices.append(note)
        log.info(note)
        return result

    def _placed(self, executable: Executable, leaves: list[Any]) -> tuple[Any, Any]:
        """The call's arguments, the state on the mesh. A buffer that stands twice in a donated state is copied: it can
        be given up once."""
        emitted = executable.emitted
        out = [
            leaf if executable.taken_as_it_is(i, leaf) else place(leaf, sharding, own=i in emitted.donated)
            for i, (leaf, sharding) in enumerate(zip(leaves, emitted.arguments))
        ]
        seen = {id(x) for i, x in enumerate(out) if i not in emitted.donated}
        for i in emitted.donated:
            if id(out[i]) in seen and isinstance(out[i], jax.Array):
                out[i] = jax.numpy.copy(out[i])
            seen.add(id(out[i]))
        args, kwargs = emitted.program.call.rebuild(out)
        return tuple(map(unfixed, args)), {k: unfixed(v) for k, v in kwargs.items()}

    # ---- planning -----------------------------------------------------------------------------------------------

    def _analyze(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        _jax.check_version()
        o = self._options
        program = analyze(self._fn, args, kwargs, batch_argnums=o.batch_argnums, batch_axes=o.batch_axes)
        self.notices += [n for n in advice(program) if n not in self.notices]
        self._watch = Watch(self._user, program.captured)
        self._numerics = _jax.numerics()
        return program

    def _build(self, program: Program, plan: Plan | None = None) -> Executable:
        plan = plan or self._plan(program)
        mesh = device_mesh(plan.mesh)
        donate = self._options.donate and self._gives_up(program)
        made = build(self._fn, program, plan, mesh, donate, self.extra, self._parts)
        extra.fill(self.extra, made.emitted.extra)
        return made

    def _gives_up(self, program: Program) -> bool:
        """Whether a call may give up the buffers of the state."""
        return True

    def _plan(self, program: Program) -> Plan:
        """The plan for a program; made once, and kept for every later shape."""
        if self._choice is None:
            for alone in unconnected():
                self.notices.append(alone)
                warnings.warn(alone, RuntimeWarning, stacklevel=2)
            self._choice = agreed_plan(program, self._options, getattr(self._fn, "__name__", "step"))
            self._program = program
        elif self._program is not None:
            self._check_state(self._program, program.call)
        return self._choice.plan

    def _check_state(self, program: Program, call: Call) -> None:
        check_state(program, call)

    def plan_for(self, *shapes: Any, **kwargs: Any) -> Plan:
        """Plans for arguments given as arrays or ShapeDtypeStructs, in the step's own order. Needs no devices when a
        cluster is given."""
        return self._plan(self._analyze(*self._taken(shapes, kwargs)))

    def init(self, fn: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)` (which makes the state), with every leaf sharded from the start.

        Arguments of `fn` that are arrays are traced; others (a seed, a config) are what they are.

        `batch`: an example of the step's other arguments, or ShapeDtypeStructs of it: a tuple where there are several.
        Returns what `fn` returns. Raises PlanError where there is nothing to call, or no batch to plan for.
        """
        if not callable(fn):
            raise PlanError(
                f"init got a {type(fn).__name__} where the function that makes the state is expected",
                hint="state = step.init(create_state, ..., batch=batch); a state that exists goes to the step itself",
            )
        if batch is None and self._choice is None:
            name = getattr(self._fn, "__name__", "step")
            raise PlanError(
                "init needs to know the batch: shardings need a plan, a plan needs a trace, a trace needs the batch",
                hint=f"state = {name}.init({getattr(fn, '__name__', 'create_state')}, ..., batch=batch)  "
                "# an example batch, or its ShapeDtypeStructs",
            )
        make, given, tree = self._init(fn, args, kwargs, batch)
        return give_back(jax.tree.unflatten(tree, make(*given)))[0]

    def _init(self, fn: Callable[..., Any], args: Any, kwargs: Any, batch: Any) -> tuple[Any, list[Any], Any]:
        """(a jitted function that makes the state's leaves, the arrays it takes, the state's tree, modules taken
        apart)."""
        given, rebuild = split_arrays((args, kwargs))

        def create(*given: Any) -> Any:
            a, k = rebuild(given)
            made = fn(*a, **k)
            return take(made).tree if holds_modules(fn, made) else made

        state = made_shapes(create, given, fn)
        if batch is not None:
            self._plan(self._analyze_init(split_init(self._fn, give_back(state)[0], abstract_batch(batch))))
        # Flat, and unflattened with the tree that was planned: a TrainState made twice has two optimizers that are
        # equal but not the same object, and JAX takes these for two tree structures.
        shardings, tree = state_shardings(self.program, self.plan, device_mesh(self.plan.mesh), state)
        return jax.jit(lambda *a: jax.tree.leaves(create(*a)), out_shardings=shardings), given, tree

    def _analyze_init(self, readings: Sequence[Reading]) -> Program:
        """The program of the first reading of state and batch that the step can be traced with."""
        failures = []
        for args, kwargs in readings:
            try:
                return self._analyze(*self._taken(args, kwargs))
            except Exception as e:  # the user's own code, given arguments that may not be meant so
                failures.append(e)
        raise failures[0]

    def companion(
        self,
        fn: Callable[..., Any],
        *,
        batch_argnums: Any = None,
        batch_axes: Any = None,
        donate: bool = True,
    ) -> Step:
        """Another function of this step's state (evaluation, generation, a second player's step), run where the state
        lies: on the same mesh, with the same shardings. Only what is new in it is planned, at its first call, which
        needs this step's plan. It finds its own batch, of any size, or has none.

        `batch_argnums`, `batch_axes` and `donate` are as in `parallelize`, for `fn`.
        """
        from lensjax.execute.companion import Companion

        if not callable(fn):
            raise PlanError(
                f"companion got {fn!r} where a function of the state is expected",
                hint="options go by name, as in step.companion(evaluate, donate=False)",
            )
        argnums = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums
        return Companion(
            fn, self, Options(self._options.cluster, batch_argnums=argnums, batch_axes=batch_axes, donate=donate)
        )

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self, directory: Any, state: Any, number: int) -> None:
        """Writes the state (and `step.extra`) as checkpoint `number` of a folder, with Orbax, in the background.

        Returns when the values are copied, so that the next step may give their buffers up. `wait` waits for the rest;
        so does the next `save`, and the end of the program. Several processes call it together. Raises StateError.
        """
        like = abstract_values(self.program, self.plan, device_mesh(self.plan.mesh))
        self._checkpoints.save(directory, number, state, self.extra, self.plan, like)

    def wait(self) -> None:
        """Waits until nothing is being written any more; raises what went wrong while writing."""
        self._checkpoints.wait()

    def saved(self, directory: Any) -> tuple[int, ...]:
        """The numbers of the complete checkpoints in a folder, in order; one that was interrupted is none."""
        return self._checkpoints.saved(directory)

    def restore(self, directory: Any, number: int | None = None) -> Any:
        """The state of a checkpoint (None: the newest complete one), placed as this step's plan has it.

        The plan has to be there (`init` or `plan_for`); it may be another one, for other devices, than the checkpoint
        was written under. Returns what `init` returns: modules anew. Raises StateError.
        """
        mesh = device_mesh(self.plan.mesh)
        wanted = abstract_values(self.program, self.plan, mesh)
        declared = self._executable().emitted.extra
        state, hidden = self._checkpoints.restore(directory, number, wanted, declared)
        self.extra.clear()
        self.extra.update(hidden or {})
        extra.fill(self.extra, declared)
        if declared and hidden is None:
            self.notices.append(
                f"{directory} has no hidden state for the plan {self.plan.name!r}: it starts from zeros"
            )
        return state

    def __repr__(self) -> str:
        planned = f"plan {self._choice.plan.name!r}" if self._choice is not None else "not planned yet"
        return f"<lensjax step {getattr(self._fn, '__name__', '?')}: {planned}>"


def abstract_batch(batch: Any) -> Any:
    """The shapes of a batch. Modules in it (a stream of keys) stay what they are."""
    return jax.tree.map(lambda x: x if is_module(x) else abstract_leaf(x), batch, is_leaf=stop)


def abstract_leaf(leaf: Any) -> Any:
    return abstract(leaf) if is_dynamic(leaf) else leaf
