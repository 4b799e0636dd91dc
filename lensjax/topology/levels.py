"""The frame of a cluster as a list of levels: one per tier, one per dimension of a torus, innermost first.

Devices are then an array [..., level 1, level 0], and to place a mesh is to split each level's length among the axes.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from lensjax.topology.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Level:
    """`length` subgroups side by side on tier number `tier`; `dim` is the torus dimension, None elsewhere; `joined`:
    several tiers read as one, so that the order of the subgroups matters.
    """

    length: int
    tier: int
    dim: int | None = None
    joined: bool = False


def levels(cluster: Cluster) -> list[Level]:
    """The levels of a cluster; the outermost is rounded up where its last group is partial."""
    result, inner = [], 1
    for index, tier in enumerate(cluster.tiers):
        if tier.kind == "torus" and inner == 1:
            result += [Level(tier.shape[d], index, d) for d in reversed(range(len(tier.shape)))]
        else:
            result.append(Level(-(-tier.size // inner), index))
        inner = tier.size
    return result


def variants(cluster: Cluster) -> list[list[Level]]:
    """The levels, then coarser readings for what has no regular box: 33 nodes are no box of units of 32, but they are
    33 nodes, and 15 groups of 4 are left on 8 nodes of 8 of which one lost a device. Each joins outer levels into
    one.
    """
    frame = levels(cluster)
    torus = sum(level.dim is not None for level in frame)
    result = [frame]
    for kept in range(len(frame) - 2, max(torus, 1) - 1, -1):
        result.append([*frame[:kept], _joined(cluster, frame[kept:])])
    first = frame[0]
    if first.dim is None:
        parts = [f for f in range(first.length - 1, 1, -1) if first.length % f == 0]
        for f in parts:
            rest = [Level(first.length // f, first.tier), *frame[1:]]
            result.append([Level(f, first.tier), _joined(cluster, rest)])
    return result


def _joined(cluster: Cluster, parts: list[Level]) -> Level:
    slowest = min(parts, key=lambda level: cluster.tiers[level.tier].usable)
    return Level(int(np.prod([level.length for level in parts])), slowest.tier, joined=True)


def frames(frame: list[Level], count: int) -> list[tuple[int, ...]]:
    """All ways to take `count` devices as a regular box of the frame: a used length per level, fullest inside
    first.
    """
    found = []

    def extend(used: tuple[int, ...], rest: int) -> None:
        if len(used) == len(frame):
            if rest == 1:
                found.append(used)
            return
        room = int(np.prod([level.length for level in frame[len(used) + 1 :]], dtype=np.int64))
        for length in range(min(frame[len(used)].length, rest), 0, -1):
            if rest % length == 0 and rest // length <= room:
                extend((*used, length), rest // length)

    extend((), count)
    return found


def select(cluster: Cluster, frame: list[Level], used: tuple[int, ...]) -> np.ndarray | None:
    """Slots of a regular box, int [used lengths, outermost first], or None where damage leaves no such box.

    Subgroups without slow links are taken first; along a torus the positions are contiguous.
    """
    shape = tuple(level.length for level in reversed(frame))
    slots = np.arange(int(np.prod(shape))).reshape(shape)
    absent = np.ones(slots.size)
    absent[cluster.slots] = 0
    slow = np.zeros(slots.size)
    for s in cluster.slow:
        slow[np.asarray(s.slots)] += 1 - s.factor
    penalty = np.where(absent.reshape(shape) > 0, np.inf, slow.reshape(shape))
    dims = [i for i, level in enumerate(frame) if level.dim is not None]
    if dims:
        wraps = cluster.tiers[frame[0].tier].wrap
        slots, penalty = _window(slots, penalty, [used[i] for i in reversed(dims)], wraps)
    for i, level in enumerate(frame):
        if level.dim is None:
            slots, penalty = _take(slots, penalty, slots.ndim - 1 - i, used[i])
    return None if np.isinf(penalty).any() else slots


def _take(slots: np.ndarray, penalty: np.ndarray, axis: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best subgroups along an axis, each judged whole, kept in their order."""
    inner = tuple(range(axis + 1, slots.ndim))
    cost = penalty.sum(axis=inner, keepdims=True)
    best = np.sort(np.argsort(cost, axis=axis, kind="stable").take(range(count), axis=axis), axis=axis)
    return np.take_along_axis(slots, best, axis), np.take_along_axis(penalty, best, axis)


def _window(
    slots: np.ndarray, penalty: np.ndarray, lengths: list[int], wraps: tuple[bool, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The best contiguous box inside each torus (the last len(lengths) axes); a box may go through the wrap links."""
    rank = len(lengths)
    outer, sides = slots.shape[:-rank], slots.shape[-rank:]
    flat, cost = slots.reshape(-1, *sides), penalty.reshape(-1, *sides)
    starts = [range(1 if n == side else side if w else side - n + 1) for side, n, w in zip(sides, lengths, wraps)]
    boxes, costs = [], []
    for torus, price in zip(flat, cost):
        windows = (_indices(start, lengths, sides) for start in itertools.product(*starts))
        best = min(windows, key=lambda w: price[w].sum()) if price.any() else next(windows)
        boxes.append(torus[best])
        costs.append(price[best])
    return np.array(boxes).reshape(*outer, *lengths), np.array(costs).reshape(*outer, *lengths)


def _indices(start: tuple[int, ...], lengths: list[int], sides: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return np.ix_(*((a + np.arange(n)) % side for a, n, side in zip(start, lengths, sides)))
