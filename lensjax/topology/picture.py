"""A cluster as a picture: the tree of its tiers beside the bandwidth between its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lensjax.topology.cluster import Cluster, Tier
from lensjax.topology.torus import link_rate
from lensjax.topology.units import pretty

_MOST = 64  # devices a side of the heat map
_CHILDREN = 4  # groups drawn under one; the rest is a number


def pair_bandwidth(cluster: Cluster, ids: np.ndarray | None = None) -> np.ndarray:
    """float [n, n]: bytes/s that one device gets to another while all send alike; infinity on the diagonal.

    The narrowest tier on the way, shared fairly; on a torus a link shared by the hops of the way; on a mesh tier the
    one link between the two.
    """
    ids = np.arange(cluster.devices) if ids is None else np.asarray(ids)
    slots, result = cluster.slots[ids], np.full((len(ids), len(ids)), np.inf)
    apart, inner = np.ones(result.shape, bool), 1
    np.fill_diagonal(apart, False)
    for index, tier in enumerate(cluster.tiers):
        own = cluster.bandwidth_of(index)[ids]
        rate = np.minimum(own[:, None], own[None]) / tier.usable * _between(tier, slots, inner)
        here = apart & (slots[:, None] // inner != slots[None] // inner)
        result = np.where(here, np.minimum(result, rate), result)
        inner = tier.size
    return result


def _between(tier: Tier, slots: np.ndarray, inner: int) -> np.ndarray:
    """Bytes/s between slots on one tier, before slow links."""
    shape = (len(slots), len(slots))
    if tier.kind == "mesh" and inner == 1:
        same = slots[:, None] // tier.size == slots[None] // tier.size
        return np.where(same, tier.usable / max(tier.size - 1, 1), tier.usable)
    if tier.kind != "torus":
        return np.full(shape, tier.usable)
    coordinates = np.stack(np.unravel_index(slots % tier.size, tier.shape), axis=-1)
    ahead = np.abs(coordinates[:, None] - coordinates[None])
    around = np.where(np.array(tier.wrap), np.minimum(ahead, np.array(tier.shape) - ahead), ahead)
    return link_rate(tier) / np.maximum(around.sum(axis=-1), 1)


def sample(cluster: Cluster) -> np.ndarray:
    """At most 64 device ids in slot order that show every tier: whole inner groups first, then spread over outer
    ones.
    """
    slots = np.argsort(cluster.slots)
    if cluster.devices <= _MOST:
        return slots
    inner = max((t.size for t in cluster.tiers if t.size <= _MOST // 4), default=1)
    groups = cluster.slots[slots] // inner
    starts = np.unique(groups)
    wanted: list[int] = []
    for tier in reversed([*cluster.tiers]):
        step = max(tier.size // inner, 1)
        for first in starts[np.unique(starts // step, return_index=True)[1]][:2]:
            wanted += [int(first)] if int(first) not in wanted else []
    wanted += [int(g) for g in starts if int(g) not in wanted]
    return slots[np.isin(groups, wanted[: _MOST // inner])]


def draw(cluster: Cluster, path: str | Path) -> None:
    """Writes a PNG with the tree of tiers and the heat map of bandwidths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    tree, heat = figure.subplots(1, 2, width_ratios=[1.25, 1])
    lost = f", {len(cluster.missing)} slots empty" if cluster.missing else ""
    figure.suptitle(f"{cluster.name}: {cluster.devices:,} x {cluster.device.name}{lost}", fontsize=14)
    _draw_tree(cluster, tree)
    _draw_heat(cluster, figure, heat)
    figure.savefig(path, dpi=110)


def _draw_heat(cluster: Cluster, figure: Any, axes: Any) -> None:
    from matplotlib.colors import LogNorm

    ids = sample(cluster)
    matrix = pair_bandwidth(cluster, ids) / 1e9
    off = matrix[np.isfinite(matrix)]
    if off.size == 0:
        axes.axis("off")
        return
    shown = np.ma.masked_invalid(np.where(np.isfinite(matrix), matrix, np.nan))
    low, high = float(off.min()), float(off.max())
    image = axes.imshow(shown, cmap="viridis", norm=LogNorm(low * 0.9, high * 1.1), interpolation="nearest")
    levels = np.unique(np.round(off, 3))
    bar = figure.colorbar(image, ax=axes, shrink=0.8, label="GB/s per device, one direction, all sending")
    if len(levels) <= 8:
        bar.set_ticks(levels, labels=[f"{v:.3g}" for v in levels])
        bar.minorticks_off()
    step = max(1, len(ids) // 8)
    at = np.arange(0, len(ids), step)
    axes.set_xticks(at, [str(i) for i in ids[at]])
    axes.set_yticks(at, [str(i) for i in ids[at]])
    whole = len(ids) == cluster.devices
    axes.set_title(
        "bandwidth between devices" + ("" if whole else f" ({len(ids)} of {cluster.devices:,} shown)"), fontsize=11
    )
    axes.set_xlabel("device id")
    axes.set_ylabel("device id")


def _draw_tree(cluster: Cluster, axes: Any) -> None:
    """One row a tier, outermost on top, devices at the bottom; of each group only the first is opened."""
    axes.axis("off")
    depth = len(cluster.tiers)
    axes.set_xlim(-0.62, 1.02)
    axes.set_ylim(-0.6, depth + 0.3)
    rates = np.log10([t.usable for t in cluster.tiers])
    low, high, centre = 0.0, 1.0, 0.5
    axes.plot([centre], [depth], "o", color="#333333", markersize=9, zorder=3)
    for level in range(depth - 1, -1, -1):
        tier = cluster.tiers[level]
        count = -(-tier.size // (cluster.tiers[level - 1].size if level else 1))
        width = 1 + 5 * (rates[level] - rates.min()) / (np.ptp(rates) or 1)
        drawn = min(count, _CHILDREN if level else 8)
        places = np.linspace(low, high, drawn + 2)[1:-1] if drawn > 1 else np.array([centre])
        for x in places:
            axes.plot(
                [centre, x], [level + 1, level], color="#4477aa", linewidth=width, solid_capstyle="round", zorder=1
            )
            axes.plot([x], [level], "s" if level == 0 else "o", color="#333333", markersize=8 if level else 7, zorder=3)
        if drawn < count:
            axes.text(places[-1] + 0.035, level, f"... {count} in all", va="center", fontsize=9, color="#555555")
        axes.text(-0.6, level + 0.5, _caption(tier), va="center", fontsize=9.5, linespacing=1.35)
        half = (places[1] - places[0]) / 2 if drawn > 1 else (high - low) / 2
        centre = places[0]
        low, high = (max(0.0, centre - half), centre + half) if level > 1 else (0.0, 1.0) if level == 1 else (low, high)
    axes.text(0.5, -0.35, f"devices ({cluster.device.name})", ha="center", fontsize=10)
    axes.set_title("tiers of links", fontsize=11)


def _caption(tier: Tier) -> str:
    lines = [
        f"{tier.name}: groups of {tier.size:,}",
        f"{pretty(tier.usable, 'B/s')} a device, {pretty(tier.latency, 's')}",
    ]
    if tier.kind == "torus":
        lines.append("torus " + " x ".join(f"{n}{'' if w else ' (open)'}" for n, w in zip(tier.shape, tier.wrap)))
    more = [f"{tier.nic_sharing} share a NIC"] if tier.nic_sharing > 1 else []
    more += [f"oversubscribed {tier.oversubscription:.3g}:1"] if tier.oversubscription > 1 else []
    more += ["reduces in the switch"] if tier.multicast else []
    return "\n".join([*lines, *([", ".join(more)] if more else [])])
