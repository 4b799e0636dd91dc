"""Copies of a step. It is a function to its users, and is copied and pickled as one, by its name; what it keeps between
calls is its own."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import jax

from lensjax.execute.checkpoint import Checkpoints


class Copied:
    """Gives a step `copy.copy`, `copy.deepcopy` and `pickle`. A copy has the plan, compiles for itself at its first
    call, and has hidden state (`extra`) of its own, with the values of the moment."""

    notices: list[str]
    extra: dict[str, Any]
    _agreed: set[Any]

    def __copy__(self) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update(
            _run=None, _ahead=None, _ready=[], _bound={}, _parts={}, _agreed=set(self._agreed),
            notices=list(self.notices), _checkpoints=Checkpoints(),
            extra={k: _another(x) for k, x in self.extra.items()},
        )  # fmt: skip
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = new = self.__copy__()
        parent = self.__dict__.get("_parent")  # a companion's step, which may have been copied with it
        if parent is not None:
            new._parent = memo.get(id(parent)) or parent.__deepcopy__(memo)
        return new

    def __reduce__(self) -> str:
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not self:
            raise pickle.PicklingError(
                f"the step {name or '?'} is not a name of its module, and compiled programs cannot be pickled; "
                "decorate the step where it is defined, or pickle the undecorated function and step.plan"
            )
        return name


def _another(x: Any) -> Any:
    return jax.numpy.copy(x) if isinstance(x, jax.Array) and not x.is_deleted() else x
