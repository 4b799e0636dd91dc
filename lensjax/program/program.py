"""The program: the whole step after differentiation, as one jaxpr, with what was found out about it.

    step, arguments -> trace -> roles, batch, layers -> Program

Passes take a Program and give a Program; the facts refer to variables that passes keep.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lensjax import _jax
from lensjax._collect import seldom_collected
from lensjax._errors import BatchError
from lensjax.program.batch import Batch, find_batch
from lensjax.program.edit import bodies, is_var, type_text
from lensjax.program.flow import compute_arguments, dependencies, mixed_arguments
from lensjax.program.layers import Layer, find_layers, scanned_leading
from lensjax.program.logical import Logical, logical_axes
from lensjax.program.roles import Argument, Matches, added_to, is_key, match_state, raw_keys, tie
from lensjax.program.status import Split, analyze_status
from lensjax.program.trace import Call, Traced, abstract, trace
from lensjax.program.unrolled import Unrolled, find_unrolled


@dataclasses.dataclass(frozen=True)
class Program:
    """`jaxpr`: calls inlined, no constants; its arguments are the call's leaves followed by the captured arrays.

    `arguments`: one per jaxpr argument; `result_paths`: one per result; `batch`; `layers`;
    `gradients`: {parameter index: result index} for a step that returns gradients; `donate`: whether the state that
    comes back may give up its buffers;
    `compute`: variables that a forward or backward computation reads;
    `depends`: variable -> bit set of the arguments it depends on.
    """

    jaxpr: Any
    arguments: tuple[Argument, ...]
    result_paths: tuple[str, ...]
    batch: Batch
    layers: tuple[Layer, ...]
    call: Call
    captured: tuple[Any, ...]
    out_tree: Any
    gradients: dict[int, int]
    donate: bool
    compute: frozenset[Any]
    depends: dict[Any, int]

    @property
    def parameters(self) -> tuple[int, ...]:
        return tuple(i for i, a in enumerate(self.arguments) if a.role == "parameter")

    @functools.cached_property
    def logical(self) -> Logical:
        """The logical axes of every value (found when first asked for: it takes about as long as one trace)."""
        batch = {i: a.batch_axis for i, a in enumerate(self.arguments) if a.batch_axis is not None}
        return logical_axes(self.jaxpr, [a.path for a in self.arguments], batch, self.parameters)

    @functools.cached_property
    def split(self) -> Split:
        """How the step splits along its batch: over nodes, over micro-batches, or why not (found when first asked
        for)."""
        return analyze_status(self.jaxpr, self.batch)

    @functools.cached_property
    def unrolled(self) -> tuple[Unrolled, ...]:
        """The layers that are written out one after the other, found by structure (`layers` are those of scans)."""
        paths = [a.path for a in self.arguments]
        return find_unrolled(self.jaxpr, self.batch.dims, self.parameters, paths)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the program's structure, shapes and paths: equal programs have equal fingerprints in every
        process."""
        h = hashlib.sha256()
        for a in self.arguments:
            h.update(f"{a.path}:{a.dtype}{list(a.shape)};".encode())
        _digest(_jax.open_jaxpr(self.jaxpr), h)
        return h.hexdigest()[:16]


@seldom_collected()
def analyze(
    fn: Callable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    batch_argnums: Sequence[int] | None = None,
    batch_axes: Any = None,
    seconds: dict[str, float] | None = None,
    held: Callable[[Call], Collection[int]] | None = None,
) -> Program:
    """Traces `fn(*args, **kwargs)` (arrays or shapes) and finds out what everything is.

    `batch_argnums`: positions of the batch arguments; `batch_axes`: the batch dimension, one integer for all or a
    pytree prefix of integers (None: not batched) for them. `seconds` receives what the traces and the analysis took.
    `held`: for a function of another step's state, the leaves of the call that are this state, although they need not
    come back; then there need not be a batch either.
    Raises TraceError or BatchError.
    """
    start = time.perf_counter()
    traced = trace(fn, args, kwargs)
    first = time.perf_counter()
    inner = _jax.open_jaxpr(traced.jaxpr)
    deps = dependencies(traced.jaxpr)
    keys = raw_keys(traced) | {i for i, v in enumerate(inner.invars) if is_key(v.aval)}
    told = _told_axes(traced.call, args, batch_argnums, batch_axes)
    matches = match_state(traced, deps, told or ())
    found = time.perf_counter()
    known = frozenset(held(traced.call)) if held is not None else frozenset()
    try:
        batch = _batch(fn, traced, matches, keys, known, told)
    except BatchError as e:
        if held is None or e.code != "no_batch":
            raise
        batch = Batch(1, {}, {}, None, "the function has no batch")
    second = time.perf_counter()
    program = _assemble(traced, batch, deps, matches, keys)
    if seconds is not None:
        seconds["trace"] = (first - start) + (second - found)
        seconds["analysis"] = (found - first) + (time.perf_counter() - second)
    return program


