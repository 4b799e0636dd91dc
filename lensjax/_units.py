"""Numbers for people. Everything else in lensjax is SI."""

from __future__ import annotations


def size(n: float) -> str:
    """Bytes as "1.50 GiB"."""
    for unit, step in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= step:
            return f"{n / step:.2f} {unit}"
    return f"{round(n)} B"


def duration(s: float) -> str:
    """Seconds as "1.23 s", "45.6 ms" or "789.0 us"; what rounds to nothing is "0 s", with no sign."""
    t = abs(s)
    text = f"{t:.2f} s" if t >= 1 else f"{t * 1e3:.1f} ms" if t >= 1e-3 else f"{t * 1e6:.1f} us"
    if text == "0.0 us":
        return "0 s"
    return f"-{text}" if s < 0 else text
