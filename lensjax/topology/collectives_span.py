"""How the groups of a collective lie on the tiers: how many units of each tier they touch, and what leaves each unit.

A *unit* of tier t is one of its groups of devices (a node, a rack); below tier 0 a unit is one device. What a
collective costs depends on two things per tier: how many units the group touches (latency: hops) and the bytes/s at
which the group's data can leave one unit (bandwidth). The second is where concurrent groups meet: the k strided groups
that have one member in each node split that node's NICs, while one group that holds the whole node has them all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology import loads
from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives_fabric import share_of_links, torus_extents


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """Groups reduced to the distinct ways in which they lie (`k` of them; 1 for a regular mesh axis).

    `units`: int [k, tiers + 1]; column 0 is the number of members, column t + 1 the number of tier-t units touched.
    `egress`: float [k, tiers]; bytes/s at which one group leaves one tier-(t-1) unit through tier t (infinite where it
    does not). `torus`: int [k, dims] members along each dimension of a torus on the innermost tier (dims = 0 without
    one).
    """

    units: np.ndarray
    egress: np.ndarray
    torus: np.ndarray

    @property
    def members(self) -> np.ndarray:
        """int [k]: devices in a group."""
        return self.units[:, 0]

    @property
    def crosses(self) -> np.ndarray:
        """bool [k, tiers]: the group's data uses this tier's links: it has members in several units of the tier below.

        The innermost links only where two members share a unit: one member per node goes straight to its NIC.
        """
        result = self.units[:, :-1] > 1
        result[:, 0] &= self.units[:, 0] > self.units[:, 1]
        return result


def as_groups(cluster: Cluster, groups: Any) -> np.ndarray:
    """int [groups, members], checked: ids of this cluster, each device once in a group. A flat list is one group."""
    try:
        ids = np.atleast_2d(np.asarray(groups))
    except ValueError:
        raise ClusterError(
            "groups of different sizes", hint="price each size by itself: groups that run at once have as many members"
        ) from None
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ClusterError(
            f"groups must be whole numbers [groups, members]; found shape {ids.shape}, {ids.dtype}",
            hint="e.g. np.arange(16).reshape(2, 8): two groups of eight devices",
        )
    if ids.min() < 0 or ids.max() >= cluster.devices:
        raise ClusterError(f"groups name devices {ids.min()}..{ids.max()}; {cluster.name} has 0..{cluster.devices - 1}")
    ordered = np.sort(ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ClusterError("a group names the same device twice")
    return ids


def span(cluster: Cluster, groups: Any) -> Span:
    """The span of groups that run at the same time (int [groups, members] of device ids).

    The price of a collective is that of its slowest group, so groups that lie alike are kept once.
    """
    ids = as_groups(cluster, groups)
    slots = cluster.slots[ids]
    sizes = [1, *(t.size for t in cluster.tiers)]
    units = np.stack([_distinct(slots // size) for size in sizes], axis=1)
    torus = torus_extents(cluster.tiers[0], slots)
    egress = np.stack([loads.egress(cluster, t, ids) for t in range(len(cluster.tiers))], axis=1)
    egress[:, 0] *= share_of_links(cluster, units[:, 0] // np.maximum(units[:, 1], 1), torus)
    rows = np.unique(np.concatenate([units, torus, egress], axis=1), axis=0)
    u, d = units.shape[1], torus.shape[1]
    return Span(rows[:, :u].astype(int), rows[:, u + d :], rows[:, u : u + d].astype(int))


def _distinct(values: np.ndarray) -> np.ndarray:
    """Distinct values in each row: int [rows, n] -> int [rows]."""
    ordered = np.sort(values, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)


def hop_rates(cluster: Cluster, groups: Any) -> tuple[np.ndarray, np.ndarray]:
    """A shift along each group (member i to i + 1, the last to the first), for permute.

    Returns (uses: bool [flows, tiers], rate: float [flows, tiers]): which tiers' links each flow uses, and the bytes/s
    it gets there when all flows run at once: flows out of one unit split that unit's capacity, and none exceeds its
    NIC.
    """
    ids = as_groups(cluster, groups)
    source, target = ids.ravel(), np.roll(ids, -1, axis=1).ravel()
    uses = np.empty((len(source), len(cluster.tiers)), bool)
    rate = np.empty(uses.shape)
    below = 1
    for t, link in enumerate(cluster.tiers):
        unit_of = cluster.slots // below
        bandwidth = cluster.bandwidth_of(t) * (1.0 if link.full_duplex else 0.5)
        capacity = np.bincount(unit_of, weights=bandwidth)
        crossing = uses[:, t] = unit_of[source] != unit_of[target]
        out = np.maximum(np.bincount(unit_of[source][crossing], minlength=len(capacity)), 1)
        into = np.maximum(np.bincount(unit_of[target][crossing], minlength=len(capacity)), 1)
        fair = np.minimum(
            capacity[unit_of[source]] / out[unit_of[source]], capacity[unit_of[target]] / into[unit_of[target]]
        )
        rate[:, t] = np.minimum(fair, np.minimum(bandwidth[source], bandwidth[target]) * link.nic_sharing)
        below = link.size
    inner = cluster.slots // cluster.tiers[0].size
    uses[:, 0] &= inner[source] == inner[target]  # to another node a flow goes straight to the NIC
    rate[:, 0] *= share_of_links(cluster, np.array([2]), torus_extents(cluster.tiers[0], cluster.slots[ids[:, :2]]))[0]
    return uses, rate
