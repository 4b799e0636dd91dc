"""The training loop of the examples: batches in, a live bar, and the replay on one device when asked for."""

from __future__ import annotations

import machine
import numpy as np
import show
from check import Replay


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
