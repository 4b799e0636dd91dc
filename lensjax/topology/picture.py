"""A cluster as a picture: the tree of its tiers beside the bandwidth between its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lensjax.topology.cluster import Cluster, Tier
from lensjax.topology.torus import link_rate
from lensjax.topology.units import pretty

_MOST = 64  # devices a side of the heat map
_INK, _LINE = "#333333", "#4477aa"
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
    inner = max((t.size for t in cluster.tiers if t.size <= _MOST // 4), default=_MOST // 4)
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
    names = " and ".join(dict.fromkeys([cluster.device.name, *(o.device.name for o in cluster.others)]))
    lost = f", {len(cluster.missing)} empty slot{'s' * (len(cluster.missing) > 1)}" if cluster.missing else ""
    figure.suptitle(f"{cluster.name}: {cluster.devices:,} x {names}{lost}", fontsize=14)
    _draw_tree(cluster, tree)
    _draw_heat(cluster, figure, heat)
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.15)


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
    ticks = levels if len(levels) <= 8 else np.geomspace(low, high, 6)
    bar.set_ticks(list(ticks), labels=[f"{v:.3g}" for v in ticks])
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
    centre = 0.5
    axes.plot([centre], [depth], "o", color=_INK, markersize=9, zorder=3)
    for level in range(depth - 1, -1, -1):
        tier = cluster.tiers[level]
        axes.text(-0.6, level + 0.5, _caption(tier), va="center", fontsize=9.5, linespacing=1.35)
        width = 1 + 5 * (rates[level] - rates.min()) / (np.ptp(rates) or 1)
        if level == 0 and tier.kind == "torus":
            _draw_torus(tier, axes, centre)
        else:
            count = -(-tier.size // (cluster.tiers[level - 1].size if level else 1))
            centre = _draw_children(axes, level, centre, count, width)
    axes.text(0.5, -0.45, f"devices ({cluster.device.name})", ha="center", fontsize=10)
    axes.set_title("tiers of links", fontsize=11)


def _draw_children(axes: Any, level: int, centre: float, count: int, width: float) -> float:
    """The lines from a group to the groups (or devices) in it; returns where the first of them is."""
    drawn = min(count, _CHILDREN if level else 8)
    places = np.linspace(0.0, 1.0, drawn + 2)[1:-1] if drawn > 1 else np.array([centre])
    for x in places:
        axes.plot([centre, x], [level + 1, level], color=_LINE, linewidth=width, solid_capstyle="round", zorder=1)
        axes.plot([x], [level], "o" if level else "s", color=_INK, markersize=8 if level else 7, zorder=3)
    if drawn < count:
        axes.text(places[-1] + 0.035, level, f"... {count} in all", va="center", fontsize=9, color="#555555")
    return float(places[0])


def _draw_torus(tier: Tier, axes: Any, centre: float) -> None:
    """The last two sides of the torus as a grid (at most 8 x 8 of it), hung under its group; stubs are wrap links."""
    sides = (*(1,) * (2 - len(tier.shape)), *tier.shape)[-2:]
    wraps = (*(False,) * (2 - len(tier.shape)), *tier.wrap)[-2:]
    rows, columns = (min(n, 8) for n in sides)
    x, y = np.linspace(0.12, 0.88, columns), np.linspace(0.62, -0.2, rows)
    axes.plot([centre, 0.5], [1, 0.72], color=_LINE, linewidth=1, linestyle=":", zorder=1)
    axes.hlines(y, x[0] - 0.04 * wraps[1], x[-1] + 0.04 * wraps[1], color=_LINE, linewidth=2, zorder=1)
    axes.vlines(x, y[-1] - 0.05 * wraps[0], y[0] + 0.05 * wraps[0], color=_LINE, linewidth=2, zorder=1)
    axes.plot(np.repeat(x, rows), np.tile(y, columns), "s", color=_INK, markersize=6, zorder=3)
    more = f"{sides[0]} x {sides[1]}" + (
        f", {tier.size // (sides[0] * sides[1])} layers" if len(tier.shape) > 2 else ""
    )
    axes.text(0.97, 0.2, more, fontsize=9, color="#555555", rotation=90, va="center")


def _caption(tier: Tier) -> str:
    lines = [
        f"{tier.name}: groups of {tier.size:,}",
        f"{pretty(tier.usable, 'B/s')} a device, {pretty(tier.latency, 's')}",
    ]
    if tier.kind == "torus":
        lines.append(torus_text(tier))
    more = [f"{tier.nic_sharing} share a NIC or link"] if tier.nic_sharing > 1 else []
    more += [f"oversubscribed {tier.oversubscription:.3g}:1"] if tier.oversubscription > 1 else []
    more += ["reduces in the switch"] if tier.multicast else []
    return "\n".join([*lines, *([", ".join(more)] if more else [])])


def torus_text(tier: Tier) -> str:
    """ "torus 16x16", "mesh 4x4" (no side closes), "torus 8x16, side 8 open"."""
    shape = "x".join(map(str, tier.shape))
    sides = [n for n, w in zip(tier.shape, tier.wrap) if not w and n > 1]
    if not any(tier.wrap):
        return f"mesh {shape}, no wrap links"
    return f"torus {shape}" + (
        f", side{'s' if len(sides) > 1 else ''} {', '.join(map(str, sides))} open" if sides else ""
    )
