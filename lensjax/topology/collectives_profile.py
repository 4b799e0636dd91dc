"""What a communication library makes of a link: protocols, efficiencies and fixed costs, as data.

A tier says what the hardware offers (bytes/s, seconds per hop); a profile says what NCCL, RCCL, a TPU's ICI or gloo get
out of it. A call costs, for the cheapest of the library's algorithms and protocols,

    launch + base[p] + sum over tiers (hops * latency * hop[p]) + bytes on the wire / (bandwidth * efficiency *
    fraction[p]).

The protocols are lines in the bytes, so their lower envelope is the size-dependent efficiency that two constants cannot
give: small messages go by the quick, thin protocol, large ones by the slow, fat one, and the switch points are where
lines cross.
"""

from __future__ import annotations

import dataclasses
import functools

from lensjax.topology.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One way to move a message. `base`: seconds per call; `hop_inner`, `hop_outer`: multiples of a tier's latency per
    hop (on the innermost tier, on the others); `fraction`: of the bandwidth that it can use.
    """

    name: str
    base: float
    hop_inner: float
    hop_outer: float
    fraction: float


# NCCL src/graph/tuning.cc (2.19 and later): baseLat ring {6.6, 14, 8.4} us; hwLat ring {LL, LL128, Simple} NVLink {0.6,
# 1.9, 3.4}, network {2.7, 4.0, 14} us, here over LL128's, which is what the catalogue gives as a tier's latency; LL
# carries 4 bytes of data in 8 and syncs per line (busBw / 4 to / 2 there, fitted here), LL128 120 of 128 bytes (0.92).
NCCL_PROTOCOLS = (
    Protocol("LL", 6.6e-6, 0.6 / 1.9, 2.7 / 4.0, 0.25),
    Protocol("LL128", 14e-6, 1.0, 1.0, 0.92),
    Protocol("Simple", 8.4e-6, 3.4 / 1.9, 14.0 / 4.0, 1.0),
)
PLAIN = (Protocol("plain", 0.0, 1.0, 1.0, 1.0),)


@dataclasses.dataclass(frozen=True)
class Profile:
    """How one library performs on one kind of machine. Times in seconds; efficiencies are fractions of the tier's
    bandwidth.

    `launch`, `launch_outer`: per call inside the innermost tier, and added by leaving it. `hop`, `hop_outer`: multiples
    of the tiers' latencies. `ring`, `direct`: efficiency of rings, and of direct exchanges (all-to-all, permute), on
    the innermost tier; `ring_outer`, `direct_outer` on the others. `multicast`: the rate of an in-switch all-reduce
    over the link's, `multicast_base` its fixed cost. `peer`: seconds per peer of an all-to-all, `direct_base` its fixed
    cost. `aware_trees`: the library takes trees by what really crosses (a tuner plug-in), not by its built-in model.
    `rendezvous`: inside the innermost tier members meet once and copy from each other's memory (XLA's CPU collectives
    of one process), so that its latency counts once a call.
    """

    name: str
    protocols: tuple[Protocol, ...]
    launch: float = 0.0
    launch_outer: float = 0.0
    hop: float = 1.0
    hop_outer: float = 1.0
    ring: float = 1.0
    ring_outer: float = 1.0
    direct: float = 1.0
    direct_outer: float = 1.0
    direct_base: float = 0.0
    multicast: float = 1.0
    multicast_base: float = 0.0
    peer: float = 0.0
    aware_trees: bool = False
    rendezvous: bool = False
    source: str = ""


def family_of(cluster: Cluster) -> str:
    """The kind of machine inside the innermost tier: an accelerator generation, or the library where that decides."""
    device = cluster.device
    if device.platform in ("cpu", "tpu"):
        return device.platform
    if device.platform == "rocm":
        return "cdna"
    for family, names in {"volta": ("V100",), "hopper": ("H100", "H200"), "blackwell": ("B200", "B300", "GB")}.items():
        if device.name.startswith(names):
            return family
    return "ampere"


def outer_family_of(cluster: Cluster) -> str:
    """The kind of network outside it: EFA comes with a tuner of its own (aws-ofi-nccl), host networks for cpu and
    tpu.
    """
    if cluster.device.platform in ("cpu", "tpu"):
        return cluster.device.platform
    return "efa" if any(t.name == "efa" for t in cluster.tiers[1:]) else "rdma"


def profile_of(cluster: Cluster) -> Profile:
    """The profile of the library that JAX uses on this cluster's devices, fitted to published measurements where there
    are.
    """
    return _shipped(family_of(cluster), outer_family_of(cluster))


@functools.cache
def _shipped(inner: str, outer: str) -> Profile:
    from lensjax.topology.calibrate import shipped

    return shipped().profile(inner, outer)
