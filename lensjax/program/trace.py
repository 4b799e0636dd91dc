"""From a step function and example arguments to one flat jaxpr of the whole step.

Arrays, numbers and PRNG keys are arguments of the jaxpr, one per pytree leaf. Anything else in the arguments (strings,
functions, static fields) is fixed at its value and belongs to the signature. Arrays that the step closes over become
arguments too, so that they can be sharded.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lensjax import _jax
from lensjax._errors import PlanError, TraceError
from lensjax.program.edit import all_equations
from lensjax.program.inline import inline

# Frames below this folder are ours, not the user's.
_PACKAGE = str(pathlib.Path(__file__).parent.parent) + os.sep

_BARE = (
    "names mesh axes without a mesh",
    "a PartitionSpec alone means nothing outside jax.set_mesh: leave it out and let the plan decide, or give a "
    "NamedSharding (a shard_map: mesh=) on a mesh with the plan's axes",
)
# What JAX raises where Python asks for a value that is only known when the step runs.
NEEDS_A_VALUE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
# What other libraries say (words in their errors, which have several types): what it means here, and what to do.
_KNOWN = {
    "different trace level": (
        "updates an NNX module that is not among its arguments",
        "pass every module, optimizer and stream of keys that the step updates as an argument",
    ),
    "mesh in context": _BARE,
    "context mesh cannot be empty": _BARE,
}

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call, flattened: `leaves` are what the jaxpr takes, `rebuild` gives the arguments back.

    `paths` name the leaves as the user would: the argument's name, then the path in its tree, joined by "/".
    `statics` are the fixed leaves, `(path, value)`.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    statics: tuple[tuple[str, Any], ...]
    tree: Any
    dynamic: tuple[bool, ...]

    def rebuild(self, leaves: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dynamic, fixed = iter(leaves), iter(v for _, v in self.statics)
        return jax.tree.unflatten(self.tree, [next(dynamic) if d else next(fixed) for d in self.dynamic])

    @property
    def arguments(self) -> tuple[tuple[int, ...], ...]:
        """For each positional argument the numbers of its leaves. Known without building one: a class of the user's
        may refuse to hold anything but arrays."""
        number, flags, out = iter(range(len(self.leaves))), iter(self.dynamic), []
        for argument in self.tree.children()[0].children():
            taken = [next(flags) for _ in range(argument.num_leaves)]
            out.append(tuple(next(number) for d in taken if d))
        return tuple(out)

    @property
    def has_keywords(self) -> bool:
        return self.tree.children()[1] != jax.tree.structure({})


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced step: `jaxpr` (calls inlined, no constants; arguments are the call's leaves, then `captured`)."""

    jaxpr: Any
    call: Call
    captured: tuple[Any, ...]
    out_tree: Any
    out_paths: tuple[str, ...]


def is_dynamic(leaf: Any) -> bool:
    """Whether JAX takes the leaf as an array (numpy arrays of strings or objects are not)."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "biufcV"
    return isinstance(leaf, _ARRAYS)


def argument_names(fn: Callable, count: int) -> list[str]:
    """Names of the first `count` positional parameters; `arg0`, ... where there are none to be had."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def _check_signature(fn: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TraceError, with the function's own signature, for a call that Python would refuse."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        name = getattr(fn, "__name__", "the function")
        raise TraceError(f"{name}{signature} does not take this call: {e}", hint="call it as it is written") from e


