"""The search for a mesh on a regular frame: how much of each axis goes on each level of the cluster.

A mesh on a frame is a matrix of factors, one row an axis, one column a level: rows multiply to the axis sizes,
columns to the level lengths. An axis with `inner` members inside a subtree uses the links of all of them, so its time
on a tier is bytes / (inner * bandwidth), and what a level costs depends only on the factors inside it. The matrices
are built level by level, innermost first, all candidates at once in numpy; among candidates that have the same
factors so far only the best few are kept. A fast tier goes to the heavy axis by price, not by rule, and an axis may
span tiers as a tier may hold axes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from lensjax.topology.cluster import Cluster
from lensjax.topology.levels import Level
from lensjax.topology.loads import rate
from lensjax.topology.torus import link_rate

KEEP = 32  # candidates kept for each product of factors; the laws in tests/topology/test_mesh.py hold from 4 on
_TIE = 1e-6  # weight of the sum over tiers against the slowest tier: breaks ties towards less outer traffic


@dataclasses.dataclass(frozen=True)
class Split:
    """One level's factors: `factors` per axis; `nesting` lists the axes with a factor above 1, outermost first."""

    factors: tuple[int, ...]
    nesting: tuple[int, ...]


@dataclasses.dataclass
class _States:
    """Candidates so far, one row each: members inside, slowest time, summed time, rate on the torus; and whence."""

    inner: np.ndarray
    worst: np.ndarray
    total: np.ndarray
    torus: np.ndarray
    parent: np.ndarray
    choice: np.ndarray


def best_splits(
    cluster: Cluster, frame: Sequence[Level], used: Sequence[int], sizes: Sequence[int], nbytes: Sequence[float]
) -> list[list[Split]]:
    """The splits of each level, of at most KEEP matrices with the least seconds by link load, best first; none when no
    matrix of factors exists.

    `used`: how much of each level is taken; `sizes`, `nbytes`: per axis its size and the bytes each device sends on
    it.
    """
    axes, traffic, history = np.asarray(sizes), np.asarray(nbytes, float), []
    zeros = np.zeros((1, len(axes)))
    states = _States(np.ones((1, len(axes)), int), zeros, zeros, zeros, np.zeros(1, int), np.zeros(1, int))
    for i, (level, length) in enumerate(zip(frame, used)):
        splits = _splits(length, tuple(sizes), ordered=level.dim is not None or level.joined)
        if level.dim is None:
            _leave(states, axes, traffic, cluster, level)
        states = _extend(states, axes, splits, level, cluster, length)
        if len(states.inner) == 0:
            return []
        if level.dim is not None and (i + 1 == len(frame) or frame[i + 1].dim is None):
            _close_torus(states, traffic)
        elif level.dim is None and cluster.tiers[level.tier].kind == "mesh" and i == 0:
            _direct(states, traffic, cluster, level)
        states = _prune(states, traffic, cluster, level)
        history.append((states, splits))
    return _trace_back(history)


