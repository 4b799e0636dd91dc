"""A best-fit allocator that joins neighbouring free blocks, as data: which requests get which place.

It is how JAX's GPU client shares out the memory that it has taken (XLA's BFCAllocator: best fit with coalescing, in
units of 256 bytes), without its bins and its tolerance for blocks that are a little too large.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Hashable, Iterable
from typing import NamedTuple

UNIT = 256  # bytes; requests are rounded up to it


class Event(NamedTuple):
    """A request for `bytes` under a name, or (`bytes` None) the return of what that name has."""

    name: Hashable
    bytes: int | None


@dataclasses.dataclass(frozen=True)
class Replay:
    """need:  bytes of the region in which every request found a place.
    peak:  most bytes in use at once, rounded up to units: no allocator needs less.
    places: (offset, bytes) of each request, in their order.
    free:  (offset, bytes) of the free blocks at the end, by offset; no two touch.
    """

    need: int
    peak: int
    places: tuple[tuple[int, int], ...]
    free: tuple[tuple[int, int], ...]

    @property
    def ratio(self) -> float:
        """`need` over `peak`: 1 where nothing is lost between blocks."""
        return self.need / self.peak if self.peak else 1.0


def replay(events: Iterable[Event], unit: int = UNIT) -> Replay:
    """Serves the requests in order: each takes the smallest free block that it fits into (the lowest of equal ones),
    and where there is none the region grows at its end. Raises ValueError for a name that is taken twice at once, or
    returned without being held."""
    held: dict[Hashable, tuple[int, int]] = {}
    free: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []
    top = used = peak = 0
    for name, size in events:
        if size is None:
            if name not in held:
                raise ValueError(f"{name!r} is returned, and nothing is held under that name")
            offset, size = held.pop(name)
            _give(free, offset, size)
            used -= size
            continue
        if name in held:
            raise ValueError(f"{name!r} is requested a second time before it was returned")
        size = -(-size // unit) * unit
        offset = _take(free, size)
        if offset is None:
            offset = free.pop()[0] if free and sum(free[-1]) == top else top
            top = offset + size
        held[name] = offset, size
        places.append((offset, size))
        used += size
        peak = max(peak, used)
    return Replay(top, peak, tuple(places), tuple(free))


def _take(free: list[tuple[int, int]], size: int) -> int | None:
    """The place of a request in the free blocks, of which it is cut; None where it fits into none."""
    best = min((i for i, (_, n) in enumerate(free) if n >= size), key=lambda i: free[i][1], default=None)
    if best is None:
        return None
    offset, whole = free[best]
    free[best : best + 1] = [(offset + size, whole - size)] if whole > size else []
    return offset


def _give(free: list[tuple[int, int]], offset: int, size: int) -> None:
    """Puts a block back among the free ones, as one with its free neighbours."""
    if not size:
        return
    i = bisect_left(free, (offset, 0))
    j = i
    if i and sum(free[i - 1]) == offset:
        i -= 1
        offset, size = free[i][0], free[i][1] + size
    if j < len(free) and free[j][0] == offset + size:
        size += free[j][1]
        j += 1
    free[i:j] = [(offset, size)]
