"""How far calls of a step may run ahead of the devices.

A call returns before its step has run; JAX queues the next ones. XLA:CPU takes a thread of a pool for every device of
a queued step, and lets a device have 32 steps waiting: what comes then waits in its thread. Where there are fewer cores
than devices the pool has one thread for each device, so when the script is that far ahead, threads that wait for one
device may be those that another one needs to go on, and all wait for ever (XLA ends the process after 40 s; seen on jax
0.10.2 with eight emulated devices on two cores). Accelerators have queues of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

CALLS = 8  # a quarter of what XLA lets wait: companions and a script's own functions wait with them


@dataclasses.dataclass
class Ahead:
    """Waits for every `CALLS`-th result of an executable, where its devices are several emulated ones."""

    bounded: bool
    calls: int = 0

    def __call__(self, result: Any) -> Any:
        if self.bounded:
            self.calls += 1
            if self.calls % CALLS == 0:
                jax.block_until_ready(result)
        return result


def ahead(mesh: Any) -> Ahead:
    """For an executable on this mesh of real devices."""
    return Ahead(mesh.size > 1 and mesh.devices.flat[0].platform == "cpu")
