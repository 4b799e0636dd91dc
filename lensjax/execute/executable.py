"""A program under a plan, compiled for real devices, behind the user's own signature.

The steady state costs what a hand-written `jax.jit` costs: where every leaf of the arguments is an array, the jitted
function takes the user's arguments as they are and JAX's own dispatch flattens them. Only calls with static leaves,
keywords or captured arrays are flattened here.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lensjax import _jax
from lensjax._errors import CompileError, StateError
from lensjax.execute import extra
from lensjax.execute.ahead import Ahead, ahead
from lensjax.execute.counted import Parts
from lensjax.execute.place import place
from lensjax.passes.emit import Emitted, emit, shapes
from lensjax.plan.plan import Plan
from lensjax.program.opaque import opaque
from lensjax.program.program import Program
from lensjax.program.trace import matching_leaves, refuse_explicit_mesh


class OtherSignature(Exception):
    """A call does not have the tree or the shapes that the executable was made for."""


@dataclasses.dataclass(frozen=True)
class Executable:
    """A compiled step. `direct`: `jitted` takes the user's arguments; otherwise flat leaves, then the captured arrays.
    `guarded`: arguments that were given up must be found before JAX sees them. `numerics`: JAX's settings then.
    `several`: there are other processes. `ahead`: see `execute.ahead`. `store`: the step's hidden state (see
    `execute.extra`). `elsewhere`: batch leaves that were found committed to other devices: a loader that puts them
    there does so at every call, so every call moves them. `parts`: the programs that run instead of `jitted`, where the
    number of micro-batches is open (`lowered` and `compiled` are the whole step as one program all the same, made when
    they are asked for)."""

    fn: Callable[..., Any]
    emitted: Emitted
    jitted: Any
    direct: bool
    captured: tuple[jax.Array, ...]
    guarded: bool
    numerics: tuple[Any, ...]
    several: bool
    ahead: Ahead = dataclasses.field(compare=False)
    store: dict[str, Any] = dataclasses.field(default_factory=dict)
    elsewhere: set[int] = dataclasses.field(default_factory=set)
    parts: Parts | None = None
    lock: Any = dataclasses.field(default_factory=threading.RLock, compare=False, repr=False)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        return self._lower(shapes(self.emitted))

    def _lower(self, leaves: list[jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        args = self.emitted.program.call.rebuild(leaves)[0] if self.direct else [*leaves, *self.emitted.extra.values()]
        try:
            return self.jitted.lower(*args)
        except ValueError as e:
            kernels = [k for k in opaque(self.emitted.program.jaxpr) if k.kind == "pallas kernel"]
            if not kernels:
                raise
            raise CompileError(
                f"{kernels[0]} does not compile for {jax.default_backend()}: {str(e).splitlines()[0]}",
                hint="run it where it is at home, interpret it here (pallas_call(..., interpret=True)), or only look: "
                "step.plan_for(...)",
            ) from e

    def prepare(self, leaves: list[Any]) -> None:
        """Compiles for a call with these leaves, before the call could give up the state's buffers.

        JAX compiles again for an argument that comes from elsewhere. So this compiles for what later calls bring: the
        state where the step leaves it, the rest as it comes. Raises CompileError.
        """
        if self.parts is not None:
            self._compile(self.parts.prepare)
            return
        if "compiled" not in self.__dict__:
            known = shapes(self.emitted)
            for i, leaf in enumerate(leaves):
                if self.taken_as_it_is(i, leaf):
                    known[i] = jax.ShapeDtypeStruct(known[i].shape, known[i].dtype, weak_type=known[i].weak_type)
            self.__dict__["lowered"] = self._lower(known)
        self.compiled  # noqa: B018 - compiles

    def taken_as_it_is(self, i: int, leaf: Any) -> bool:
        """Whether JAX places argument `i` itself: no state, and not committed to devices. With several processes it
        places Python numbers only."""
        if self.emitted.program.arguments[i].result is not None:
            return False
        if self.several:
            return isinstance(leaf, bool | int | float | complex)
        return not (isinstance(leaf, jax.Array) and leaf.committed)

    def comes_elsewhere(self, i: int, leaf: Any) -> bool:
        """Whether argument `i`, no state, is committed to devices that the executable does not take it from."""
        other = self.emitted.program.arguments[i].result is None and isinstance(leaf, jax.Array) and leaf.committed
        return other and not self.several and not leaf.sharding.is_equivalent_to(self.emitted.arguments[i], leaf.ndim)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step. Raises CompileError."""
        return self._compile(self.lowered.compile)

    def _compile(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except jax.errors.JaxRuntimeError as e:
            raise CompileError(
                f"XLA did not compile the step under the plan {self.emitted.plan.name!r}: {str(e).splitlines()[0]}",
                hint='the state is untouched; try another plan, as in parallelize(plan="dp")',
            ) from e

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step. Raises OtherSignature before anything is computed or given up."""
        if not self.guarded:
            return self.ahead(self._run(args, kwargs))
        with self.lock:  # another thread may give up the same state between the look at it and the dispatch
            result = self._run(args, kwargs)
        return self.ahead(result)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.direct and not self.several and not self.elsewhere:
            if kwargs or ((self.guarded or self.emitted.donated) and self._unsafe(jax.tree.leaves(args))):
                raise OtherSignature
            return self.jitted(*args)
        leaves = matching_leaves(self.fn, self.emitted.program.call, args, kwargs)
        if leaves is None or ((self.guarded or self.emitted.donated) and self._unsafe(leaves)):
            raise OtherSignature
        if self.several:
            leaves = [self._everywhere(i, x) for i, x in enumerate(leaves)]
        elif self.elsewhere:
            leaves = [place(x, self.emitted.arguments[i]) if i in self.elsewhere else x for i, x in enumerate(leaves)]
        if self.direct:
            return self.jitted(*self.emitted.program.call.rebuild(leaves)[0])
        for x in self.captured:
            if x.is_deleted():  # it lay in its place already, so it is the user's own; XLA must not see it
                raise StateError(
                    f"an array that the step closes over ({x.dtype}{list(x.shape)}) was donated or deleted after the "
                    "step was traced, and is gone",
                    hint="pass it as an argument: a step may use the array of the moment, and another may replace it",
                )
        call = self.jitted if self.parts is None else self.parts
        if not self.emitted.extra:
            return jax.tree.unflatten(self.emitted.program.out_tree, call(*leaves, *self.captured))
        results = call(*leaves, *self.captured, *extra.take(self.store, self.emitted.extra))
        count = len(results) - len(self.emitted.extra)
        self.store.update(zip(self.emitted.extra, results[count:]))
        return jax.tree.unflatten(self.emitted.program.out_tree, results[:count])

    def _everywhere(self, i: int, leaf: Any) -> Any:
        """With several processes: the leaf as a global array (numpy and process-local arrays hold the same value in
        each process)."""
        if self.taken_as_it_is(i, leaf) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            return leaf
        return place(leaf, self.emitted.arguments[i])

    @functools.cached_property
    def _first_of_state(self) -> int | None:
        return next((i for i, a in enumerate(self.emitted.program.arguments) if a.result is not None), None)

    def _unsafe(self, leaves: list[Any]) -> bool:
        """Whether XLA must not see these arguments: a buffer that stands twice and is given up, or was given up before,
        ends the process in some releases instead of raising. Nor a state that is made anew and lies nowhere yet: JAX
        would compile the whole step again for it, where placing it is enough. (Its first leaf tells.)"""
        if self._first_of_state is not None:
            first = leaves[self._first_of_state]
            if not (isinstance(first, jax.Array) and first.committed) and isinstance(first, jax.Array | np.ndarray):
                return True
        if len(set(map(id, leaves))) < len(leaves) and self.shared(leaves):
            return True
        return self.guarded and any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)

    def shared(self, leaves: list[Any]) -> bool:
        """Whether a donated array stands among the arguments a second time."""
        places: dict[int, list[int]] = {}
        for i, x in enumerate(leaves):
            if isinstance(x, jax.Array):
                places.setdefault(id(x), []).append(i)
        donated = set(self.emitted.donated)
        return any(len(where) > 1 and donated.intersection(where) for where in places.values())

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The call's array leaves, None when the call is not one for this executable."""
        leaves = matching_leaves(self.fn, self.emitted.program.call, args, kwargs)
        try:
            if leaves is not None:
                _check(self.emitted, leaves, self.numerics)
        except OtherSignature:
            return None
        return leaves

    def misplaced(self, leaves: list[Any]) -> bool:
        """Whether some leaf is an array that lies elsewhere than the executable takes it from, or a state's that lies
        nowhere yet."""
        return any(
            not x.is_deleted() and not (x.committed and x.sharding.is_equivalent_to(s, x.ndim))
            if isinstance(x, jax.Array)
            else isinstance(x, np.ndarray) and a.result is not None
            for x, s, a in zip(leaves, self.emitted.arguments, self.emitted.program.arguments)
        )


def build(
    fn: Callable[..., Any],
    program: Program,
    plan: Plan,
    mesh: Any,
    donate: bool,
    store: dict[str, Any],
    compiled: dict[str, Any],
) -> Executable:
    """The step of `program` under `plan` on a mesh of real devices; its hidden state is kept in `store`, programs for
    any number of micro-batches in `compiled`. Raises PlanError or BatchError where it does not apply."""
    emitted = emit(program, plan, mesh)
    if not donate:
        emitted = dataclasses.replace(emitted, donated=())
    count = len(program.call.leaves)
    captured = tuple(place(v, s, own=True) for v, s in zip(program.captured, emitted.arguments[count:]))
    whole = donated_arguments(program, emitted.donated)
    parts = Parts(emitted, compiled) if plan.micro.any_number else None
    direct = (
        not captured
        and parts is None
        and not emitted.extra
        and not program.call.statics
        and not program.call.has_keywords
        and whole is not None
        and _trees_of_shardings(emitted)
    )
    jitted = _direct(emitted, whole or ()) if direct else _flat(emitted)
    guarded = _jax.deleted_argument_aborts()
    several = jax.process_count() > 1
    return Executable(
        fn, emitted, jitted, direct, captured, guarded, _jax.numerics(), several, ahead(mesh), store, parts=parts
    )


def donated_arguments(program: Program, donated: tuple[int, ...]) -> tuple[int, ...] | None:
    """Positions of the arguments all of whose leaves are donated; None when some argument is donated in part."""
    out = []
    for n, numbers in enumerate(program.call.arguments):
        if numbers and set(numbers) <= set(donated):
            out.append(n)
        elif set(numbers) & set(donated):
            return None
    return tuple(out)


def _trees_of_shardings(emitted: Emitted) -> bool:
    """Whether the user's trees can be built of shardings: a class of theirs may check what it holds."""
    try:
        emitted.program.call.rebuild(emitted.arguments)
        jax.tree.unflatten(emitted.program.out_tree, emitted.results)
    except Exception:  # the user's own constructors: then leaves are passed flat
        return False
    return True


def _flat(emitted: Emitted) -> Any:
    numerics = _jax.numerics()
    hidden = [s.sharding for s in emitted.extra.values()]
    first = len(emitted.arguments)

    def step(*leaves):
        _check(emitted, leaves[:first], numerics)
        return emitted.run(*leaves)

    return jax.jit(
        step,
        in_shardings=[*emitted.arguments, *hidden],
        out_shardings=[*emitted.results, *hidden],
        donate_argnums=(*emitted.donated, *range(first, first + len(hidden))),
        keep_unused=True,
        compiler_options=emitted.options(),
    )


def _direct(emitted: Emitted, donated: tuple[int, ...]) -> Any:
    call, out_tree = emitted.program.call, emitted.program.out_tree
    numerics = _jax.numerics()

    def step(*args):
        leaves, tree = jax.tree.flatten((args, {}))
        if tree != call.tree:
            raise OtherSignature
        _check(emitted, leaves, numerics)
        return jax.tree.unflatten(out_tree, emitted.run(*leaves))

    in_shardings, _ = call.rebuild(emitted.arguments)
    return jax.jit(
        step,
        in_shardings=in_shardings,
        out_shardings=jax.tree.unflatten(out_tree, emitted.results),
        donate_argnums=donated,
        keep_unused=True,
        compiler_options=emitted.options(),
    )


def _check(emitted: Emitted, leaves: Any, numerics: tuple[Any, ...]) -> None:
    """While tracing: the leaves must have the program's types. (JAX traces again when a setting changes.)"""
    refuse_explicit_mesh()
    if numerics != _jax.numerics():
        raise OtherSignature
    invars = _jax.open_jaxpr(emitted.program.jaxpr).invars
    for leaf, v in zip(leaves, invars):
        aval = jax.typeof(leaf)
        if (aval.shape, aval.dtype, aval.weak_type) != (v.aval.shape, v.aval.dtype, v.aval.weak_type):
            raise OtherSignature


def run(executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls without JAX's warning about donated buffers that no result can take (a result of another layout)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return executable(*args, **kwargs)
