"""What must hold of a cluster, with errors that say what was found and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable

from lensjax._errors import ClusterError
from lensjax.topology.cluster import Cluster

MOST_SLOTS = 2**24  # a thousand times the largest machine; more is a slip of the pen and would not fit in memory


def check(cluster: Cluster) -> None:
    """Raises ClusterError unless the tiers nest and every slot that is named exists."""
    where = f"cluster {cluster.name!r}"
    if not cluster.tiers:
        raise ClusterError(f"{where} has no tiers", hint="list at least one tier; its size is the number of devices")
    _check_tiers(cluster, where)
    if cluster.capacity > MOST_SLOTS:
        raise ClusterError(f"{where} has {cluster.capacity:,} slots", hint=f"at most {MOST_SLOTS:,}")
    names = [t.name for t in cluster.tiers]
    _check_slots(cluster.missing, cluster.capacity, f"{where}: missing")
    if cluster.devices < 1:
        raise ClusterError(f"{where}: all {cluster.capacity} slots are missing")
    for slow in cluster.slow:
        if slow.tier not in names:
            raise ClusterError(f"{where}: slow names tier {slow.tier!r}", hint=f"its tiers are {', '.join(names)}")
        if not 0 < slow.factor <= 1:
            raise ClusterError(
                f"{where}: slow factor {slow.factor}", hint="a fraction of the tier's bandwidth: 0 < factor <= 1"
            )
        _check_slots(slow.slots, cluster.capacity, f"{where}: slow")
    for i, other in enumerate(cluster.others):
        twice = next((o for o in cluster.others[:i] if o.start < other.stop and other.start < o.stop), None)
        if twice is not None:
            raise ClusterError(
                f"{where}: others {twice.start}..{twice.stop} and {other.start}..{other.stop} share slots",
                hint="one device for each slot",
            )
        if not 0 <= other.start < other.stop <= cluster.capacity:
            raise ClusterError(f"{where}: others {other.start}..{other.stop} of {cluster.capacity} slots")
    if cluster.order is not None and sorted(cluster.order) != list(range(cluster.devices)):
        raise ClusterError(f"{where}: order is not a permutation of its {cluster.devices} devices")


def _check_tiers(cluster: Cluster, where: str) -> None:
    names = [t.name for t in cluster.tiers]
    if len(set(names)) < len(names):
        raise ClusterError(f"{where}: tiers share a name: {', '.join(names)}")
    for inner, outer in zip(cluster.tiers, cluster.tiers[1:]):
        if outer.kind != "switch":
            raise ClusterError(
                f"{where}: {outer.name!r} is a {outer.kind} outside {inner.name!r}",
                hint="only the innermost tier may be a mesh or a torus; list it first, or give a switch",
            )
        last = outer is cluster.tiers[-1]
        if outer.size < inner.size or (outer.size % inner.size and not last):
            raise ClusterError(
                f"{where}: {outer.name!r} of {outer.size} does not hold whole groups of {inner.name!r} ({inner.size})",
                hint="sizes are cumulative, innermost first, e.g. 8, 64, 512; describe an uneven node with `missing`",
            )


def _check_slots(slots: Iterable[int], capacity: int, where: str) -> None:
    slots = tuple(slots)
    if len(set(slots)) < len(slots):
        raise ClusterError(f"{where}: a slot is named twice in {slots}")
    bad = [s for s in slots if not 0 <= s < capacity]
    if bad:
        raise ClusterError(f"{where}: slots {bad} do not exist", hint=f"slots are 0..{capacity - 1}")
