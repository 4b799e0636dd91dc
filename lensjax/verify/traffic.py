"""Bytes on the wire: what each device sends per step, on which tier, along which mesh axes.

Ring algorithms, as NCCL counts them (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): with n members
and B bytes put in by each, a device sends
    all-reduce 2(n-1)/n B, reduce-scatter (n-1)/n B, all-gather (n-1) B, all-to-all (n-1)/n B, broadcast B, permute B.
A ring runs in the order of the group; the send from one member to the next crosses the innermost tier that holds both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lensjax.verify.collectives import Collective

if TYPE_CHECKING:
    from lensjax.topology.cluster import Cluster

ALL_LINKS = "links"  # name of the only tier where no cluster is given


def sent_bytes(kind: str, payload: float, members: int) -> float:
    """Bytes that one member sends, ring algorithm; `payload` is what it puts in. See the module docstring."""
    n = members
    if kind == "collective-permute":
        return float(payload)
    if n <= 1:
        return 0.0
    factor = {
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-gather": n - 1,
        "all-to-all": (n - 1) / n,
        "ragged-all-to-all": (n - 1) / n,
        "collective-broadcast": 1.0,
    }[kind]
    return factor * payload


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes sent per device per step. `tiers`: maximum over devices; `mean`: average; `axes`: mesh axes (a tuple of
    names, empty where no mesh was given) -> maximum over devices on all tiers together; `inner`/`outer`: maximum
    within and across groups of the innermost tier (nodes).
    """

    tiers: Mapping[str, float]
    mean: Mapping[str, float]
    axes: Mapping[tuple[str, ...], float]
    inner: float
    outer: float


class Wires:
    """Where mesh positions sit: the tiers of a cluster and the device id at each position."""

    def __init__(self, devices: int, cluster: Cluster | None = None, order: Sequence[int] | None = None):
        self.devices = devices
        self.cluster = cluster
        self.ids = np.arange(devices) if order is None else np.asarray(order, int)
        self.names = tuple(t.name for t in cluster.tiers) if cluster is not None else (ALL_LINKS,)

    def tier_of_pairs(self, pairs: np.ndarray) -> np.ndarray:
        """int [pairs]: index of the innermost tier that holds both positions."""
        if self.cluster is None or not len(pairs):
            return np.zeros(len(pairs), int)
        return self.cluster.tier_of(self.ids[pairs])

    def sent(self, c: Collective) -> np.ndarray:
        """float [devices, tiers]: bytes that each position sends in one run of a collective."""
        out = np.zeros((self.devices, len(self.names)))
        each = sent_bytes(c.kind, c.payload, c.members)
        if c.kind == "collective-permute":
            pairs = c.groups[c.groups[:, 0] != c.groups[:, 1]]
            np.add.at(out, (pairs[:, 0], self.tier_of_pairs(pairs)), each)
        elif c.members > 1 and "all-to-all" in c.kind:
            self._to_all(c.groups, each / (c.members - 1), out)
        elif c.members > 1:
            after = np.roll(c.groups, -1, axis=1)
            pairs = np.stack([c.groups.ravel(), after.ravel()], axis=1)
            np.add.at(out, (pairs[:, 0], self.tier_of_pairs(pairs)), each)
        return out

    def _to_all(self, groups: np.ndarray, each: float, out: np.ndarray) -> None:
        """Every member sends `each` bytes to every other: count the others on each tier, nearest first."""
        nearer = np.zeros(groups.size)
        for tier in range(len(self.names)):
            inside = self._members_inside(groups, tier)
            out[groups.ravel(), tier] += each * (inside - 1 - nearer)
            nearer = inside - 1

    def _members_inside(self, groups: np.ndarray, tier: int) -> np.ndarray:
        """float [members of all groups]: how many of its own group sit in the same group of a tier, itself included."""
        if self.cluster is None or tier == len(self.names) - 1:
            return np.full(groups.size, groups.shape[1])
        box = self.cluster.slots[self.ids[groups]] // self.cluster.tiers[tier].size
        key = box + np.arange(len(groups))[:, None] * (int(box.max()) + 1)
        _, index, counts = np.unique(key.ravel(), return_inverse=True, return_counts=True)
        return counts[index]


def mesh_axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the members of a group differ; `mesh`: axis -> size, positions in row-major order."""
    if not mesh:
        return ()
    places = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(a for a, at in zip(mesh, places) if (at != at[:, :1]).any())


def traffic(found: Iterable[Collective], wires: Wires, mesh: Mapping[str, int] | None = None) -> Traffic:
    """Sums the collectives of a step. Conditional branches count as taken; that is an upper bound."""
    total = np.zeros((wires.devices, len(wires.names)))
    axes: dict[tuple[str, ...], np.ndarray] = {}
    for c in found:
        step = c.trips * wires.sent(c)
        total += step
        along = mesh_axes(c.groups, mesh or {})
        axes[along] = axes.get(along, 0.0) + step.sum(axis=1)
    most, mean = total.max(axis=0), total.mean(axis=0)
    return Traffic(
        tiers=dict(zip(wires.names, most.tolist())),
        mean=dict(zip(wires.names, mean.tolist())),
        axes={a: float(v.max()) for a, v in axes.items() if v.max() > 0},
        inner=float(total[:, 0].max()),
        outer=float(total[:, 1:].sum(axis=1).max()) if total.shape[1] > 1 else 0.0,
    )
