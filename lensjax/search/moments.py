"""What is alive at each moment of a step, by class; of a folded step, as if all its layers were written out.

In a folded step (`lensjax.program.folded`) the tagged layers stand for many. What their forward keeps for the backward,
all of them keep at once from the last one's forward to the first one's backward; what their backward makes for the
optimizer, all have made when the backward is over. In between, one layer's leaves as the other's comes: the two ends
are the most and the least. What a layer holds only while it runs is there once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from lensjax.cost.heap import Buffer
from lensjax.partition.data import Node

# Above so many moments it takes less time to look at all of them than to find out which matter.
MOMENTS = 1000
# What lives on for less than this part of the time in which the tagged layers' backward runs is handed to the next one.
HANDED = 0.25


@dataclasses.dataclass(frozen=True)
class Tags:
    """What stands in the names of the tagged layers' operations, and how many more of them there are: each tagged
    operation stands for `further` more of its kind."""

    forward: str
    backward: str
    outside: str
    further: int

    def times(self, node: Node) -> int:
        """How often the whole step has what this node does."""
        return 1 + self.further * any(t in node.op_name for t in (self.forward, self.backward, self.outside))


def alive(
    buffers: Sequence[Buffer],
    classify: Callable[[Buffer], int],
    count: Callable[[], int],
    maker: Callable[[int], Node | None],
    tags: Tags | None = None,
) -> np.ndarray:
    """float [moments, classes] of the buffers: bytes at each moment that can be the peak. `count()`: classes there are
    in the end; `maker`: of a value."""
    moments = max((b.end for b in buffers), default=0) + 2
    rows: dict[int, np.ndarray] = {}
    kept = [(b, classify(b)) for b in buffers if b.value >= 0]
    for b, c in kept:
        row = rows.setdefault(c, np.zeros(moments))
        row[b.start] += b.size
        row[b.end + 1] -= b.size
    found = np.zeros((moments, count()))
    for c, row in rows.items():
        found[:, c] = np.cumsum(row)
    if tags is not None and tags.further:
        found = _written_out(found, kept, maker, tags)
    return found[_undominated(found)]


def _written_out(
    found: np.ndarray, kept: Sequence[tuple[Buffer, int]], maker: Callable[[int], Node | None], tags: Tags
) -> np.ndarray:
    name = lambda b: n.op_name if (n := maker(b.value)) is not None else ""
    forward = [(b, c) for b, c in kept if tags.forward in name(b)]
    backward = [(b, c) for b, c in kept if tags.backward in name(b)]
    outside = [(b, c) for b, c in kept if tags.outside in name(b)]
    if not forward or not backward:
        return found
    moments = len(found)
    begins = min(b.start for b, _ in forward)
    turns = min(b.start for b, _ in backward)
    first = min([b.start for b, _ in kept if "transpose(" in name(b)], default=turns)  # of the whole backward
    # Gradients live on to the optimizer; what the layers before are handed is gone soon.
    shortest = max(1, int(HANDED * (np.median([b.start for b, _ in backward]) - turns) * 2))
    passing = [b.start for b, _ in backward if b.end - b.start <= shortest]
    ends = max(passing, default=turns)
    saved = _held([(b, c) for b, c in forward if b.start < first <= b.end], found.shape)
    # A buffer that each layer writes over what the one before left in it is there once: it ends with the backward.
    update = min((b.start for b, _ in outside), default=0)
    made = [(b, c) for b, c in backward if b.end > max(ends + shortest, update - 1)]
    gradients = _held(made, found.shape)
    after = [(b, c) for b, c in outside if b.start > ends and b.end - b.start > (moments - ends) / 2]
    late = gradients + _held(after, found.shape)
    extra = np.zeros_like(found)
    extra[begins : ends + 1] = saved.max(axis=0)
    extra[ends + 1 :] = late[ends + 1 :]
    last = found[turns : ends + 1] + tags.further * gradients.max(axis=0)
    return np.concatenate([found + tags.further * extra, last])


def _held(buffers: Sequence[tuple[Buffer, int]], shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(shape)
    for b, c in buffers:
        out[b.start : b.end + 1, c] += b.size
    return out


def _undominated(alive: np.ndarray) -> np.ndarray:
    """Moments at which some buffer is alive that is not at a moment with as much of everything: only these can be the
    peak, however buffers shrink."""
    _, first = np.unique(alive, axis=0, return_index=True)
    if len(first) > MOMENTS:
        return np.sort(first)
    order = first[np.argsort(-alive[first].sum(1), kind="stable")]
    kept: list[int] = []
    for t in order:
        if not any((alive[k] >= alive[t]).all() for k in kept):
            kept.append(int(t))
    return np.array(sorted(kept), int)
