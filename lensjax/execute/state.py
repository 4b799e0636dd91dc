"""The planned state as data: its shapes with shardings, under the names of the user's own tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from lensjax import _jax
from lensjax._errors import TraceError
from lensjax.execute.nnx import give_back
from lensjax.passes.shardings import named, resolve
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.program.trace import NEEDS_A_VALUE, is_dynamic, no_array, untraceable


def state_shardings(program: Program, plan: Plan, mesh: Any, state: Any) -> tuple[list[Any], Any]:
    """(the shardings of the leaves of a state that the planned step takes, the state's tree). Raises TraceError for a
    leaf that the step does not take."""
    specs = resolve(program, plan).arguments
    by_suffix = {a.path.partition("/")[2]: s for a, s in zip(program.arguments, specs)}
    by_path = {a.path: s for a, s in zip(program.arguments, specs)}
    flat, tree = jax.tree_util.tree_flatten_with_path(state)
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]
    count = len(flat)
    same = [a.shape for a in program.arguments[:count]] == [tuple(leaf.shape) for _, leaf in flat]
    if same:  # the state is the leading arguments, whatever its own paths are
        return [named(mesh, s) for s in specs[:count]], tree
    found = []
    for path, (_, leaf) in zip(paths, flat):
        spec = by_path.get(path, by_suffix.get(path))
        if spec is None or len(spec) != len(leaf.shape):
            raise TraceError(
                f"init made {path!r} with shape {tuple(leaf.shape)}, which the step does not take as state",
                hint="fn must return the step's state arguments, in their order",
            )
        found.append(named(mesh, spec))
    return found, tree


def abstract_values(program: Program, plan: Plan, mesh: Any) -> Any:
    """The state arguments as ShapeDtypeStructs with shardings, modules taken apart (see `execute.nnx`). One tree where
    the state is one argument, else a tuple of them."""
    specs = resolve(program, plan).arguments
    leaves = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named(mesh, s), weak_type=v.weak_type)
        for a, s, v in zip(program.arguments, specs, _avals(program))
    ]
    args, _ = program.call.rebuild(leaves)
    state = tuple(
        arg
        for arg, numbers in zip(args, program.call.arguments)
        if any(program.arguments[i].result is not None or program.arguments[i].role == "parameter" for i in numbers)
    )
    return state[0] if len(state) == 1 else state


def abstract_state(program: Program, plan: Plan, mesh: Any) -> Any:
    """As `abstract_values`, modules put together."""
    return give_back(abstract_values(program, plan, mesh))[0]


def _avals(program: Program) -> list[Any]:
    return [v.aval for v in _jax.open_jaxpr(program.jaxpr).invars]


def made_shapes(create: Callable[..., Any], given: Sequence[Any], fn: Callable[..., Any]) -> Any:
    """Shapes of the state that `create(*given)`, made of the user's `fn`, returns. Raises TraceError where it cannot be
    traced, or returns what is no array."""
    name = getattr(fn, "__name__", "the function")

    def checked(*given: Any) -> Any:
        state = create(*given)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
            if not is_dynamic(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
                hint = "a state holds arrays and numbers; keep the rest outside, or in static fields of its class"
                raise no_array(f"{name} makes", leaf, jax.tree_util.keystr(path, simple=True, separator="/"), hint)
        return state

    try:
        return jax.eval_shape(checked, *given)
    except NEEDS_A_VALUE as e:
        hint = "init traces it, so that the state is never whole on one device; a state that needs its values "
        hint += "(numpy, a file) is made without init, and goes to the first call of the step"
        raise untraceable(name, e, hint) from e
