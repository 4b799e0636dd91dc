"""From the words of a published table to a machine: "AWS 2x p4de.24xlarge", "H100 8x400G nodes", "TPU v6e-256 slice".

Words give the accelerator, the devices per node and the network; what they leave open is the catalogue's machine with
that accelerator. A text that names nothing known is an error, not a guess.
"""

from __future__ import annotations

import dataclasses
import re

from lensjax._errors import ClusterError
from lensjax.topology.cluster import Cluster, Device, Tier

# First match wins: cloud machines before accelerators, longer names before shorter ones.
_MACHINES = (
    (r"\bp4de\b", "p4de"),
    (r"\bp4d\b", "p4d"),
    (r"\bp6-b200\b", "p6-b200"),
    (r"\bp5(en|e)?\b", "p5"),
    (r"\bp3\b|p3\.16xlarge", "p3.16xlarge"),
    (r"a3[- ]?ultra", "a3-ultra"),
    (r"a3[- ]?mega", "a3-mega"),
    (r"a3[- ]?high", "a3-high"),
    (r"GB[23]00|NVL72|A4X", "gb200-nvl72"),
    (r"B[23]00", "dgx-b200"),
    (r"H200", "dgx-h200"),
    (r"H[18]00|\bHopper\b", "dgx-h100"),
    (r"A[18]00.{0,6}40", "dgx-a100-40"),
    (r"A[18]00", "dgx-a100-80"),
    (r"V100|DGX-1\b", "dgx1-v100"),
    (r"MI3[0-9]{2}", "mi300x"),
    (r"TPU ?v6e|Trillium", "tpu-v6e"),
    (r"TPU ?v5e|v5 ?lite", "tpu-v5e"),
    (r"TPU ?v5p", "tpu-v5p"),
    (r"TPU ?v4", "tpu-v4"),
)
# PCI express cards: bytes/s each way per card. Source: PCI-SIG rates x16 after encoding, generation of each card's
# datasheet.
_CARDS = (
    (r"T4\b|V100.{0,8}PCIe|P100|2080", 15.75e9),
    (r"L40|L4\b|A10\b|A10G|A40|A6000|[34]090|A30", 31.5e9),
    (r"5090|RTX PRO 6000", 63e9),
)


def describe(system: str, scope: str, devices: int, notes: str = "") -> Cluster:
    """The cluster behind a row: `system` text, scope "intra" or "inter", and how many devices took part."""
    if re.search(r"MI2[0-9]{2}", system):
        return _mi200(system)
    for pattern, rate in _CARDS:
        if re.search(pattern, system) and not re.search(r"SXM", system):
            return _cards(system, rate, devices, scope)
    name = next((name for pattern, name in _MACHINES if re.search(pattern, system, re.IGNORECASE)), None)
    if name is None:
        raise ClusterError(
            f"no known machine in {system!r}", hint="name an accelerator (A100, H100, v5e, ...) or pass --cluster"
        )
    if name.startswith("tpu"):
        return Cluster.parse(f"{name}:{devices}")
    whole = Cluster.parse(name).tiers[0].size
    small = re.search(r"\b([1-7])[- ](?:GPU|card)s?\b|\b([1-7]) GPUs?(?: per |/)node", system)
    size = min(int(small[1] or small[2]), whole) if small and not name.startswith("gb200") else whole
    units = max(-(-devices // size), 1)
    if scope != "intra":
        noted = re.search(r"\b(\d+) ?node", notes) or re.search(r"\b(\d+)x p\d", system)
        units = max(int(noted[1]) if noted else units, 2)
    cluster = Cluster.parse(f"{name}:{units}" if size == whole else f"{name}:{units}x{size}")
    return cluster if scope == "intra" else _network(cluster, system)


def _network(cluster: Cluster, system: str) -> Cluster:
    """The catalogue's network, unless the text gives another one."""
    inner = cluster.tiers[0].size
    if "Galvatron" in system:
        # "~100 Gb/s per node" in its text is a guess that its own rows refute: one pair of GPUs gets 8.1 GB/s across
        # nodes, two pairs 16.2, eight 44.7, so each GPU has a NIC of 100 Gb/s.
        system = "8x100G"
    nics = re.search(r"(\d+) ?x ?(\d+) ?G(?:b|bit|bps)?\b(?!B)", system)
    per_node = re.search(r"(?<![x\d])(\d+) ?Gb/s[^,)]*per node", system)
    per_device = re.search(r"(?<![x\d])(\d+) ?Gb/s[^,)]*per (?:GPU|device|chip|accelerator)", system)
    tier = cluster.tiers[1]
    if nics:
        count, rate = int(nics[1]), float(nics[2]) * 1e9 / 8
        tier = dataclasses.replace(tier, bandwidth=count * rate / inner, nic_sharing=max(inner // count, 1))
    elif per_node and "EFA" not in system:
        tier = dataclasses.replace(tier, bandwidth=float(per_node[1]) * 1e9 / 8 / inner, nic_sharing=inner)
    elif per_device:
        tier = dataclasses.replace(tier, bandwidth=float(per_device[1]) * 1e9 / 8, nic_sharing=1)
    else:
        return cluster
    tier = dataclasses.replace(tier, sources={**tier.sources, "bandwidth": f"system text {system!r}"})
    return dataclasses.replace(cluster, tiers=(cluster.tiers[0], tier, *cluster.tiers[2:]))


def _mi200(system: str) -> Cluster:
    # AMD CDNA2 white paper: Infinity Fabric links of 50 GB/s each way between GCDs; here one to each of the 15 peers,
    # since how an 8-card node wires them is not published. What a subset's rings really get is fitted (calibrate:
    # subsets).
    fabric = Tier(
        "xgmi", 16, 15 * 50e9, 2.2e-6, kind="mesh", sources={"bandwidth": "AMD CDNA2 white paper, 50 GB/s a link"}
    )
    device = Device("MI250-GCD", "rocm", 64 * 2**30, 1.6e12, {"float32": 23.9e12, "bfloat16": 191.5e12})
    return Cluster("mi200-node", device, (fabric,), notes=("wiring unknown: a link to each peer assumed",))


def _cards(system: str, rate: float, devices: int, scope: str) -> Cluster:
    node = devices if scope == "intra" else max(devices // 2, 1)
    tiers = [Tier("pcie", max(node, 2), rate, 2.5e-6, sources={"bandwidth": "PCI express x16, datasheet of the card"})]
    if scope != "intra":
        tiers.append(
            Tier(
                "network",
                max(devices, 4),
                100e9 / 8 / 8,
                4e-6,
                nic_sharing=8,
                sources={"bandwidth": "assumed 100 Gb/s a node"},
            )
        )
    device = Device(system[:40], "cuda", 16 * 2**30, 3e11, {"float32": 1e13})
    return Cluster("pcie-node", device, tuple(tiers))
