"""Numbers for people. Everything else in lensjax is SI."""

from __future__ import annotations


def size(n: float) -> str:
    """Bytes as "1.50 GiB"."""
    for unit, step in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= step:
            return f"{n / step:.2f} {unit}"
    return f"{n:.0f} B"


def duration(s: float) -> str:
    """Seconds as "1.23 s", "45.6 ms" or "789 us"."""
    if s >= 1 or s == 0:
        return f"{s:.2f} s"
    return f"{s * 1e3:.1f} ms" if s >= 1e-3 else f"{s * 1e6:.1f} us"


def spec(dims: tuple[tuple[str, ...], ...]) -> str:
    """A sharding as "[_, fsdp, _]"; "whole" where nothing is split."""
    if not any(dims):
        return "whole"
    return "[" + ", ".join("+".join(axes) if axes else "_" for axes in dims) + "]"