def _batch(
    fn: Callable,
    traced: Traced,
    matches: Matches,
    keys: Collection[int],
    known: Collection[int],
    told: dict[int, int] | None,
) -> Batch:
    """The batch, among what is neither state nor a key (`keys`) nor `known` to be none.

    What looks like the source of a gradient is tried only when nothing else is the batch: then it was the batch, and
    the result a reconstruction of it.
    """
    inner = _jax.open_jaxpr(traced.jaxpr)
    used = {a for e in inner.eqns for a in e.invars if is_var(a)}
    outside = [i for i in range(len(traced.call.leaves)) if not (i in matches.state or i in keys or i in known)]
    unused = {i for i in outside if inner.invars[i] not in used}
    others = [i for i in outside if i not in matches.alike]

    def accept(batch: Batch) -> bool:
        """A dimension that a loop runs over, and that nothing is computed with beside other arguments, is no batch."""
        looped = any(0 in batch.dims.get(v, ()) for v in scanned_leading(inner))
        needed = compute_arguments(traced.jaxpr, lambda v: v in batch.dims) if looped else set()
        return not looped or any(
            v in needed for i, v in enumerate(inner.invars) if i not in batch.axes and v.aval.shape
        )

    # A batch may hold keys, one for each example: tried when nothing without them is the batch.
    many = [i for i in sorted(set(keys) - set(matches.state) - set(known)) if _several(inner.invars[i].aval)]
    attempts = [others] + ([outside] if len(others) < len(outside) else []) + ([[*outside, *many]] if many else [])
    attempts = attempts[:1] if told is not None else attempts
    for candidates in attempts[:-1]:
        try:
            return find_batch(fn, traced, candidates, unused, told, accept)
        except BatchError as e:
            if "more than one group" in e.message:
                raise
    return find_batch(fn, traced, attempts[-1], unused, told, accept)


def _several(aval: Any) -> bool:
    """Whether a key argument holds several keys, along its first dimension."""
    return len(aval.shape) > (0 if is_key(aval) else 1)


def _assemble(traced: Traced, batch: Batch, deps: dict[Any, int], matches: Matches, keys: set[int]) -> Program:
    is_batch = lambda v: v in batch.dims
    needed = compute_arguments(traced.jaxpr, is_batch)
    state = matches.state
    inner = _jax.open_jaxpr(traced.jaxpr)
    count = len(traced.call.leaves)

    updated = added_to(traced, matches, deps)

    def is_parameter(i: int) -> bool:
        v = inner.invars[i]
        read = v in needed or i in updated
        return i not in keys and jnp.issubdtype(v.aval.dtype, jnp.inexact) and read and i not in batch.axes

    # Without a result of the same structure (a step that returns gradients only) a float argument that the
    # computation reads, and that is not the batch, is still a parameter.
    parameters = [i for i in range(count) if is_parameter(i)]
    if not parameters:
        needed = mixed_arguments(traced.jaxpr, deps, sum(1 << i for i in batch.axes))
        parameters = [i for i in range(count) if is_parameter(i)]
    ties = tie(traced, state, parameters, deps)
    arguments = []
    for i, v in enumerate(inner.invars):
        if i >= count:
            path, role = f"captured/{i - count}", "constant"
        else:
            path = traced.call.paths[i]
            role = (
                "batch" if i in batch.axes
                else "key" if i in keys
                else "parameter" if i in parameters
                else "optimizer" if i in ties
                else "other"
            )  # fmt: skip
        arguments.append(
            Argument(path, tuple(v.aval.shape), v.aval.dtype, role, ties.get(i), state.get(i), batch.axes.get(i))
        )
    return Program(
        jaxpr=traced.jaxpr,
        arguments=tuple(arguments),
        result_paths=traced.out_paths,
        batch=batch,
        layers=find_layers(traced.jaxpr, parameters, traced.call.paths),
        call=traced.call,
        captured=traced.captured,
        out_tree=traced.out_tree,
        gradients={i: o for i, o in matches.alike.items() if i in parameters},
        donate=bool(matches.replaced),
        compute=frozenset(needed),
        depends=deps,
    )


