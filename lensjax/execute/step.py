"""The decorated step: plans on the first call (or on `init` / `plan_for`), then runs.

    first call: trace -> plan -> compile -> place the state -> run;     later calls: run

Nothing of the user's is given up before the step is known to compile: an error or an interrupt before that leaves the
state as it was, and the next call starts over.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from lensjax import _jax
from lensjax._errors import PlanError, TraceError
from lensjax.execute.arguments import split_arrays, split_init
from lensjax.execute.captured import Watch
from lensjax.execute.checks import advice, another, check_alive, check_local_batch, check_state, traced
from lensjax.execute.executable import Executable, OtherSignature, build, run
from lensjax.execute.in_place import InPlace
from lensjax.execute.nnx import give_back, holds_modules, is_module, stop, take
from lensjax.execute.place import device_mesh, local_to_global, place
from lensjax.execute.planning import Options, cluster_for, make_plan
from lensjax.passes.shardings import named, resolve
from lensjax.plan.plan import Plan
from lensjax.program.program import Program, analyze
from lensjax.program.trace import abstract, flatten_call, is_dynamic, unfixed
from lensjax.search.choose import Choice

if TYPE_CHECKING:
    from lensjax.verify.proof import Proof

log = logging.getLogger("lensjax")


class Step:
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
        self._program: Program | None = None
        self._choice: Choice | None = None
        self._bound: weakref.WeakKeyDictionary[Any, Step] = weakref.WeakKeyDictionary()
        self.notices: list[str] = []
        self.extra: dict[str, Any] = {}

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
        if self._modules is not None:
            return self._modules.call(self._pure_call, args, kwargs)
        return self._pure_call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A decorated method: one step for each instance."""
        if instance is None:
            return self
        if instance not in self._bound:
            self._bound[instance] = Step(types.MethodType(self._user, instance), self._options)
        return self._bound[instance]

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
        return self._again(args, kwargs, failure)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = flatten_call(self._fn, args, kwargs)
        if traced(call.leaves):
            return self._fn(*args, **kwargs)
        if self._program is not None:
            check_state(self._program, call)
        check_alive(call.paths, call.leaves)
        program = self._analyze(args, kwargs)
        executable = self._build(program)
        return self._start(executable, args, kwargs)

    def _start(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = executable.leaves(args, kwargs)
        assert leaves is not None
        executable.prepare(leaves)  # the state is still the user's
        args, kwargs = self._placed(executable, leaves)
        result = run(executable, args, kwargs)
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
            check_alive(executable.emitted.program.call.paths, leaves)
            if executable is self._run and not (executable.misplaced(leaves) or executable.shared(leaves)):
                raise failure
            return self._start(executable, args, kwargs)
        call = flatten_call(self._fn, args, kwargs)
        check_state(self._run.emitted.program, call)
        check_alive(call.paths, call.leaves)
        program = self._analyze(args, kwargs)
        changed = self._run.numerics != _jax.numerics()
        note = f"{another(self._run.emitted.program, program, changed)}: the plan {self.plan.name!r} is used again"
        result = self._start(self._build(program, self.plan), args, kwargs)
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
        return program

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
        return self._plan(self._analyze(*self._taken(shapes, kwargs)))

    def init(self, fn: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)` (which makes the state), with every leaf sharded from the start.

        Arguments of `fn` that are arrays are traced; others (a seed, a config) are what they are.

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

        state = jax.eval_shape(create, *given)
        if batch is not None:
            self._plan(self._analyze_init(split_init(self._fn, give_back(state)[0], abstract_batch(batch))))
        # Flat, and unflattened with the tree that was planned: a TrainState made twice has two optimizers that are
        # equal but not the same object, and JAX takes these for two tree structures.
        shardings, tree = jax.tree.flatten(self._state_shardings(state))
        return jax.jit(lambda *a: jax.tree.leaves(create(*a)), out_shardings=shardings), given, tree

    def _analyze_init(self, readings: Sequence[tuple[Any, ...]]) -> Program:
        """The program of the first reading of state and batch that the step can be traced with."""
        failures = []
        for arguments in readings:
            try:
                return self._analyze(*self._taken(arguments, {}))
            except Exception as e:  # the user's own code, given arguments that may not be meant so
                failures.append(e)
        raise failures[0]

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

    def verify(self, *, backend: str | None = None, time_limit: float = 600.0) -> Proof:
        """The plan's proof: compiled by the cluster's own compiler, which needs none of its devices, and compared with
        what was planned. `print(step.verify())` shows it. Raises CompileError, PlanError before there is a plan."""
        from lensjax.verify.proof import prove, twice_the_batch

        cluster = cluster_for(self._options.cluster)
        again = twice_the_batch(self.program, self._fn)
        return prove(self.program, self.plan, cluster, backend=backend, again=again, time_limit=time_limit)

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
        args, _ = give_back(program.call.rebuild(leaves))[0]
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

    def explain(self, path: str | None = None) -> str:
        """What was chosen, against every preset, and why: a text with a table. With the path of a tensor
        ("params/layer/mlp/kernel"): why that one is split so, and what each other way would cost."""
        from lensjax.report.explain import explain, render

        if path is None:
            return explain(self.program, self.choice, self.notices)
        from lensjax.report.explain_tensor import explain_tensor

        return render(explain_tensor(self.program, self.choice, path))

    def what_if(self, plan: Any) -> Any:
        """Another plan (`step.plan.replace(...)`) with its prediction, by the scorer that chose this one."""
        return self.choice.what_if(plan)

    def explain_trace(self) -> str:
        """What each argument was taken for."""
        from lensjax.report.explain import explain_trace

        return explain_trace(self.program)

    def __repr__(self) -> str:
        planned = f"plan {self._choice.plan.name!r}" if self._choice is not None else "not planned yet"
        return f"<lensjax step {getattr(self._fn, '__name__', '?')}: {planned}>"


def abstract_batch(batch: Any) -> Any:
    """The shapes of a batch. Modules in it (a stream of keys) stay what they are."""
    return jax.tree.map(lambda x: x if is_module(x) else abstract_leaf(x), batch, is_leaf=stop)


def abstract_leaf(leaf: Any) -> Any:
    return abstract(leaf) if is_dynamic(leaf) else leaf
