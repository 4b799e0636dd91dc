"""Pins: what the user decides about a tensor, by path.

    pins={"params/embed/*": (None, "fsdp"), "*/bias": ()}

Patterns are fnmatch on the `/`-joined path of the user's tree; the argument's own name in front is optional. The first
match wins; dimensions that a pin does not name, and PartitionSpec.UNCONSTRAINED, stay free (are decided by the plan);
`None` keeps a dimension whole.
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
    """`dims`: for the leading dimensions, the mesh axes (() is whole, None is free)."""

    pattern: str
    dims: tuple[tuple[str, ...] | None, ...]


def normalize(pins: Mapping[str, Any] | None) -> tuple[Pin, ...]:
    """Pins from what a user writes: a PartitionSpec or a sequence of None | axis | (axes...) per pattern."""
    if pins is not None and not isinstance(pins, Mapping):
        raise PlanError(f"pins={pins!r}; expected a mapping from patterns", hint=f"as in pins={{'*/embed': {_AS_IN}}}")
    out = []
    for pattern, value in (pins or {}).items():
        if not isinstance(pattern, str):
            raise PlanError(f"the pin of {pattern!r}: a pattern is a text", hint="as in '*/embed'")
        dims = tuple(_entry(pattern, value, d) for d in _entries(pattern, value))
        flat = [a for d in dims if d for a in d]
        if len(set(flat)) != len(flat):
            raise PlanError(
                f"the pin of {pattern!r} contradicts itself: a mesh axis splits two dimensions of {value!r}"
            )
        out.append(Pin(pattern, dims))
    return tuple(out)


_AS_IN = "(None, 'fsdp')"


def _entries(pattern: str, value: Any) -> Sequence[Any]:
    """One entry per dimension. (A PartitionSpec is no Sequence.)"""
    from jax.sharding import PartitionSpec

    if isinstance(value, PartitionSpec):
        if getattr(value, "unreduced", None) or getattr(value, "reduced", None):
            raise PlanError(f"the pin of {pattern!r} is {value!r}", hint="a pin says how dimensions are split, no more")
        return tuple(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise PlanError(
            f"the pin of {pattern!r} is {value!r}",
            hint=f"give one entry per dimension, as in {_AS_IN} or PartitionSpec{_AS_IN}",
        )
    return value


def _entry(pattern: str, value: Any, entry: Any) -> tuple[str, ...] | None:
    from jax.sharding import PartitionSpec

    if entry is PartitionSpec.UNCONSTRAINED:
        return None
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    if not isinstance(axes, tuple | list) or not all(isinstance(a, str) for a in axes):
        raise PlanError(
            f"the pin of {pattern!r} is {value!r}: {entry!r} is no mesh axis",
            hint=f"an entry is None, an axis or a tuple of axes, as in {_AS_IN}",
        )
    return tuple(axes)


def matches(pattern: str, path: str) -> bool:
    _, _, inner = path.partition("/")
    return fnmatch.fnmatchcase(path, pattern) or (bool(inner) and fnmatch.fnmatchcase(inner, pattern))


def find(pins: Sequence[Pin], path: str) -> Pin | None:
    return next((p for p in pins if matches(p.pattern, path)), None)


def apply_pin(pin: Pin, path: str, shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> Spec:
    """`spec` with the pinned dimensions replaced. Raises PlanError when the pin does not apply to this tensor."""
    _check_rank(pin, path, shape)
    for d, axes in enumerate(pin.dims):
        for a in axes or ():
            if a not in mesh:
                raise PlanError(
                    f"the pin {pin.pattern!r} names the mesh axis {a!r}, which the plan does not have",
                    hint=f"axes of this plan: {', '.join(mesh) or 'none'}",
                )
        ways = 1
        for a in axes or ():
            ways *= mesh[a]
        if shape[d] % ways:
            raise PlanError(
                f"the pin {pin.pattern!r} splits dimension {d} of {path} (size {shape[d]}) in {ways} equal parts"
            )
    taken = {a for d in pin.dims if d for a in d}
    pinned = (*pin.dims, *[None] * (len(shape) - len(pin.dims)))
    return tuple(tuple(a for a in free if a not in taken) if axes is None else axes for axes, free in zip(pinned, spec))


def _check_rank(pin: Pin, path: str, shape: Sequence[int]) -> None:
    if len(pin.dims) > len(shape):
        raise PlanError(f"the pin {pin.pattern!r} names {len(pin.dims)} dimensions; {path} has shape {tuple(shape)}")


def check_applicable(pins: Sequence[Pin], shapes: Mapping[str, Sequence[int]], axes: Sequence[str]) -> None:
    """Raises PlanError for a pin that can apply under no plan whose mesh axes are among `axes`. `shapes`: of every
    tensor, by path."""
    check_used(pins, list(shapes))
    for pin in pins:
        if unknown := [a for d in pin.dims if d for a in d if a not in axes]:
            raise PlanError(
                f"the pin {pin.pattern!r} names the mesh axis {unknown[0]!r}, which no preset has",
                hint=f"axes of presets: {', '.join(axes)}",
            )
    for path, shape in shapes.items():
        if (pin := find(pins, path)) is not None:
            _check_rank(pin, path, shape)


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
