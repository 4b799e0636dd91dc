"""What holds the memory over a step, as a picture: stacked areas, one for each class."""

from __future__ import annotations

from pathlib import Path

from lensjax.cost.composition import Composition
from lensjax.report.units import size

# Blues for what is always there, warm colours for what comes and goes.
_COLOURS = {"parameter": "#1f4e79", "optimizer": "#2f6f9f", "results": "#6a8caf", "activations": "#e0a458",
            "gradients": "#c8553d", "communication": "#7aa874", "temporaries": "#b9a7c9"}  # fmt: skip
_REST = "#c9d1d9"
_SMALL = 1e-3  # part of the peak below which a class goes to "other"


def draw(found: Composition, path: str | Path, title: str = "", limit: float | None = None) -> None:
    """Writes a PNG (or whatever the path's ending says). `limit`: bytes per device that there are, drawn where the
    picture reaches half as far."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 5), dpi=120, layout="constrained")
    shown = {k: v for k, v in found.classes.items() if v.max() >= _SMALL * found.peak}
    rest = sum(v for k, v in found.classes.items() if k not in shown)
    scale, unit = _unit(found.peak)
    at_peak = found.peak_by
    labels = [f"{k} ({size(at_peak.get(k, 0.0))})" for k in shown]
    moments = range(found.moments)
    colours = [_COLOURS.get(k, _REST) for k in shown]
    axes.stackplot(moments, *[v / scale for v in shown.values()], labels=labels, colors=colours, step="post")
    axes.axhline(found.peak / scale, color="black", linewidth=0.8, linestyle="--", label=f"peak ({size(found.peak)})")
    axes.axvline(found.at, color="black", linewidth=0.5, linestyle=":")
    if limit is not None and limit <= 2 * found.peak:
        axes.axhline(limit / scale, color="#a00000", linewidth=0.8, label=f"limit ({size(limit)})")
    axes.set_xlim(0, max(found.moments - 1, 1))
    axes.set_ylim(0)
    axes.set_xlabel("planned order of the step (a loop's body written out once); dotted: the peak")
    axes.set_ylabel(f"{unit} per device")
    lost = at_peak.get("fragments", 0.0)
    small = float(rest[found.at]) if not isinstance(rest, int) else 0.0
    notes = [
        f"{size(x)} {what}"
        for x, what in ((lost, "lost between buffers"), (small, "of other things"))
        if x >= _SMALL * found.peak
    ]
    axes.set_title(title + (f"  (at the peak also {' and '.join(notes)})" if notes else ""), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


def _unit(most: float) -> tuple[float, str]:
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 1024**power:
            return 1024.0**power, name
    return 1.0, "B"
