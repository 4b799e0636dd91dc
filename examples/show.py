"""What an example shows: a live progress bar while it trains, and a picture of the loss at the end."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def console(shown: bool) -> Console:
    """Where an example prints; every process but one is quiet."""
    return Console(quiet=not shown, highlight=False, soft_wrap=True)


def bytes_text(n: float) -> str:
    """12_300_000 -> '12.3 MB' (decimal, as link speeds are)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


class Training:
    """A progress bar with loss, tokens (or examples) a second and the bytes each device sends over each tier per step.

        with Training(console, steps, "tokens", per_step, tiers) as bar:
            bar.step(loss)

    Where the output is no terminal it prints ten plain lines instead.
    """

    def __init__(self, out: Console, steps: int, unit: str, per_step: int, tiers: dict[str, float]):
        self.unit, self.losses = unit, []
        self._out, self._steps, self._per_step, self._seconds = out, steps, per_step, []
        self._wire = ", ".join(f"{name} {bytes_text(n)}" for name, n in tiers.items()) or "nothing"
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[rate]}} {unit}/s  sent {self._wire}"),
            TimeRemainingColumn(compact=True),
            console=out,
            disable=not out.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, loss="-", rate="-")

    def __enter__(self):
        self._progress.start()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_):
        self._progress.stop()

    def skip_time(self) -> None:
        """Time since the last call was not training (a check, for example)."""
        self._last = time.perf_counter()

    def step(self, loss: float) -> None:
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._last = now
        self.losses.append(loss)
        self._progress.update(self._task, advance=1, loss=f"{loss:.3f}", rate=f"{self.rate:,.0f}")
        done = len(self.losses)
        if not self._out.is_terminal and (done % max(1, self._steps // 10) == 0 or done == 1):  # a log file
            self._out.print(
                f"step {done}/{self._steps}  loss {loss:.3f}  {self.rate:,.0f} {self.unit}/s  "
                f"sent per step and device: {self._wire}"
            )

    @property
    def rate(self) -> float:
        """Units a second over the last steps; the first step compiles and does not count once there are others."""
        recent = self._seconds[1:][-20:] or self._seconds
        return self._per_step / float(np.median(recent))


def picture(path: Path, losses: list[float], title: str, unit: str, valid: float | None = None) -> None:
    """Writes the loss curve: every step, the mean of the last ten, and the loss on held-out data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = np.arange(1, len(losses) + 1)
    mean = [np.mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="0.75", linewidth=1, label="each step")
    axes.plot(steps, mean, color="tab:blue", linewidth=2, label="mean of the last ten")
    if valid is not None:
        axes.axhline(valid, color="tab:red", linestyle="--", linewidth=1, label=f"held-out text: {valid:.2f}")
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title=title, xlim=(1, max(2, len(losses))))
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
