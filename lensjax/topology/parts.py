"""Equal parts of a cluster, as clusters of their own, and the tier that joins neighbouring parts.

Device ids count through the slots, so part s of devices n is ids s*n .. s*n + n - 1.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology.cluster import Cluster


def part(cluster: Cluster, count: int) -> Cluster:
    """One of `count` equal parts: whole groups of the tiers that it holds, and a piece of the next.

    Raises ClusterError where the parts are not all alike: a cluster with something missing, slow, different or moved,
    devices that do not divide, groups that would be cut unevenly, and pieces of a torus (its links are not those of a
    smaller one). A piece of a mesh has the links among its own devices.
    """
    if count == 1:
        return cluster
    if not cluster.regular or cluster.order is not None:
        raise ClusterError(f"the parts of {cluster.name!r} are not alike", hint="give a cluster whose nodes are equal")
    if count < 1 or cluster.devices % count:
        raise ClusterError(f"{cluster.devices} devices of {cluster.name!r} cannot be cut into {count} equal parts")
    size = cluster.devices // count
    held = [t for t in cluster.tiers if t.size <= size]
    cut = next((t for t in cluster.tiers if t.size > size), None)
    if cut is not None and (not held or held[-1].size < size):
        if cut.kind == "torus":
            raise ClusterError(f"{size} devices are a piece of the torus {cut.name!r}: its links are another's")
        if cut.size % size or (held and size % held[-1].size):
            raise ClusterError(f"{size} devices are no even piece of {cut.name!r} ({cut.size} devices)")
        bandwidth = cut.bandwidth * max(1, size - 1) / (cut.size - 1) if cut.kind == "mesh" else cut.bandwidth
        held.append(dataclasses.replace(cut, size=size, nic_sharing=min(cut.nic_sharing, size), bandwidth=bandwidth))
    return dataclasses.replace(cluster, name=f"1/{count} of {cluster.name}", tiers=tuple(held))


def joints(cluster: Cluster, count: int) -> tuple[tuple[float, float], ...]:
    """(latency, bytes/s) between each part and the next, count - 1 of them, while every device i of one sends to device
    i of the other and gets as much: over the tier that joins them, in a mesh over the one link between the two."""
    size = cluster.devices // count
    first = np.arange(size)
    found = []
    for s in range(count - 1):
        pairs = np.stack([s * size + first, (s + 1) * size + first], axis=-1)
        tier = cluster.tiers[int(cluster.tier_of(pairs).max())]
        bandwidth = tier.usable / (tier.size - 1) if tier.kind == "mesh" else tier.usable
        found.append((tier.latency, bandwidth if tier.full_duplex else bandwidth / 2))
    return tuple(found)
