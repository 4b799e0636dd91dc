"""How a made state and an example batch become the step's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lensjax._errors import TraceError


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """(the arrays of a tree, a function from these to the tree; other leaves are what they are)."""
    flat, treedef = jax.tree.flatten(tree)
    dynamic = [isinstance(x, jax.Array | np.ndarray) for x in flat]

    def rebuild(arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        return jax.tree.unflatten(treedef, [next(given) if d else x for d, x in zip(dynamic, flat)])

    return [x for d, x in zip(dynamic, flat) if d], rebuild


def split_init(fn: Callable[..., Any], state: Any, batch: Any) -> list[tuple[Any, ...]]:
    """The step's positional arguments from what the init function returns and the example batch: every reading that
    its number of parameters allows, the likelier first.

    Either may be one argument or a tuple of several; the state usually comes first. Raises TraceError when no reading
    gives that number.
    """
    least, most = _arity(fn)
    states = [(state,)] + ([tuple(state)] if type(state) in (tuple, list) else [])
    batches = [(batch,)] + ([tuple(batch)] if type(batch) in (tuple, list) else [])
    readings = [s + b for s in states for b in batches] + [b + s for s in states for b in batches]
    if fitting := [args for args in readings if least <= len(args) <= most]:
        return fitting
    counts = sorted({len(r) for r in readings})
    raise TraceError(
        f"the step takes {least if least == most else f'{least} to {most}'} arguments; the state and the batch make "
        f"{' or '.join(map(str, counts))}",
        hint="init's fn returns the state argument (or a tuple of them), batch= is the rest (a tuple where there are "
        "several)",
    )


def _arity(fn: Callable[..., Any]) -> tuple[int, float]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 0, float("inf")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in positional)
    most = float("inf") if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    return least, most
