"""How reports write things."""

from __future__ import annotations

from lensjax._units import duration, size

__all__ = ["duration", "size", "spec"]


def spec(dims: tuple[tuple[str, ...], ...]) -> str:
    """A sharding as "[_, fsdp, _]"; "whole" where nothing is split."""
    if not any(dims):
        return "whole"
    return "[" + ", ".join("+".join(axes) if axes else "_" for axes in dims) + "]"
