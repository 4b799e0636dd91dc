"""Seconds of collectives along the axes of any mesh of one cluster, as arrays, each way of lying analysed once.

What a collective along some axes of a row-major mesh costs depends only on the (size, stride) of its groups, so the
meshes of a search share almost all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives import collective_lines, span

Lie = tuple[tuple[int, int], ...]


class Links:
    """Prices of one cluster whose devices are used in order."""

    def __init__(self, cluster: Cluster, devices: int):
        self.cluster, self.devices = cluster, devices
        self._spans: dict[Lie, Any] = {}
        self._lines: dict[tuple[str, Lie], np.ndarray] = {}

    def seconds(self, op: str, sizes: Sequence[int], axes: Sequence[int], nbytes: Any) -> np.ndarray:
        """Seconds of calls with these payloads (full buffer, per device) along `axes` of a mesh with `sizes`."""
        amounts = np.asarray(nbytes, float)
        lie = lie_of(sizes, axes)
        if not lie:
            return np.zeros(amounts.shape)
        lines = self.lines(op, lie)
        if not amounts.ndim:  # what a search asks for most
            return (lines[..., 0] + lines[..., 1] * amounts).min(axis=1).max() if amounts > 0 else np.zeros(())
        each = (
            lines[..., 0].reshape(*lines.shape[:2], *(1,) * amounts.ndim)
            + lines[..., 1].reshape(*lines.shape[:2], *(1,) * amounts.ndim) * amounts
        )
        return np.where(amounts > 0, each.min(axis=1).max(axis=0), 0.0)

    def lines(self, op: str, lie: Lie) -> np.ndarray:
        """float [ways of lying, lines, 2]: see `lensjax.topology.collectives.collective_lines`."""
        key = (op, lie)
        if key not in self._lines:
            if lie not in self._spans:
                self._spans[lie] = span(self.cluster, members(self.devices, lie))
            self._lines[key] = collective_lines(self.cluster, op, self._spans[lie])
        return self._lines[key]


def lie_of(sizes: Sequence[int], axes: Sequence[int]) -> Lie:
    """((size, stride), ...) of the groups along some axes of a row-major mesh, outermost first, neighbours merged."""
    return _lie_of(tuple(sizes), tuple(axes))


@functools.lru_cache(maxsize=65536)
def _lie_of(sizes: tuple[int, ...], axes: tuple[int, ...]) -> Lie:
    out: list[tuple[int, int]] = []
    for a in sorted(axes):
        n, stride = sizes[a], math.prod(sizes[a + 1 :])
        if n == 1:
            continue
        if out and out[-1][1] == n * stride:
            out[-1] = (out[-1][0] * n, stride)
        else:
            out.append((n, stride))
    return tuple(out)


def members(devices: int, lie: Lie) -> np.ndarray:
    """int [groups, members] of device ids."""
    shape, inside, outer = [], [], devices
    for n, stride in lie:
        shape.append(outer // (n * stride))
        inside.append(len(shape))
        shape.append(n)
        outer = stride
    shape.append(outer)
    rest = [i for i in range(len(shape)) if i not in inside]
    count = math.prod(n for n, _ in lie)
    return np.arange(devices).reshape(shape).transpose(rest + inside).reshape(-1, count)
