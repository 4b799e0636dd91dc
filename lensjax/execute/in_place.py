"""A step that updates its modules in place, `step(model, optimizer, batch)`, as a pure step and back.

    call:   modules --taken apart together--> values
    step:   values --put together--> modules --the user's function--> modules --> new values, and the user's result
    after:  the new values go into the user's own modules

Only the step in the middle is traced, planned and run. The user's objects are touched when its results are there, and
not at all when anything fails. Static attributes that a step sets (`model.train()`) go back too, as under `nnx.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from lensjax.execute import nnx
from lensjax.program.trace import argument_names, path_name


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Same:
    """In a step's result: module number `index` of its arguments."""

    index: int


def _is_same(x: Any) -> bool:
    return isinstance(x, Same)


class InPlace:
    """`pure(*args, **kwargs)` takes `Values` where the user's function takes modules, and returns ({name: Values}, the
    user's result)."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn
        self._known: nnx.Structure | None = None
        self._returns_modules = False

        # Wrapped: the names of its parameters, and the static arguments of an `nnx.jit`, stay known.
        @functools.wraps(fn)
        def pure(*args: Any, **kwargs: Any) -> Any:
            return self._pure(args, kwargs)

        self.pure = pure

    def take(self, args: Any, kwargs: Any) -> nnx.Taken:
        """The call's arguments with their modules taken apart."""
        taken = nnx.take((args, kwargs), self._known)
        self._known = taken.structure
        return taken

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the pure step (`run(args, kwargs)`, under its plan) on the user's modules and updates them."""
        taken = self.take(args, kwargs)
        values, result = run(*taken.tree)
        nnx.write(taken, list(values.values()))
        if not self._returns_modules:
            return result
        modules = [x for x in nnx.leaves((args, kwargs)) if nnx.is_module(x)]
        return jax.tree.map(lambda x: modules[x.index] if _is_same(x) else x, result, is_leaf=_is_same)

    def _pure(self, args: Any, kwargs: Any) -> Any:
        before = [x for x in jax.tree.leaves((args, kwargs), is_leaf=nnx.is_values) if nnx.is_values(x)]
        names = self._module_names(args, kwargs)
        (args, kwargs), modules = nnx.give_back((args, kwargs))
        result = self._fn(*args, **kwargs)
        after = nnx.take(list(modules), before[0].structure)
        nnx.check_structure(before, after.tree, names)
        index = {id(m): i for i, m in enumerate(modules)}
        flat, tree = jax.tree.flatten(result, is_leaf=lambda x: id(x) in index)
        self._returns_modules |= any(id(x) in index for x in flat)
        marked = [Same(index[id(x)]) if id(x) in index else x for x in flat]
        return dict(zip(names, after.tree)), jax.tree.unflatten(tree, marked)

    def _module_names(self, args: Any, kwargs: Any) -> list[str]:
        names = argument_names(self._fn, len(args))
        flat, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=nnx.is_values)
        return [path_name(path, names) for path, x in flat if nnx.is_values(x)]
