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


Reading = tuple[tuple[Any, ...], dict[str, Any]]


def split_init(fn: Callable[..., Any], state: Any, batch: Any) -> list[Reading]:
    """The step's arguments, (positional, by keyword), from what the init function returns and the example batch: every
    reading that its parameters allow, the likelier first.

    Either may be one argument or a tuple of several; the state usually comes first. A batch that the step takes by
    keyword only is the one such parameter, or a dictionary of them. Raises TraceError when no reading fits.
    """
    least, most, keywords = _arity(fn)
    states = [(state,)] + ([tuple(state)] if type(state) in (tuple, list) else [])
    batches = [(batch,)] + ([tuple(batch)] if type(batch) in (tuple, list) else [])
    readings: list[Reading] = [(s + b, {}) for s in states for b in batches] + [
        (b + s, {}) for s in states for b in batches
    ]
    if keywords:
        named = isinstance(batch, dict) and keywords <= set(batch)
        given = batch if named else {next(iter(keywords)): batch} if len(keywords) == 1 else None
        readings = [(s, given) for s in states] if given is not None else []
    if fitting := [r for r in readings if least <= len(r[0]) <= most]:
        return fitting
    if keywords:
        raise TraceError(
            f"the step takes {', '.join(sorted(keywords))} by keyword only, and the example batch does not name them",
            hint="batch={" + ", ".join(f"{k!r}: ..." for k in sorted(keywords)) + "}",
        )
    counts = sorted({len(args) for args, _ in readings})
    raise TraceError(
        f"the step takes {least if least == most else f'{least} to {most}'} arguments; the state and the batch make "
        f"{' or '.join(map(str, counts))}",
        hint="init's fn returns the state argument (or a tuple of them), batch= is the rest (a tuple where there are "
        "several)",
    )


def _arity(fn: Callable[..., Any]) -> tuple[int, float, set[str]]:
    """(fewest, most positional arguments, the names that must be given by keyword)."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 0, float("inf"), set()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in positional)
    most = float("inf") if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    return least, most, {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
