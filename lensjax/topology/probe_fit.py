"""From measured collectives to a cluster: bandwidth and latency of each tier, by the formulas that price collectives.

Tiers are fitted from the inside out on log(predicted / measured) with a Cauchy loss: hiccups of the machine move
nothing. What one device reaches alone, over what it gets when all send, is how many devices share its NIC.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from lensjax._errors import ClusterError
from lensjax.topology.cluster import Cluster, Device, Tier
from lensjax.topology.collectives import collective_time
from lensjax.topology.probe import Level, Point

# The fit goes by what libraries do at full rate; all-to-all and permute are judged by it (gloo's permute is slower, for
# one).
_FITTED = ("all_reduce", "all_gather", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class TierFit:
    """What was found for a tier. Errors are |predicted / measured - 1| over its points, outliers included."""

    name: str
    size: int
    bandwidth: float
    latency: float
    nic_sharing: int
    median_error: float
    p90_error: float
    points: int


def fit_cluster(
    device: Device, found: Sequence[Level], points: Sequence[Point], name: str = "probed"
) -> tuple[Cluster, list[TierFit]]:
    """The cluster that explains the points best, and how well it does on each tier. Raises ClusterError for too few
    points.
    """
    tiers: list[Tier] = []
    for level in found:
        mine = [p for p in points if p.tier == level.name and not p.alone and p.op in _FITTED]
        if len(mine) < 3:
            raise ClusterError(
                f"tier {level.name!r}: {len(mine)} measurements are too few for a fit", hint="probe more sizes"
            )
        tier = _fit_tier(device, tiers, level, mine)
        alone = [p for p in points if p.tier == level.name and p.alone]
        tiers.append(dataclasses.replace(tier, nic_sharing=_sharing(mine, alone, tiers[-1].size if tiers else 1)))
    cluster = Cluster(name, device, tuple(tiers))
    fits = [_judge(cluster, level, points) for level in found]
    tiers = [dataclasses.replace(t, sources=_sources(f)) for t, f in zip(tiers, fits)]
    return dataclasses.replace(cluster, tiers=tuple(tiers)), fits


def predict(cluster: Cluster, level: Level, point: Point) -> float:
    """Seconds that the cluster predicts for a point."""
    groups = level.groups[:1] if point.alone else level.groups
    return collective_time(cluster, point.op, groups, point.bytes)


def _fit_tier(device: Device, inner: list[Tier], level: Level, points: list[Point]) -> Tier:
    measured = np.array([p.seconds for p in points])
    groups = level.groups[level.groups.max(axis=1) < level.size]  # the tier's first group stands for all
    sizes = {op: np.array([p.bytes for p in points if p.op == op]) for op in dict.fromkeys(p.op for p in points)}
    order = np.concatenate([np.flatnonzero([p.op == op for p in points]) for op in sizes])

    def tier(x: np.ndarray) -> Tier:
        return Tier(level.name, level.size, float(np.exp(x[0])), float(np.exp(x[1])))

    def residuals(x: np.ndarray) -> np.ndarray:
        cluster = Cluster("trial", device, (*inner, tier(x)))
        times = np.concatenate([collective_time(cluster, op, groups, s) for op, s in sizes.items()])
        return np.log(times / measured[order])

    largest = max(points, key=lambda p: p.bytes)
    start = np.log([max(largest.bytes / largest.seconds, 1e3), max(measured.min() / 4, 1e-8)])
    best = least_squares(residuals, start, loss="cauchy", f_scale=0.2, bounds=(start - 12, start + 12))
    return tier(best.x)


def _sharing(together: list[Point], alone: list[Point], below: int) -> int:
    """Devices on one NIC: the ratio of the large-message rates alone and together, as a divisor of a unit's devices."""
    shared = {(p.op, p.bytes): p.seconds for p in together}
    ratios = [
        shared[p.op, p.bytes] / p.seconds for p in sorted(alone, key=lambda p: p.bytes) if (p.op, p.bytes) in shared
    ]
    if not ratios:
        return 1
    ratio = max(float(np.median(ratios[-4:])), 1.0)
    return min((d for d in range(1, below + 1) if below % d == 0), key=lambda d: abs(np.log(d / ratio)))


def _judge(cluster: Cluster, level: Level, points: Sequence[Point]) -> TierFit:
    mine = [p for p in points if p.tier == level.name and not p.alone]
    errors = np.array([abs(predict(cluster, level, p) / p.seconds - 1) for p in mine])
    tier = next(t for t in cluster.tiers if t.name == level.name)
    median, p90 = float(np.median(errors)), float(np.quantile(errors, 0.9))
    return TierFit(level.name, level.size, tier.bandwidth, tier.latency, tier.nic_sharing, median, p90, len(mine))


def _sources(found: TierFit) -> dict[str, str]:
    text = f"measured by lensjax probe: {found.points} collectives, median fit error {found.median_error:.0%}"
    return {"bandwidth": text, "latency": text, "nic_sharing": text}
