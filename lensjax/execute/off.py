"""The undecorated step behind the decorated one's face: `LENSJAX_OFF=1` or `plan="off"`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


class Off:
    """Calls the function as it was written. Plans and everything that follows from one are None."""

    plan = program = choice = compiled = abstract_state = None

    def __init__(self, fn: Callable[..., Any]):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self.notices: list[str] = []
        self.extra: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else Off(types.MethodType(self._fn, instance))

    def init(self, fn: Callable[..., Any], *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def plan_for(self, *shapes: Any, **kwargs: Any) -> None:
        return None

    def lower(self) -> None:
        return None

    def from_local(self, batch: Any) -> Any:
        return batch

    def what_if(self, plan: Any) -> None:
        return None

    def explain(self, path: str | None = None) -> str:
        return "lensjax is off: the step runs as it was written."

    explain_trace = explain
