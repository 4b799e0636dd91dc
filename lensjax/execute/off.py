"""The undecorated step behind the decorated one's face: `LENSJAX_OFF=1` or `plan="off"`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from lensjax._errors import PlanError, StateError


class Off:
    """Calls the function as it was written. Plans and everything that follows from one are None."""

    plan = program = choice = compiled = abstract_state = None

    def __init__(self, fn: Callable[..., Any]):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self.notices: list[str] = []
        self.extra: dict[str, Any] = {}

        self._checkpoints: Any = None
        self._like: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else Off(types.MethodType(self._fn, instance))

    def init(self, fn: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        made = fn(*args, **kwargs)
        self._like = shapes_of(made)
        return made

    def plan_for(self, *shapes: Any, **kwargs: Any) -> None:
        self._like = shapes[0] if shapes else None

    def companion(self, fn: Callable[..., Any], **options: Any) -> Off:
        if not callable(fn):
            raise PlanError(f"companion got {fn!r} where a function of the state is expected")
        return Off(fn)

    def save(self, directory: Any, state: Any, number: int) -> None:
        self._disk().save(directory, number, state, {}, None)

    def wait(self) -> None:
        self._disk().wait()

    def saved(self, directory: Any) -> tuple[int, ...]:
        return self._disk().saved(directory)

    def restore(self, directory: Any, number: int | None = None) -> Any:
        if self._like is None:
            raise StateError("restore needs to know the state", hint="call init or plan_for first")
        return self._disk().restore(directory, number, values_of(self._like), {})[0]

    def _disk(self) -> Any:
        from lensjax.execute.checkpoint import Checkpoints

        self._checkpoints = self._checkpoints or Checkpoints()
        return self._checkpoints

    def lower(self) -> None:
        return None

    def export(self, form: str) -> None:
        return None

    def from_local(self, batch: Any) -> Any:
        return batch

    def what_if(self, plan: Any) -> None:
        return None

    def explain(self, path: str | None = None) -> str:
        return "lensjax is off: the step runs as it was written."

    explain_trace = explain


def shapes_of(state: Any) -> Any:
    """The state's shapes, where they lie; modules taken apart."""
    import jax

    from lensjax.execute.checkpoint import as_array

    def shape(x: Any) -> Any:
        x = as_array(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x

    return jax.tree.map(shape, values_of(state))


def values_of(state: Any) -> Any:
    from lensjax.execute.nnx import is_module, leaves, take

    return take(state).tree if any(map(is_module, leaves(state))) else state
