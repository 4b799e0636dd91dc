"""A timeline as a picture: one row for each stream, what waits in red."""

from __future__ import annotations

from pathlib import Path

from lensjax.verify.timeline import COMPUTE, Event, Timeline

_LIMIT = 40_000  # rectangles drawn
_COLOURS = {"matmul": "#2f6f9f", "other compute": "#9cc3dd", "hidden": "#7aa874", "exposed": "#c8553d"}


def draw(line: Timeline, path: str | Path, title: str = "", width: float = 12.0) -> None:
    """Writes a PNG (or whatever the path's ending says) of one step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    streams = [COMPUTE, *sorted(s for s in line.busy if s != COMPUTE)]
    figure, axes = pyplot.subplots(figsize=(width, 1.6 + 0.7 * len(streams)), dpi=120, layout="constrained")
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for start, event in line.block.flat(limit=_LIMIT):
        bars.setdefault((streams.index(event.stream), _colour(event)), []).append((start * 1e3, event.seconds * 1e3))
    for (row, colour), spans in bars.items():
        axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=_COLOURS[colour], linewidth=0)
    axes.set_yticks(range(len(streams)), [_label(line, s) for s in streams])
    axes.invert_yaxis()
    axes.set_xlim(0, max(line.step * 1e3, 1e-6))
    axes.set_xlabel("ms")
    axes.set_title(title or f"one step: {line.step * 1e3:.2f} ms")
    axes.spines[["top", "right"]].set_visible(False)
    used = {colour for _, colour in bars}
    handles = [Patch(color=v, label=k) for k, v in _COLOURS.items() if k in used]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=4, frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def _label(line: Timeline, stream: str) -> str:
    share = line.busy.get(stream, 0.0) / line.step if line.step else 0.0
    waits = line.exposed.get(stream, 0.0)
    return f"{stream}\n{share:.0%} busy" + (f", {waits * 1e3:.2f} ms exposed" if waits else "")


def _colour(event: Event) -> str:
    if event.stream == COMPUTE:
        return "matmul" if event.flops else "other compute"
    return "exposed" if event.waited > 0.5 * event.seconds else "hidden"