def _splits(length: int, sizes: tuple[int, ...], ordered: bool) -> list[Split]:
    """All ways to split a level's length among the axes; `ordered`: also every nesting, as on a torus it decides the
    strides, and on joined tiers who crosses the seam."""
    result = []

    def extend(factors: tuple[int, ...], rest: int) -> None:
        if len(factors) == len(sizes):
            if rest == 1:
                nesting = tuple(a for a, f in enumerate(factors) if f > 1)
                nestings = itertools.permutations(nesting) if ordered else [nesting]
                result.extend(Split(factors, tuple(n)) for n in nestings)
            return
        size = sizes[len(factors)]
        for f in range(1, min(rest, size) + 1):
            if rest % f == 0 and size % f == 0:
                extend((*factors, f), rest // f)

    extend((), length)
    return result


def _leave(states: _States, axes: np.ndarray, traffic: np.ndarray, cluster: Cluster, level: Level) -> None:
    """Adds the time of the traffic that leaves the subtrees built so far, over the links of `level`'s tier."""
    tier = cluster.tiers[level.tier]
    slowest = float(cluster.bandwidth_of(level.tier).min()) * rate(tier) / tier.usable
    time = np.where(states.inner < axes, traffic / (states.inner * slowest), 0.0)
    states.worst = np.maximum(states.worst, time)
    states.total = states.total + time


def _extend(
    states: _States, axes: np.ndarray, splits: list[Split], level: Level, cluster: Cluster, length: int
) -> _States:
    """Every state with every split whose factors still divide what is left of the axes."""
    factors = np.array([s.factors for s in splits], int).reshape(len(splits), len(axes))
    inner = states.inner[:, None, :] * factors[None]
    parent, choice = np.nonzero(np.all(axes % inner == 0, axis=-1))
    torus = states.torus[parent]
    if level.dim is not None:
        torus = torus + np.array([_side_rates(s, cluster, level, length) for s in splits])[choice]
    return _States(inner[parent, choice], states.worst[parent], states.total[parent], torus, parent, choice)


def _side_rates(split: Split, cluster: Cluster, level: Level, length: int) -> np.ndarray:
    """Bytes/s that each axis gets from one torus dimension (see torus.side_rate, for a possibly shorter side)."""
    tier, rates, stride = cluster.tiers[level.tier], np.zeros(len(split.factors)), 1
    assert level.dim is not None
    for axis in reversed(split.nesting):
        closed = tier.wrap[level.dim] and length == level.length and split.factors[axis] * stride == length
        rates[axis] = link_rate(tier) * (2 if closed else 1) / stride
        stride *= split.factors[axis]
    return rates


def _close_torus(states: _States, traffic: np.ndarray) -> None:
    time = np.divide(traffic, states.torus, out=np.zeros_like(states.torus), where=states.torus > 0)
    states.worst, states.total = np.maximum(states.worst, time), states.total + time


def _direct(states: _States, traffic: np.ndarray, cluster: Cluster, level: Level) -> None:
    """On a tier with a link to each peer, an axis uses the links among its own members only."""
    tier = cluster.tiers[level.tier]
    rates = rate(tier) * (states.inner - 1) / max(tier.size - 1, 1)
    time = np.where(states.inner > 1, traffic / np.maximum(rates, 1e-30), 0.0)
    states.worst, states.total = np.maximum(states.worst, time), states.total + time


def _prune(states: _States, traffic: np.ndarray, cluster: Cluster, level: Level) -> _States:
    """The KEEP best rows for each product of factors: what comes outside depends on nothing else."""
    score = _score(states)
    if level.dim is not None:  # an open torus: what its traffic would take now, one link more for those without any
        score = score + (traffic / (states.torus + link_rate(cluster.tiers[level.tier]))).sum(axis=1)
    rank = np.lexsort((np.arange(len(score)), score, *states.inner.T))
    key = states.inner[rank]
    new = np.r_[True, np.any(key[1:] != key[:-1], axis=1)]
    place = np.arange(len(rank)) - np.maximum.accumulate(np.where(new, np.arange(len(rank)), 0))
    kept = np.sort(rank[place < KEEP])
    return _States(*(getattr(states, f.name)[kept] for f in dataclasses.fields(_States)))


def _score(states: _States) -> np.ndarray:
    return states.worst.sum(axis=1) + _TIE * states.total.sum(axis=1)


def _trace_back(history: list[tuple[_States, list[Split]]]) -> list[list[Split]]:
    found = []
    for row in np.argsort(_score(history[-1][0]), kind="stable").tolist():
        chosen = []
        for states, splits in reversed(history):
            chosen.append(splits[int(states.choice[row])])
            row = int(states.parent[row])
        found.append(chosen[::-1])
    return found


def arrange(slots: np.ndarray, splits: Sequence[Split], sizes: Sequence[int]) -> np.ndarray:
    """The mesh (int, shape `sizes`) from slots [levels, outermost first] and each level's split, innermost first."""
    pieces: list[tuple[int, int]] = []  # (axis, factor) of each piece, outermost first
    for split in reversed(splits):
        pieces += [(axis, split.factors[axis]) for axis in split.nesting]
    array = slots.reshape([f for _, f in pieces])
    by_axis = [i for axis in range(len(sizes)) for i, (a, _) in enumerate(pieces) if a == axis]
    return array.transpose(by_axis).reshape(tuple(sizes))
