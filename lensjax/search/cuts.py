"""Contiguous stages of a line of units: the partition whose slowest stage is fastest, exactly.

Dynamic programming over (stages, units), as in Alpa's inter-operator pass (Zheng et al. 2022, section 5.2) where all
parts of the cluster are equal: best[s][j] = min over i of max(best[s-1][i], cost of units i..j-1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def partition(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many units each stage has, in order, each at least one, so that the largest sum of seconds is least; of
    those the one whose sums are most even (the least sum of squares). Raises ValueError for fewer units than stages."""
    n = len(seconds)
    if not 1 <= stages <= n:
        raise ValueError(f"{n} units make no {stages} stages of at least one unit")
    total = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, float))])
    least = _slowest(total, stages)
    limit = least[-1][n] * (1 + 1e-9)
    # Of all partitions within the limit the most even: the same recursion on sums of squares.
    square = np.full((stages + 1, n + 1), np.inf)
    square[0, 0] = 0.0
    came = np.zeros((stages + 1, n + 1), int)
    for s in range(1, stages + 1):
        for j in range(s, n + 1):
            own = total[j] - total[s - 1 : j]
            cost = np.where(own <= limit, square[s - 1, s - 1 : j] + own**2, np.inf)
            at = int(cost.argmin())
            square[s, j], came[s, j] = cost[at], s - 1 + at
    sizes, j = [], n
    for s in range(stages, 0, -1):
        sizes.append(j - came[s, j])
        j = came[s, j]
    return tuple(int(x) for x in reversed(sizes))


def _slowest(total: np.ndarray, stages: int) -> list[np.ndarray]:
    """[s][j]: seconds of the slowest stage of the best partition of the first j units into s + 1 stages."""
    n = len(total) - 1
    rows = [total.copy()]
    for s in range(2, stages + 1):
        row = np.full(n + 1, np.inf)
        for j in range(s, n + 1):
            row[j] = np.maximum(rows[-1][s - 1 : j], total[j] - total[s - 1 : j]).min()
        rows.append(row)
    return rows
