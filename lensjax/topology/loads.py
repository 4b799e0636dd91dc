"""What a device order costs: the load that each mesh axis puts on every link of the cluster.

An axis of a mesh is a set of groups that all communicate at once. The unit of traffic is bytes that one device sends
along the axis per step (ring factor included), so a ring carries that many bytes over each of its hops. A group that
is only partly inside a subtree crosses the subtree's links once in each direction, however many members it has inside
(ring embedding, as NCCL builds it: nccl src/graph/rings.cc), over the links of those members: a single group that
leaves a rack has its own devices' NICs, not the rack's. The time of an axis is its slowest group's; axes run one after
the other. Latency is left out: it depends on how many collectives the traffic comes in, not on the order of
devices.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lensjax.topology.cluster import Cluster, Tier
from lensjax.topology.torus import torus_seconds


def axis_groups(order: np.ndarray, axis: int) -> np.ndarray:
    """int [groups, members]: the devices that communicate along one axis of a mesh, one row a group."""
    return np.moveaxis(order, axis, -1).reshape(-1, order.shape[axis])


def seconds(cluster: Cluster, order: np.ndarray, traffic: Mapping[str, float], axes: Mapping[str, int]) -> float:
    """Predicted seconds per step that the traffic takes on a mesh of device ids `order`."""
    return sum(axis_seconds(cluster, axis_groups(order, i), traffic.get(a, 0.0)) for i, a in enumerate(axes))


def axis_seconds(cluster: Cluster, groups: np.ndarray, nbytes: float) -> float:
    """Seconds for all `groups` (int [groups, members], device ids) at once when each device sends `nbytes`."""
    return max(_by_tier(cluster, groups, nbytes))


def busy_seconds(cluster: Cluster, order: np.ndarray, traffic: Mapping[str, float], axes: Mapping[str, int]) -> float:
    """As `seconds`, but summed over the tiers where that takes the slowest: of two orders that are equally fast the
    one that leaves the other tiers free has less.
    """
    groups = (axis_groups(order, i) for i in range(len(axes)))
    return sum(sum(_by_tier(cluster, g, traffic.get(a, 0.0))) for a, g in zip(axes, groups))


def _by_tier(cluster: Cluster, groups: np.ndarray, nbytes: float) -> list[float]:
    """Seconds on each tier."""
    if groups.shape[1] == 1 or nbytes == 0:
        return [0.0]
    result, inner = [], 1
    for index, tier in enumerate(cluster.tiers):
        if tier.kind == "torus":
            result.append(_on_torus(cluster, index, cluster.slots[groups], nbytes))
        else:
            result.append(nbytes / float(egress(cluster, index, groups).min()))
            if tier.kind == "mesh" and inner == 1:
                result[-1] = max(result[-1], nbytes / _direct_rate(tier, cluster.slots[groups]))
        inner = tier.size
    return result


def rate(tier: Tier) -> float:
    """Bytes/s per device that a ring gets on a tier: half of it where both directions share the wire."""
    return tier.usable if tier.full_duplex else tier.usable / 2


def egress(cluster: Cluster, index: int, groups: np.ndarray) -> np.ndarray:
    """float [groups]: bytes/s at which each group leaves its tightest subtree over tier `index` when all groups (int
    [groups, members], device ids) do so at once; infinite for a group that stays inside one.

    Members share their subtree's links alike. None gets more than its NIC has, which is `nic_sharing` times its part:
    so much it gets where those that share the NIC are idle.
    """
    tier, inner = cluster.tiers[index], cluster.tiers[index - 1].size if index else 1
    links = cluster.bandwidth_of(index) * (1.0 if tier.full_duplex else 0.5)
    subtree_of = cluster.slots // inner
    order = np.argsort(subtree_of[groups], axis=1, kind="stable")
    ids = np.take_along_axis(groups, order, axis=1)
    subtrees = subtree_of[ids]
    leaves = subtrees[:, 0] != subtrees[:, -1]
    result = np.full(len(groups), np.inf)
    if not leaves.any():
        return result
    ids, subtrees = ids[leaves], subtrees[leaves]
    first = np.ones(subtrees.shape, bool)  # of a run: the members of one group in one subtree
    first[:, 1:] = subtrees[:, 1:] != subtrees[:, :-1]
    starts = np.flatnonzero(first)
    subtree, mine = subtrees.ravel()[starts], np.diff(np.r_[starts, ids.size])
    alone = np.add.reduceat(links[ids.ravel()], starts) * tier.nic_sharing
    capacity = np.bincount(subtree_of, weights=links)
    busy = np.bincount(subtrees.ravel(), minlength=len(capacity))
    rates = np.minimum(alone, capacity[subtree] * mine / busy[subtree])
    result[leaves] = np.minimum.reduceat(rates, np.flatnonzero(starts % ids.shape[1] == 0))
    return result


def _leaving(cluster: Cluster, groups: np.ndarray, inner: int) -> np.ndarray:
    """int [subtrees]: how many groups are only partly inside each subtree of `inner` slots."""
    subtrees = np.sort(cluster.slots[groups] // inner, axis=1)
    first = np.ones(subtrees.shape, bool)
    first[:, 1:] = subtrees[:, 1:] != subtrees[:, :-1]
    first &= subtrees[:, :1] != subtrees[:, -1:]
    return np.bincount(subtrees[first], minlength=-(-cluster.capacity // inner))


def _direct_rate(tier: Tier, slots: np.ndarray) -> float:
    """Where devices have a link to each peer, a group uses only the links among its own members."""
    node = slots // tier.size
    members = int(np.count_nonzero(node == node[:, :1], axis=1).min())
    return rate(tier) * (members - 1) / (tier.size - 1) if members > 1 else np.inf


def _on_torus(cluster: Cluster, index: int, slots: np.ndarray, nbytes: float) -> float:
    """Each group's members inside one torus form a group there; links are as slow as the slowest that is named
    slow.
    """
    tier = cluster.tiers[index]
    factor = min([s.factor for s in cluster.slow if s.tier == tier.name], default=1.0)
    ordered = np.sort(slots, axis=1)
    tori = ordered // tier.size
    if (tori[:, 0] == tori[:, -1]).all():
        parts = [slots]  # in mesh order: it is the ring's order where a group is no box
    else:
        counts = (tori == tori[:, :1]).sum(axis=1)
        members = int(counts[0])
        even = members * (slots.shape[1] // members) == slots.shape[1] and (counts == members).all()
        parts = [ordered.reshape(-1, members)] if even else [_largest_run(row, tier.size) for row in ordered]
    return max(torus_seconds(tier, p % tier.size, nbytes) for p in parts) / factor


def _largest_run(row: np.ndarray, size: int) -> np.ndarray:
    tori, counts = np.unique(row // size, return_counts=True)
    return row[row // size == tori[counts.argmax()]][None, :]


def tier_bytes(
    cluster: Cluster, order: np.ndarray, traffic: Mapping[str, float], axes: Mapping[str, int]
) -> dict[str, float]:
    """Tier name -> bytes per step over that tier's links per device: what leaves a subtree over the devices in it, at
    most.

    Traffic that goes on to an outer tier counts on the inner ones as well, as it does on their links.
    """
    result, inner = {}, 1
    for tier in cluster.tiers:
        total = np.zeros(-(-cluster.capacity // inner))
        for i, axis in enumerate(axes):
            if order.shape[i] > 1:
                total += _leaving(cluster, axis_groups(order, i), inner) * traffic.get(axis, 0.0)
        present = np.bincount(cluster.slots // inner, minlength=len(total))
        result[tier.name] = float(np.max(total / np.maximum(present, 1)))
        inner = tier.size
    return result
