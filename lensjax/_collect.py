"""Python's cycle collector, while many small objects are made."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Objects between two collections. Python's own hundreds make it look through all that JAX holds again and again: a
# quarter of the time of planning. This many small objects are some tens of megabytes.
OBJECTS = 200_000

_LOCK = threading.Lock()
_inside: list[tuple[int, int, int]] = []


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Collects cycles seldom in this block, and as before when it ends, also when threads are in such blocks together.
    A collector that was switched off, or that collects more seldom, is left alone. Also a decorator."""
    with _LOCK:
        _inside.append(gc.get_threshold())
        first, *rest = _inside[0]
        if len(_inside) == 1 and 0 < first < OBJECTS:
            gc.set_threshold(OBJECTS, *rest)
    try:
        yield
    finally:
        with _LOCK:
            before = _inside[0]
            _inside.pop()
            if not _inside:
                gc.set_threshold(*before)
