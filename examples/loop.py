"""What the training examples share: options, the loop with a live bar and the replay on one device, the end."""

from __future__ import annotations

import argparse
from pathlib import Path

import machine
import numpy as np
import show
from check import Replay


def options(doc: str, steps: int) -> argparse.ArgumentParser:
    """The options of every training example; `doc` is the example's own, `steps` its default."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=_positive, default=steps, metavar="N", help=f"training steps (default {steps})")
    parser.add_argument("--check", action="store_true", help="replay every step on one device; status 1 if they differ")
    parser.add_argument("--plan", metavar="PLAN", help="a preset such as dp, fsdp or dp=2,tp=4, or a plan file")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where the picture goes")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def bar(out, step, steps: int, unit: str, per_step: int) -> show.Training:
    """The progress of `steps` steps of `per_step` units each, with the bytes that the step's plan sends."""
    return show.Training(out, steps, unit, per_step, step.plan.predicted.tiers if step.plan else {})


def train(step, state, batch_of, steps: int, bar: show.Training, replay: Replay | None = None):
    """Runs `state, metrics = step(state, batch_of(i))` for i < steps; returns the last state.

    The losses are in `bar.losses`, the differences in `replay`.
    Ctrl-C ends the training early; what was trained so far is returned.
    """
    with bar:
        try:
            for i in range(steps):
                batch = batch_of(i)
                before = machine.to_host(state) if replay else None
                bar.skip_time()
                state, metrics = step(state, batch)
                bar.step(float(metrics["loss"]))
                if replay:
                    replay.compare(before, machine.to_host(batch), machine.to_host(state), bar.losses[-1])
        except KeyboardInterrupt:
            if not bar.losses:
                raise
    return state


def summary(bar: show.Training, unit: str) -> str:
    """One line: how long, how fast, how well."""
    return (
        f"trained {len(bar.losses)} steps at {bar.rate:,.0f} {bar.unit}/s; "
        f"mean loss of the last ten {np.mean(bar.losses[-10:]):.3f} {unit}"
    )


def finish(out, path: Path, bar: show.Training, title: str, unit: str, valid: float | None = None) -> None:
    """Draws the loss curve and says where it is."""
    show.picture(path, bar.losses, title, unit, valid)
    out.print(f"loss curve: {path}")


def verdict(out, replay: Replay | None) -> int:
    """Prints what the replay found; the example's exit status."""
    if replay is None:
        return 0
    out.print("\n" + replay.report())
    return 0 if replay.passed else 1