def _told_axes(call: Call, args: tuple[Any, ...], argnums: Sequence[int] | None, axes: Any) -> dict[int, int] | None:
    """{leaf index: batch dimension} from what the user said, None when nothing was said."""
    if argnums is None:
        if axes is not None:
            raise BatchError("batch_axes was given without batch_argnums", hint="say which arguments it is about")
        return None
    argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(not -len(args) <= n < len(args) for n in argnums):
        raise BatchError(f"batch_argnums {argnums} names an argument that is not there: the step got {len(args)}")
    argnums = [n % len(args) for n in argnums]
    per_arg = tuple(axes) if isinstance(axes, tuple | list) else (axes if axes is not None else 0,) * len(argnums)
    if len(per_arg) != len(argnums):
        raise BatchError(f"batch_axes has {len(per_arg)} entries for {len(argnums)} batch arguments")
    # Leaves are numbered over all arguments in order; statics are not among them.
    told, index = {}, 0
    dynamic = iter(call.dynamic)
    for n, arg in enumerate(args):
        leaves = jax.tree.leaves(arg)
        wanted = [None] * len(leaves)
        if n in argnums:
            wanted = _axes_of(per_arg[argnums.index(n)], arg, n)
        for axis in wanted:
            if not next(dynamic):
                continue
            shape = abstract(call.leaves[index]).shape
            if axis is not None and len(shape) > 0:
                if not -len(shape) <= axis < len(shape):
                    raise BatchError(f"batch axis {axis} is not a dimension of {call.paths[index]} with shape {shape}")
                told[index] = axis % len(shape)
            index += 1
    if not told:
        raise BatchError(f"batch_argnums {tuple(argnums)} names no array")
    return told


def _axes_of(prefix: Any, arg: Any, n: int) -> list[int | None]:
    """The batch axis of each leaf of argument `n`, from a pytree prefix of integers and None."""
    missing = lambda x: x is None
    try:
        return jax.tree.leaves(
            jax.tree.map(lambda axis, sub: jax.tree.map(lambda _: axis, sub), prefix, arg, is_leaf=missing),
            is_leaf=missing,
        )
    except (ValueError, TypeError) as e:
        found, expected = jax.tree.structure(prefix, is_leaf=missing), jax.tree.structure(arg)
        raise BatchError(
            f"batch_axes does not have the structure of argument {n}: {found} for {expected}",
            hint="give one integer for the whole argument, or a tree like it with an integer (None: not batched) in "
            "place of each array; one such entry for each of batch_argnums",
        ) from e


More = ParamSpec("More")
Fact = TypeVar("Fact")


def once(fact: Callable[Concatenate[Program, More], Fact]) -> Callable[Concatenate[Program, More], Fact]:
    """A fact of a program, found once for the same further arguments and kept with it, as its cached properties are:
    every preset and every size of a mesh axis asks again. What is returned is not to be changed."""

    @functools.wraps(fact)
    def found(program: Program, *more: More.args, **named: More.kwargs) -> Fact:
        key = f"{fact.__module__}.{fact.__name__}{(more, named)}"
        if key not in program.__dict__:
            program.__dict__[key] = fact(program, *more, **named)
        return program.__dict__[key]

    return found


def _digest(jaxpr: Any, h: Any) -> None:
    number = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        h.update(eqn.primitive.name.encode())
        for a in eqn.invars:
            h.update((f"{number.get(a, -1)}," if is_var(a) else f"={_literal(a.val)},").encode())
        for v in eqn.outvars:
            number[v] = len(number)
            h.update(type_text(v.aval).encode())
        for key in sorted(eqn.params):
            value = eqn.params[key]
            if isinstance(value, int | str | bool | float | np.dtype) or (
                isinstance(value, tuple) and all(isinstance(x, int | str | tuple) for x in value)
            ):
                h.update(f"{key}={value};".encode())
        for body in bodies(eqn):
            _digest(_jax.open_jaxpr(body), h)
    h.update(",".join(str(number.get(a, a)) if is_var(a) else "lit" for a in jaxpr.outvars).encode())


def _literal(value: Any) -> str:
    array = np.asarray(value)
    return str(value) if array.ndim == 0 else hashlib.sha256(array.tobytes()).hexdigest()[:16]
