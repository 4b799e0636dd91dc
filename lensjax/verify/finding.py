"""A finding: something in a compiled step that costs and need not, with its line, its price and what to do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lensjax.verify.artifact import Artifact
from lensjax.verify.collectives import Found
from lensjax.verify.hlo import Module
from lensjax.verify.traffic import Traffic

if TYPE_CHECKING:
    from lensjax.topology.cluster import Cluster
    from lensjax.verify.facts import Facts
    from lensjax.verify.prices import Priced
    from lensjax.verify.timeline import Timeline

SEVERITIES = ("error", "warning", "note")

# A part of the whole (of the traffic, the memory, the arithmetic) below which a fault is not worth a word.
SMALL = 0.015

# Bytes whose time is lost in the latency of a collective (5 us at 50 GB/s), whatever their part of the traffic.
LATENT = 2**18


@dataclasses.dataclass(frozen=True)
class Finding:
    """kind: a stable short word. severity: error (does not run, or most is wasted), warning, or note (could be better).
    line: "file.py:12", or "" where no single line is to blame. bytes: what it costs each device per step, on the wire
    or in memory as the message says. hint: what to do.
    """

    kind: str
    severity: str
    line: str
    bytes: float
    message: str
    hint: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """All that is known of a step. Parts that could not be had are None, and the rules that need them stay silent."""

    artifact: Artifact
    module: Module
    found: Found
    traffic: Traffic
    mesh: dict[str, int]
    facts: Facts | None = None
    cluster: Cluster | None = None
    priced: Priced | None = None
    timeline: Timeline | None = None

    @property
    def total_sent(self) -> float:
        """Bytes that a device sends per step."""
        return self.traffic.total

    @property
    def peak(self) -> int:
        return max(self.artifact.memory.peak, 1)


def size(value: float) -> str:
    """Bytes for people: "3.1 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
