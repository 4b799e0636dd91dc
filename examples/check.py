"""Proof that the sharded step computes what one device computes: every step is replayed on one device.

Both sides start each step from the *same* state. Compared are the loss and all gradients. The gradients are read back
from Adam's first moment: both sides share the old one, so (new - b1 * old) / (1 - b1) is the gradient that each side
used. Parameters after Adam are no judge: where a gradient is zero up to rounding, Adam turns the rounding into a full
step of the learning rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

TOLERANCE = 1e-5  # float32: relative for the loss, and for gradients of the largest gradient of all leaves


@dataclasses.dataclass
class Replay:
    """Replays steps `one(state, batch) -> (state, {"loss": ...})` on one device and keeps the largest differences."""

    one: Callable[[Any, Any], tuple[Any, dict[str, Any]]]
    b1: float = 0.9  # of Adam
    losses: list[float] = dataclasses.field(default_factory=list)
    gradients: list[float] = dataclasses.field(default_factory=list)
    worst_leaf: str = ""

    def __post_init__(self):
        self._jitted = jax.jit(self.one)

    def compare(self, before, batch, after, loss: float) -> None:
        """One step, all on the host: the state before it, its batch, and what the sharded step made of them."""
        with jax.default_device(jax.local_devices()[0]):
            expected, metrics = self._jitted(before, batch)
        wanted = float(metrics["loss"])
        self.losses.append(abs(loss - wanted) / abs(wanted))
        old, got, want = (_moments(state) for state in (before, after, jax.device_get(expected)))
        largest = max(np.abs(want[k] - self.b1 * old[k]).max() for k in want)
        difference = {k: np.abs(got[k] - want[k]).max() / largest for k in want}
        worst = max(difference, key=difference.__getitem__)
        if difference[worst] > max(self.gradients, default=-1.0):
            self.worst_leaf = worst
        self.gradients.append(float(difference[worst]))

    @property
    def passed(self) -> bool:
        # Not `any(x > TOLERANCE)`: that would let NaN pass.
        return bool(self.losses) and all(x <= TOLERANCE for x in self.losses + self.gradients)

    def report(self) -> str:
        if not self.losses:
            return "check: no step was compared"
        verdict = "equal to one device" if self.passed else "NOT equal to one device"
        return (
            f"check of {len(self.losses)} steps, both sides from the same state: {verdict} (tolerance {TOLERANCE:g})\n"
            f"  loss       largest relative difference {max(self.losses):.2e}  (step {np.argmax(self.losses) + 1})\n"
            f"  gradients  largest difference {max(self.gradients):.2e} of the largest gradient"
            f"  (step {np.argmax(self.gradients) + 1}, {self.worst_leaf})"
            + ("\n  one device was compared with itself: there was no other" if jax.device_count() == 1 else "")
        )


def _moments(state) -> dict[str, np.ndarray]:
    """Adam's first moments, wherever they are in the state: the leaves below something called `mu`."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        if "mu" in names:
            found["/".join(names[names.index("mu") + 1 :])] = np.asarray(leaf)
    if not found:
        raise ValueError("no first moments of Adam in this state: the check needs an optimizer of that family")
    return found
