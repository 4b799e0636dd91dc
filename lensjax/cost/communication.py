"""The price of collectives on a cluster: mesh axes become groups of devices, groups lie on tiers.

Groups follow from the mesh's shape and the order of its devices (row-major over the axes); all groups of an axis run at
the same time and share what they meet on. Seconds and wire bytes per tier are `lensjax.topology.collectives`'.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lensjax.partition.data import Axes, Collective
from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives import collective_time, span, wire_bytes

# Collectives of one kind that do not wait for each other are combined into calls of up to this many bytes
# (xla_gpu_all_reduce_combine_threshold_bytes and its siblings, default 30 MiB: xla/debug_options_flags.cc).
COMBINE = 30 * 2**20


def groups(mesh: Mapping[str, int], axes: Axes, order: Sequence[int] | None = None) -> np.ndarray:
    """int [groups, members]: device ids that differ only along `axes`, major axis first.

    `order`: device ids row-major over the mesh; None is 0, 1, 2, ... A sub-axis "d:(2)4" is the part of axis d of size
    4 below a part of size 2.
    """
    ids = np.arange(math.prod(mesh.values())) if order is None else np.asarray(order)
    names: list[str] = []
    sizes: list[int] = []
    for name, size in mesh.items():
        for part, n in _parts(name, size, axes):
            names.append(part)
            sizes.append(n)
    inside = [names.index(a) for a in axes]
    rest = [i for i in range(len(names)) if i not in inside]
    return ids.reshape(sizes).transpose(rest + inside).reshape(-1, math.prod(sizes[i] for i in inside))


def _parts(name: str, size: int, axes: Axes) -> Iterable[tuple[str, int]]:
    """An axis cut wherever one of `axes` names a part of it."""
    spans = [(int(pre), int(n)) for a, _, sub in (x.partition(":") for x in axes) if a == name and sub
             for pre, _, n in [sub.lstrip("(").partition(")")]]  # fmt: skip
    cuts = sorted({1, size, *(p for p, _ in spans), *(p * n for p, n in spans)})
    if len(cuts) == 2 or not spans:
        return [(name, size)]
    return [(f"{name}:({a}){b // a}", b // a) for a, b in itertools.pairwise(cuts)]


class Prices:
    """Prices of one cluster, mesh and device order; spans are worked out once for each set of axes."""

    def __init__(self, cluster: Cluster, mesh: Mapping[str, int], order: Sequence[int] | None = None):
        self.cluster, self.mesh, self.order = cluster, mesh, order
        self._lies: dict[tuple[str, Axes], object] = {}
        self._wire: dict[tuple[str, Axes], dict[str, float]] = {}

    def lies(self, op: str, axes: Axes) -> object:
        """The span of the groups (the groups themselves for a permute, whose order matters)."""
        key = ("permute" if op == "collective_permute" else "", axes)
        if key not in self._lies:
            members = groups(self.mesh, axes, self.order)
            self._lies[key] = members if key[0] else span(self.cluster, members)
        return self._lies[key]

    def wire(self, c: Collective) -> dict[str, float]:
        """Bytes that a device sends on each tier for one execution."""
        key = (c.op, c.axes)
        if key not in self._wire:
            self._wire[key] = wire_bytes(self.cluster, _topology_name(c.op), self.lies(c.op, c.axes), 1.0)
        return {tier: per_byte * c.bytes for tier, per_byte in self._wire[key].items()}

    def seconds(self, op: str, axes: Axes, sizes: np.ndarray) -> np.ndarray:
        """Seconds of calls with these payloads."""
        return collective_time(self.cluster, _topology_name(op), self.lies(op, axes), sizes)

    def calls(self, items: Sequence[tuple[Collective, int]]) -> list[float]:
        """Seconds of each collective of a region, its part of the combined call that it goes into.

        items: (collective, stage); collectives of one kind and stage do not wait for each other.
        """
        bundles: dict[tuple, list[list[int]]] = defaultdict(list)
        for i, (c, stage) in enumerate(items):
            open_ = bundles[c.op, c.axes, c.dtype, stage]
            if not open_ or sum(items[j][0].bytes for j in open_[-1]) + c.bytes > COMBINE:
                open_.append([])
            open_[-1].append(i)
        result = [0.0] * len(items)
        by_kind: dict[tuple[str, Axes], list[list[int]]] = defaultdict(list)
        for (op, axes, *_), lists in bundles.items():
            by_kind[op, axes].extend(lists)
        for (op, axes), lists in by_kind.items():
            totals = np.array([sum(items[i][0].bytes for i in members) for members in lists], float)
            for members, total, time in zip(lists, totals, self.seconds(op, axes, totals)):
                for i in members:
                    result[i] = float(time) * (items[i][0].bytes / float(total) if total else 1 / len(members))
        return result


def _topology_name(op: str) -> str:
    return "permute" if op == "collective_permute" else op
