"""Pins: what the user decides about a tensor, by path.

    pins={"params/embed/*": (None, "fsdp"), "*/bias": ()}

Patterns are fnmatch on the `/`-joined path of the user's tree; the argument's own name in front is optional. The first
match wins; dimensions that a pin does not name stay free (are decided by the plan); `None` keeps a dimension whole.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from lensjax._errors import PlanError
from lensjax.plan.plan import Spec


@dataclasses.dataclass(frozen=True)
class Pin:
    """`dims`: for the leading dimensions, the mesh axes (() is whole)."""

    pattern: str
    dims: tuple[tuple[str, ...], ...]


def normalize(pins: Mapping[str, Any] | None) -> tuple[Pin, ...]:
    """Pins from what a user writes: a PartitionSpec or a sequence of None | axis | (axes...) per pattern."""
    out = []
    for pattern, value in (pins or {}).items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise PlanError(
                f"the pin of {pattern!r} is {value!r}",
                hint="give one entry per dimension, as in (None, 'fsdp') or PartitionSpec(None, 'fsdp')",
            )
        dims = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in value)
        flat = [a for d in dims for a in d]
        if len(set(flat)) != len(flat):
            raise PlanError(
                f"the pin of {pattern!r} contradicts itself: a mesh axis splits two dimensions of {value!r}"
            )
        out.append(Pin(pattern, dims))
    return tuple(out)


def matches(pattern: str, path: str) -> bool:
    _, _, inner = path.partition("/")
    return fnmatch.fnmatchcase(path, pattern) or (bool(inner) and fnmatch.fnmatchcase(inner, pattern))


def find(pins: Sequence[Pin], path: str) -> Pin | None:
    return next((p for p in pins if matches(p.pattern, path)), None)


def apply_pin(pin: Pin, path: str, shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> Spec:
    """`spec` with the pinned dimensions replaced. Raises PlanError when the pin does not apply to this tensor."""
    if len(pin.dims) > len(shape):
        raise PlanError(f"the pin {pin.pattern!r} names {len(pin.dims)} dimensions; {path} has shape {tuple(shape)}")
    for d, axes in enumerate(pin.dims):
        for a in axes:
            if a not in mesh:
                raise PlanError(
                    f"the pin {pin.pattern!r} names the mesh axis {a!r}, which the plan does not have",
                    hint=f"axes of this plan: {', '.join(mesh) or 'none'}",
                )
        ways = 1
        for a in axes:
            ways *= mesh[a]
        if shape[d] % ways:
            raise PlanError(
                f"the pin {pin.pattern!r} splits dimension {d} of {path} (size {shape[d]}) in {ways} equal parts"
            )
    taken = {a for d in pin.dims for a in d}
    free = tuple(tuple(a for a in axes if a not in taken) for axes in spec[len(pin.dims) :])
    return (*pin.dims, *free)


def check_used(pins: Sequence[Pin], paths: Sequence[str]) -> None:
    """Raises PlanError for a pin that matches no path, or that an earlier one hides completely."""
    for i, pin in enumerate(pins):
        hit = [p for p in paths if matches(pin.pattern, p)]
        if not hit:
            near = _nearest(pin.pattern, paths)
            raise PlanError(
                f"the pin {pin.pattern!r} matches no tensor",
                hint="patterns are matched against paths such as " + ", ".join(near),
            )
        winners = {find(pins[: i + 1], p) for p in hit}
        if pin not in winners:
            first = next(p for p in pins if p in winners)
            if first.dims != pin.dims:
                raise PlanError(
                    f"the pin {pin.pattern!r} is contradicted by {first.pattern!r}, which stands before it and matches "
                    "the same tensors",
                    hint="the first match wins: put the narrower pattern first",
                )


def _nearest(pattern: str, paths: Sequence[str], count: int = 3) -> list[str]:
    import difflib

    return difflib.get_close_matches(pattern, paths, n=count, cutoff=0.0) or list(paths[:count])
