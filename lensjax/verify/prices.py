"""Collectives of a compiled step, priced and measured by the topology: one place where HLO's conventions meet its own.

HLO counts what one device puts in; the topology's price takes the full payload of one group, as nccl-tests does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lensjax.topology.collectives import collective_time, span, wire_bytes
from lensjax.verify.collectives import Collective
from lensjax.verify.timeline import Price

if TYPE_CHECKING:
    from lensjax.topology.cluster import Cluster

OPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}


def full_payload(c: Collective) -> float:
    """Bytes of a collective in the convention of nccl-tests: the gathered array, else what one device puts in."""
    return float(c.payload * c.members if c.kind == "all-gather" else c.payload)


class Priced:
    """Seconds and bytes of collectives on a cluster; `order`: device id of each mesh position. Remembers groups."""

    def __init__(self, cluster: Cluster, devices: int, order: Sequence[int] | None = None):
        self.cluster = cluster
        self.ids = np.arange(devices) if order is None else np.asarray(order, int)
        self._spans: dict[Any, Any] = {}

    def _groups(self, c: Collective) -> Any:
        key = (c.kind == "collective-permute", c.groups.shape, c.groups.tobytes())
        if key not in self._spans:
            ids = self.ids[c.groups]
            # A permute keeps its pairs, without what stays on its device; everything else is analysed once.
            self._spans[key] = ids[ids[:, 0] != ids[:, 1]] if key[0] else span(self.cluster, ids)
        return self._spans[key]

    def seconds(self, c: Collective) -> float:
        """Seconds of one run."""
        if self._alone(c):
            return 0.0
        return float(collective_time(self.cluster, OPS[c.kind], self._groups(c), full_payload(c)))

    def bytes(self, c: Collective) -> dict[str, float]:
        """Tier -> bytes that a device sends in one run, ring algorithm; only tiers that the groups use."""
        if self._alone(c):
            return {}
        return wire_bytes(self.cluster, OPS[c.kind], self._groups(c), full_payload(c))

    def _alone(self, c: Collective) -> bool:
        if c.kind == "collective-permute":
            return not (c.groups[:, 0] != c.groups[:, 1]).any()
        return c.members < 2

    def price(self) -> Price:
        """For `timeline`: seconds and tiers, innermost first."""
        order = {t.name: i for i, t in enumerate(self.cluster.tiers)}

        def one(c: Collective) -> tuple[float, tuple[str, ...]]:
            tiers = sorted(self.bytes(c), key=order.__getitem__)
            return self.seconds(c), tuple(tiers)

        return one