def flatten_call(fn: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    _check_signature(fn, args, kwargs)
    names = argument_names(fn, len(args))
    flat, tree = jax.tree_util.tree_flatten_with_path(_with_fixed(fn, args, kwargs, names))
    leaves, paths, statics, dynamic = [], [], [], []
    for path, leaf in flat:
        name = path_name(path, names)
        if isinstance(leaf, Fixed) or not is_dynamic(leaf):
            statics.append((name, leaf))
            dynamic.append(False)
        else:
            _check_shape(name, leaf)
            leaves.append(leaf)
            paths.append(name)
            dynamic.append(True)
    if len(set(paths)) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise TraceError(
            f"two leaves of the arguments have the same path {twice!r}", hint='a key with a "/" in it: rename it'
        )
    return Call(tuple(leaves), tuple(paths), tuple(statics), tree, tuple(dynamic))


def _check_shape(path: str, leaf: Any) -> None:
    if any(not isinstance(n, int | np.integer) for n in getattr(leaf, "shape", ())):
        raise TraceError(
            f"{path} has the symbolic shape {leaf.shape}",
            hint="a plan is for sizes: give numbers; another batch size uses the plan again",
        )


def matching_leaves(fn: Callable, like: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The array leaves of a call that has the tree and the static leaves of `like`; None for any other call."""
    flat, tree = jax.tree.flatten(_with_fixed(fn, args, kwargs, argument_names(fn, len(args))))
    if tree != like.tree:
        return None
    fixed = iter(v for _, v in like.statics)
    leaves = []
    for leaf, dynamic in zip(flat, like.dynamic):
        if dynamic:
            if not is_dynamic(leaf):
                return None
            leaves.append(leaf)
        elif is_dynamic(leaf) or not same(leaf, next(fixed)):
            return None
    return leaves


def same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # a comparison that has no answer (arrays inside a static argument) is "another call"
        return False


def _with_fixed(fn: Callable, args: Any, kwargs: Any, names: list[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with those that the user's own jit declares static wrapped, so that they flatten to one leaf."""
    static_nums, static_names = _jax.static_arguments(fn)
    if not static_nums and not static_names:
        return args, kwargs
    fixed = {names[n % len(args)] for n in static_nums if -len(args) <= n < len(args)} | set(static_names)
    return (
        tuple(Fixed(a) if names[i] in fixed else a for i, a in enumerate(args)),
        {k: Fixed(v) if k in fixed else v for k, v in kwargs.items()},
    )


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A static argument: one leaf, whatever it holds."""

    value: Any


def unfixed(value: Any) -> Any:
    return value.value if isinstance(value, Fixed) else value


def path_name(path: Any, names: list[str]) -> str:
    # path[0] selects (args, kwargs); path[1] the argument.
    key = path[1]
    first = names[key.idx] if path[0].idx == 0 else str(key.key)
    rest = jax.tree_util.keystr(path[2:], simple=True, separator="/")
    return f"{first}/{rest}" if rest else first


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of a leaf, as `jax.jit` would see it."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def trace(fn: Callable, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Traced:
    """Traces `fn(*args, **kwargs)`; arguments may be arrays or ShapeDtypeStructs, nothing is computed.

    Raises TraceError, naming the user's line, when the step cannot be traced.
    """
    call = flatten_call(fn, args, kwargs or {})
    return trace_call(fn, call, [abstract(leaf) for leaf in call.leaves])


def refuse_explicit_mesh() -> None:
    """Raises PlanError where `jax.set_mesh` has a mesh with Explicit axes: there the types of the user's arrays say how
    they are split, which is what a plan decides."""
    mesh = jax.sharding.get_abstract_mesh()
    if explicit := [a for a, t in zip(mesh.axis_names, mesh.axis_types) if t == jax.sharding.AxisType.Explicit]:
        raise PlanError(
            f"the step is used under jax.set_mesh with a mesh whose axes are Explicit ({', '.join(explicit)})",
            hint="leave jax.set_mesh out (a plan has a mesh of its own), or make the mesh with Auto axes: "
            "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto, ...))",
        )


def trace_call(fn: Callable, call: Call, avals: list[jax.ShapeDtypeStruct]) -> Traced:
    """As `trace`, at other shapes of the same call (two-point tracing)."""
    refuse_explicit_mesh()
    box: dict[str, Any] = {}

    def flat(*leaves):
        args, kwargs = call.rebuild(leaves)
        args = tuple(map(unfixed, args))
        kwargs = {k: unfixed(v) for k, v in kwargs.items()}
        out = fn(*args, **kwargs)
        with_path, box["tree"] = jax.tree_util.tree_flatten_with_path(out)
        box["paths"] = tuple(jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in with_path)
        for path, (_, leaf) in zip(box["paths"], with_path):
            if not is_dynamic(leaf):
                raise no_array("the step returns", leaf, path, "return arrays and numbers only (jax.jit asks the same)")
        return [leaf for _, leaf in with_path]

    try:
        closed = jax.make_jaxpr(flat)(*avals)
    except NEEDS_A_VALUE as e:
        hint = "a step must compute with arrays only: use jax.lax.cond or jnp.where instead of a Python branch on a "
        hint += "value, and pass Python settings as static arguments"
        raise untraceable("the step", e, hint) from e
    except Exception as e:
        found = next((said for words, said in _KNOWN.items() if words in str(e)), None)
        if found is None:
            raise
        raise TraceError(f"the step {found[0]}{_at_line(e)}", hint=found[1]) from e
    if ordered := _jax.ordered_effects(closed):
        eqn = next((e for e in all_equations(inline(closed)) if ordered[0] in e.effects), None)
        where = f" at {_jax.user_line(eqn)}" if eqn is not None else ""
        raise TraceError(
            f"the step has effects that must keep their order{where} ({', '.join(map(str, ordered))}), which JAX runs "
            "on one device only",
            hint="use unordered jax.debug.print / callbacks (ordered=False), or run the step with LENSJAX_OFF=1",
        )
    jaxpr, captured = _lift_constants(closed)
    return Traced(inline(jaxpr), call, captured, box["tree"], box["paths"])


def _lift_constants(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """Constants become trailing arguments."""
    inner = _jax.open_jaxpr(closed)
    values = _jax.constants(closed)
    if not values:
        return closed, ()
    return _jax.rebuild(closed, invars=[*inner.invars, *inner.constvars]), values


def no_array(what: str, leaf: Any, path: str, hint: str) -> TraceError:
    """For `what` ("the step returns") a leaf that is no array, at a path of the result."""
    return TraceError(f"{what} {leaf!r} at {path or 'the top'}, which is not an array", hint=hint)


def untraceable(what: str, error: BaseException, hint: str) -> TraceError:
    """For one of NEEDS_A_VALUE, with the user's line."""
    return TraceError(f"{what} cannot be traced{_at_line(error)}: {str(error).strip().splitlines()[0]}", hint=hint)


def _at_line(error: BaseException) -> str:
    """` at file.py:12` of the innermost frame that is the user's own (not a library's)."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in f.filename and not f.filename.startswith(_PACKAGE) and not f.filename.startswith("<")
    ]
    if not frames:
        return ""
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({(frames[-1].line or '').strip()})"
