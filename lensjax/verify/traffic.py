"""Bytes on the wire: what each device sends per step, on which tier, along which mesh axes.

Ring algorithms, as NCCL counts them (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): with n
members and B bytes put in by each, a device sends
    all-reduce 2(n-1)/n B, reduce-scatter (n-1)/n B, all-gather (n-1) B, all-to-all (n-1)/n B, broadcast B, permute B.
How much of that crosses which tier is the topology's to say (`topology.collectives.wire_bytes`), for plans and compiled
steps alike: that is what makes the two comparable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from lensjax.verify.collectives import Collective


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


def step_bytes(c: Collective) -> float:
    """Bytes that a device sends per step in one collective; a permute of a device to itself sends nothing."""
    if c.kind == "collective-permute" and not (c.groups[:, 0] != c.groups[:, 1]).any():
        return 0.0
    return c.trips * sent_bytes(c.kind, c.payload, c.members)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes sent per device per step. `tiers`: tier -> bytes, the maximum over groups ({} without a cluster); `axes`:
    mesh axes along which the members of a group differ -> bytes on all tiers; `total`: all of them. Conditional
    branches count as taken, ragged exchanges as full: both are upper bounds.
    """

    tiers: Mapping[str, float]
    axes: Mapping[tuple[str, ...], float]
    total: float

    def outside(self, inner: str) -> float:
        """Bytes that leave the groups of a tier (the node)."""
        return sum(v for k, v in self.tiers.items() if k != inner)


def mesh_axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the members of a group differ; `mesh`: axis -> size, positions in row-major order."""
    if not mesh:
        return ()
    places = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(a for a, at in zip(mesh, places) if (at != at[:, :1]).any())


def traffic(
    found: Iterable[Collective],
    mesh: Mapping[str, int] | None = None,
    tier_bytes: Callable[[Collective], Mapping[str, float]] | None = None,
) -> Traffic:
    """Sums the collectives of a step. `tier_bytes`: one run of a collective -> tier -> bytes (`Priced.bytes`)."""
    tiers: dict[str, float] = {}
    axes: dict[tuple[str, ...], float] = {}
    for c in found:
        if not (sent := step_bytes(c)):
            continue
        along = mesh_axes(c.groups, mesh or {})
        axes[along] = axes.get(along, 0.0) + sent
        for tier, each in (tier_bytes(c) if tier_bytes else {}).items():
            tiers[tier] = tiers.get(tier, 0.0) + c.trips * each
    return Traffic(tiers, axes, sum(axes.values()))
