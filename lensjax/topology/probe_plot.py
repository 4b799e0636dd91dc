"""Bandwidth by size, measured and fitted: a PNG, and a plot in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives_table import bus_factor
from lensjax.topology.probe import Level, Point
from lensjax.topology.probe_fit import predict

_HEIGHT, _MARKS = 12, "o+x*#"


def _series(points: Sequence[Point], op: str) -> dict[str, list[Point]]:
    names = dict.fromkeys(p.tier for p in points)
    return {
        n: sorted((p for p in points if p.tier == n and p.op == op and not p.alone), key=lambda p: p.bytes)
        for n in names
    }


def _rate(point: Point, seconds: float) -> float:
    """Bus bandwidth in bytes/s."""
    return bus_factor(point.op, point.devices) * point.bytes / seconds


def terminal_plot(cluster: Cluster, found: Sequence[Level], points: Sequence[Point], op: str = "all_reduce") -> str:
    """Bus bandwidth against bytes, both logarithmic; one mark a tier where measured, a dot where the fit says."""
    series = _series(points, op)
    sizes = sorted({p.bytes for s in series.values() for p in s})
    measured = [_rate(p, p.seconds) for s in series.values() for p in s]
    low, high = np.log10(min(measured)), np.log10(max(measured))
    column = {size: 4 * i for i, size in enumerate(sizes)}
    grid = [[" "] * (4 * len(sizes)) for _ in range(_HEIGHT)]

    def put(size: float, rate: float, mark: str) -> None:
        row = round((np.log10(rate) - low) / max(high - low, 1e-9) * (_HEIGHT - 1))
        if 0 <= row < _HEIGHT and (mark != "." or grid[_HEIGHT - 1 - row][column[size]] == " "):
            grid[_HEIGHT - 1 - row][column[size]] = mark

    levels = {level.name: level for level in found}
    for (name, line), mark in zip(series.items(), _MARKS):
        for p in line:
            put(p.bytes, _rate(p, p.seconds), mark)
            put(p.bytes, _rate(p, predict(cluster, levels[name], p)), ".")
    ticks = [f"{_short(10 ** (high - (high - low) * i / (_HEIGHT - 1))):>8}" for i in range(_HEIGHT)]
    body = [f"{tick} | {''.join(row)}" for tick, row in zip(ticks, grid)]
    axis = " " * 8 + " +-" + "-" * (4 * len(sizes))
    labels = " " * 11 + "".join(f"{_short(s):<8}" for s in sizes[::2])
    legend = ", ".join(f"{mark} {name}" for name, mark in zip(series, _MARKS))
    return "\n".join([f"{op}: bus bandwidth (B/s) by bytes; {legend}, . fitted", *body, axis, labels])


def _short(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def plot_png(cluster: Cluster, found: Sequence[Level], points: Sequence[Point], path: str | Path) -> None:
    """Writes the picture: one panel a tier, measured marks and fitted lines, one colour an operation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(found), 4.2), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for panel, level in zip(panels, found):
        tier = next(t for t in cluster.tiers if t.name == level.name)
        for i, op in enumerate(dict.fromkeys(p.op for p in points)):
            line = _series(points, op)[level.name]
            sizes = [p.bytes for p in line]
            panel.plot(sizes, [_rate(p, p.seconds) for p in line], "o", color=f"C{i}", label=op.replace("_", "-"))
            panel.plot(sizes, [_rate(p, predict(cluster, level, p)) for p in line], "-", color=f"C{i}", alpha=0.7)
        panel.set(xscale="log", yscale="log", xlabel="payload, bytes", ylabel="bus bandwidth, bytes/s")
        panel.set_title(f"{level.name}: {_short(tier.bandwidth)}B/s per device, {tier.latency * 1e6:.3g} us a hop")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(str(path), dpi=120)
