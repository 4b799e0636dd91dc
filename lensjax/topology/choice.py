"""The choice among device orders for a mesh: the cheapest by the price of the collectives that its axes carry.

The search (factor.py) counts bytes on links. What it finds best is not always the cheapest: a short message pays for
hops, a switch that reduces makes an inner tier faster than its links, a library reaches another part of each link. So
its few best orders, and the plain ones, are priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from lensjax.topology import loads
from lensjax.topology.cluster import Cluster

BUDGET = 2**18  # devices in all the orders that are priced: 16 of 16,384
TIE = 0.03  # prices as near as this are equal, being wrong by more: then the order that leaves more links free


def predicted_seconds(
    cluster: Cluster, order: np.ndarray, traffic: Mapping[str, float], axes: Mapping[str, int]
) -> float:
    """Seconds per step on a mesh of device ids `order`: per axis one all-reduce that makes each device send the axis'
    traffic (bytes, ring factor included), by `collective_time`.

    On a torus at least the load on the links, as the price does not see groups that are interleaved on one side.
    """
    from lensjax.topology.collectives import collective_time

    total = 0.0
    for i, (axis, n) in enumerate(axes.items()):
        nbytes = traffic.get(axis, 0.0)
        if n > 1 and nbytes > 0:
            groups = loads.axis_groups(order, i)
            price = collective_time(cluster, "all_reduce", groups, nbytes * n / (2 * (n - 1)))
            torus = cluster.tiers[0].kind == "torus"
            total += max(price, loads.axis_seconds(cluster, groups, nbytes)) if torus else price
    return total


def cheapest(
    cluster: Cluster,
    searched: Iterable[np.ndarray],
    plain: Iterable[np.ndarray],
    traffic: Mapping[str, float],
    axes: Mapping[str, int],
) -> tuple[float, np.ndarray, bool]:
    """(predicted seconds, order, whether it is a searched one). `searched`: the best by link load first; `plain`: the
    first is priced always. Of the others as many are priced as BUDGET allows, by their load on the links.
    """
    few = max(BUDGET // int(np.prod(list(axes.values()))) // 2, 4)
    first, *others = plain
    others = sorted(others, key=lambda order: loads.seconds(cluster, order, traffic, axes))[: few - 1]
    found: dict[bytes, tuple[np.ndarray, bool]] = {}
    for order, regular in [*((o, True) for _, o in zip(range(few), searched)), *((o, False) for o in (first, *others))]:
        found.setdefault(order.tobytes(), (order, regular))
    prices = [(predicted_seconds(cluster, order, traffic, axes), order, regular) for order, regular in found.values()]
    least = min(price for price, _, _ in prices) * (1 + TIE)
    equal = [p for p in prices if p[0] <= least]
    return min(equal, key=lambda p: loads.busy_seconds(cluster, p[1], traffic, axes)) if len(equal) > 1 else equal[0]
