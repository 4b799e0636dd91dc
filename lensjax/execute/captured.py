"""Arrays that a step closes over: they are fixed at the values they had when the step was traced.

What can be seen from outside: that a large array was captured (it keeps its memory, and takes no part in training), and
that a variable which held a captured array (in the step's closure, among its module's globals, or in those of the
functions it calls) holds another one now. An array that is changed in place (numpy) cannot be told.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from lensjax._errors import CaptureWarning, StateError
from lensjax._units import size

# A captured array above this many bytes is worth a word: below, constants of a model (positions, masks) are usual.
LARGE = 2**20


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


class Watch:
    """The variables that hold the captured arrays of a step, and whether they still do."""

    def __init__(self, fn: Callable[..., Any], captured: Sequence[Any]):
        wanted = {id(x) for x in captured}
        self._held = [(name, read, x) for name, read, x in variables(fn) if id(x) in wanted]
        names = {id(x): name for name, _, x in self._held}
        for x in captured:
            name = names.get(id(x), "an array")
            if isinstance(x, jax.Array) and x.is_deleted():
                raise StateError(
                    f"the step closes over {name} ({x.dtype}{list(x.shape)}), which was donated or deleted and is gone",
                    hint="pass it as an argument, or capture an array that lives",
                )
            if x.nbytes > LARGE:
                warn(
                    f"the step closes over {name} ({x.dtype}{list(x.shape)}, {size(x.nbytes)}): it is fixed at its "
                    "value of now. Pass it as an argument if it changes, or if it should be part of the state"
                )

    def check(self) -> None:
        """Warns once for each variable that holds another array than the one that was traced."""
        for item in self._held:
            name, read, old = item
            if read() is not old:
                self._held = [x for x in self._held if x is not item]
                warn(
                    f"{name}, which the step closes over, holds another array than when the step was traced; the step "
                    "goes on with the old one. Pass it as an argument"
                )


def warn(text: str) -> None:
    """Warns at the first line outside this package: the user's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, CaptureWarning, stacklevel=level)


def variables(fn: Callable[..., Any]) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """(name, a function that reads it, the array) of variables that hold arrays, in the closure of `fn`, among the
    globals it names, and in those of the functions found on the way."""
    todo, seen = [fn], set()
    while todo:
        f = todo.pop()
        while not isinstance(f, types.FunctionType) and hasattr(f, "__wrapped__"):
            f = f.__wrapped__
        if not isinstance(f, types.FunctionType) or id(f) in seen:
            continue
        seen.add(id(f))
        for name, read in _names(f):
            value = read()
            if isinstance(value, jax.Array | np.ndarray):
                yield name, read, value
            elif callable(value) and _own(value, fn):
                todo.append(value)


def _names(f: types.FunctionType) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        yield name, lambda cell=cell: _contents(cell)
    for name in f.__code__.co_names:
        if name in f.__globals__:
            yield name, lambda name=name: f.__globals__.get(name)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _own(value: Any, fn: Callable[..., Any]) -> bool:
    """Whether a function is the user's, as far as can be seen: of the step's own package."""
    package = (getattr(fn, "__module__", "") or "").partition(".")[0]
    return (getattr(value, "__module__", "") or "").partition(".")[0] == package
