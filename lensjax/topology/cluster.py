"""A cluster as data: one device, and the tiers of links that join the devices, innermost and fastest first.

Devices are numbered 0..devices-1 as JAX numbers them. They sit in *slots*: slot s of a cluster belongs to group s //
size of each tier, so a regular cluster needs no table. Damage is an exception to that frame, not another format:
`missing` slots are empty, `slow` links run at a fraction, `others` are slots with another device, and `order` says
which slot each device took where a discovered machine numbers them otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lensjax._errors import ClusterError

KINDS = ("switch", "mesh", "torus")


@dataclasses.dataclass(frozen=True)
class Tier:
    """One level of the link hierarchy.

    `size`: devices inside one group of this tier, cumulative (node 8, rack 64, ...).
    `bandwidth`: bytes/s one device gets in one direction when all devices of the group send at once, before
    oversubscription; over all its links (for a torus: 2 per dimension). `nic_sharing` devices share one NIC, so that
    one device alone may reach `bandwidth * nic_sharing`. `latency`: seconds per hop for a small message.
    `oversubscription`: capacity below over capacity above (1 = full bisection). `multicast`: the switch reduces and
    multicasts (NVLS, SHARP). `takes_cores`: a collective on it occupies compute cores. `full_duplex`: both directions
    at once. `kind`: switch (any pair at full rate), mesh (a link to each peer) or torus (then `shape`, and `wrap` per
    dimension); only the innermost tier may be other than a switch. `sources`: field name -> where the number comes
    from.
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    nic_sharing: int = 1
    full_duplex: bool = True
    multicast: bool = False
    takes_cores: bool = True
    oversubscription: float = 1.0
    kind: str = "switch"
    shape: tuple[int, ...] = ()
    wrap: tuple[bool, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        where = f"tier {self.name!r}"
        if self.size < 1 or self.nic_sharing < 1:
            raise ClusterError(f"{where}: size {self.size} and nic_sharing {self.nic_sharing} must be at least 1")
        numbers = (self.bandwidth, self.latency, self.oversubscription)
        if not (self.bandwidth > 0 and self.latency >= 0 and self.oversubscription >= 1 and max(numbers) < math.inf):
            raise ClusterError(
                f"{where}: bandwidth {self.bandwidth}, latency {self.latency}, oversubscribed {self.oversubscription}",
                hint="bandwidth must be positive, latency at least 0, oversubscription at least 1, all finite",
            )
        if self.kind not in KINDS:
            torus = "; a ring is a torus with one side" if self.kind == "ring" else ""
            raise ClusterError(f"{where}: kind {self.kind!r}", hint=f"one of {', '.join(KINDS)}{torus}")
        if self.kind != "torus" and (self.shape or self.wrap):
            raise ClusterError(
                f"{where}: shape {self.shape} on a {self.kind}", hint="only a torus has a shape and wrap"
            )
        fits = math.prod(self.shape or (0,)) == self.size and len(self.wrap) == len(self.shape)
        if self.kind == "torus" and (not fits or min(self.shape) < 1):
            raise ClusterError(
                f"{where}: a torus of {self.size} with shape {self.shape} and wrap {self.wrap}",
                hint="sides that multiply to its size, and true or false for each: does it close?",
            )

    @property
    def usable(self) -> float:
        """Bytes/s per device and direction after oversubscription."""
        return self.bandwidth / self.oversubscription


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator. Bytes, bytes/s, FLOP/s. `peak`: dtype name -> dense peak; `achievable`: dtype name -> fraction
    of it that a large matmul reaches. `host_bandwidth`: to host memory, one direction, for offload; `host_memory`:
    this device's part of it. `kinds`: what JAX calls it (`device_kind`). `sources`: field name -> where the number
    comes from.
    """

    name: str
    platform: str
    memory: float
    memory_bandwidth: float
    peak: Mapping[str, float] = dataclasses.field(hash=False)
    achievable: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    host_bandwidth: float = 0.0
    host_memory: float = 0.0
    kinds: tuple[str, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        where = f"device {self.name!r}"
        positive = {"memory": self.memory, "memory_bandwidth": self.memory_bandwidth, **self.peak}
        bad = {k: v for k, v in positive.items() if not 0 < v < math.inf}
        bad |= {k: v for k, v in self.achievable.items() if not 0 < v <= 1}
        if bad:
            raise ClusterError(
                f"{where}: {', '.join(f'{k} {v}' for k, v in bad.items())}",
                hint="memory, its bandwidth and peaks are above 0, achievable fractions at most 1",
            )

    def peak_flops(self, dtype: str) -> float:
        """Dense peak FLOP/s for a dtype name; a dtype the device lacks runs at float32's rate (V100 has no
        bfloat16).
        """
        name = "float8" if dtype.startswith("float8") else dtype
        return self.peak.get(name, self.peak["float32"])

    def achievable_flops(self, dtype: str) -> float:
        """What a large matmul reaches: the peak times the measured fraction (bfloat16's where this dtype has none)."""
        name = "float8" if dtype.startswith("float8") else dtype
        return self.peak_flops(name) * self.achievable.get(name, self.achievable.get("bfloat16", 1.0))


@dataclasses.dataclass(frozen=True)
class Slow:
    """Slots whose links on one tier run at `factor` (0 < factor <= 1) of the tier's bandwidth."""

    tier: str
    slots: tuple[int, ...]
    factor: float
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Other:
    """Slots start..stop-1 hold another device than the cluster's (two generations of nodes)."""

    start: int
    stop: int
    device: Device


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices and the tiers that join them. See the module docstring for slots and damage.

    `tiers`: innermost first; each size divides the next, except that the last group of the outermost may be partial;
    the outermost holds every slot. `notes`: what was assumed or fell back to the catalogue, for people.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    missing: tuple[int, ...] = ()
    slow: tuple[Slow, ...] = ()
    others: tuple[Other, ...] = ()
    order: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        from lensjax.topology.check import check

        check(self)

    @property
    def capacity(self) -> int:
        """Number of slots, empty ones included."""
        return self.tiers[-1].size

    @property
    def devices(self) -> int:
        """Number of devices that are there."""
        return self.capacity - len(self.missing)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """int [devices]: the slot of each device id."""
        present = np.delete(np.arange(self.capacity), np.asarray(self.missing, int))
        return present if self.order is None else present[np.asarray(self.order, int)]

    @property
    def regular(self) -> bool:
        """True when nothing is missing, slow or different and every tier's groups are full."""
        full = all(self.capacity % t.size == 0 for t in self.tiers)
        return full and not (self.missing or self.slow or self.others)

    def tier_of(self, ids: Any) -> np.ndarray:
        """Index of the innermost tier that contains all given devices: int [groups, members] -> int [groups].

        A flat [members] gives a scalar array. Raises ClusterError for an id that is no device of this cluster.
        """
        ids = np.asarray(ids)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= self.devices:
            raise ClusterError(f"device ids must lie in 0..{self.devices - 1}; found {ids.tolist()}")
        slots = self.slots[ids]
        low, high = slots.min(axis=-1), slots.max(axis=-1)
        result = np.full(low.shape, len(self.tiers) - 1)
        for index in range(len(self.tiers) - 2, -1, -1):
            size = self.tiers[index].size
            result = np.where(low // size == high // size, index, result)
        return result

    def bandwidth_of(self, tier: int) -> np.ndarray:
        """float [devices]: bytes/s per device and direction on that tier, after oversubscription and slow links."""
        result = np.full(self.devices, self.tiers[tier].usable)
        for slow in self.slow:
            if slow.tier == self.tiers[tier].name:
                result[np.isin(self.slots, slow.slots)] *= slow.factor
        return result

    def device_of(self, device_id: int) -> Device:
        """The device with that id (another than `self.device` only in a mixed cluster)."""
        slot = int(self.slots[device_id])
        return next((o.device for o in self.others if o.start <= slot < o.stop), self.device)

    @staticmethod
    def parse(spec: str | Path | Cluster) -> Cluster:
        """A cluster from "dgx-h100:32" (32 nodes), "tpu-v5p:4x4x8", "cpu:8", "cpu:2x4", or the path of a YAML or
        JSON file.
        """
        from lensjax.topology.catalogue import parse_spec

        return spec if isinstance(spec, Cluster) else parse_spec(spec)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with SI numbers; `from_dict` gives the same cluster back."""
        from lensjax.topology.schema import cluster_to_dict

        return cluster_to_dict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any], where: str = "cluster") -> Cluster:
        from lensjax.topology.schema import cluster_from_dict

        return cluster_from_dict(data, where)

    def to_json(self) -> str:
        from lensjax.topology.schema import dump_json

        return dump_json(self)

    @staticmethod
    def from_json(text: str, where: str = "cluster") -> Cluster:
        from lensjax.topology.schema import load_json

        return load_json(text, where)

    def to_yaml(self) -> str:
        from lensjax.topology.schema import dump_yaml

        return dump_yaml(self)

    @staticmethod
    def from_yaml(text: str, where: str = "cluster") -> Cluster:
        from lensjax.topology.schema import load_yaml

        return load_yaml(text, where)
