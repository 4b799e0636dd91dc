"""The algorithms as formulas: hops per tier, and wire time per tier, of each way to carry out a collective.

S bytes of payload (nccl-tests' size), n members, `c[t]` tier-(t-1) units touched (c[0] = n), E[t] bytes/s at which the
group leaves one such unit. M = 2 for an all-reduce (it is a reduce-scatter and an all-gather), 1 for each half.

| algorithm | hops on tier t | wire time on tier t |
|---|---|---|
| ring | M (c[t] - c[t+1]) | M (n-1)/n S / E[t] |
| tree | M (f-1) inside, M log2 f outside | M S / E; outside M (c-1)/c S / E where `aware` |
| multicast | M inside, as the aware tree outside | S / E inside: the switch adds and copies |
| hierarchical | M (f-1), or M log2 f outside | M (f-1)/f S / E[t] |
| direct | 1 | (what members elsewhere own) / E |
| pipeline | c[t] - c[t+1] | S / E[t] |

Sources. ring: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009); one ring enters and leaves each unit once.
tree: Sanders, Speck and Traeff, Parallel Computing 35 (2009); NCCL chains the devices of a node and has double trees
across, PAT for the halves. multicast: NVLS (nccl-tests#272), SHARP (Graham et al., COMHPC 2016). hierarchical: Cho et
al., BlueConnect, SysML 2019.

f = c[t] / c[t+1] is the fan-out of tier t. Wire times on different tiers overlap (the slowest counts); the stages of
the hierarchy are calls of their own and overlap as far as the payload is cut in m chunks: max + rest / m, at m times
the latency; the best m of CHUNKS counts, and the better of ring and tree outside the node.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives_profile import Profile, Protocol
from lensjax.topology.collectives_span import Span, hop_rates

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "broadcast")
MENU = {
    "all_reduce": ("ring", "tree", "multicast"),
    "reduce_scatter": ("ring", "tree", "multicast"),
    "all_gather": ("ring", "tree", "multicast"),
    "all_to_all": ("direct",),
    "permute": ("direct",),
    "broadcast": ("pipeline",),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
    """One algorithm on `k` ways in which groups lie, before a library's efficiencies.

    `wait_inner`, `wait_outer`: float [k], seconds of latency (hops times the tiers' latencies) on the innermost tier
    and outside; `once`: float [k], the innermost tier's latency counted once where it is used; `inner`, `outer`: float
    [k], seconds per byte of payload at the links' own rate; `wire`: float [k, tiers], bytes leaving a unit per byte of
    payload; `peers`: float [k], messages that each member sends to others one by one; `calls`: library calls; `kind`:
    which efficiency applies (ring, direct or multicast); `chunks`: the tiers work one after the other, on the payload
    in that many pieces (0: in one stream through all of them).
    """

    wait_inner: np.ndarray
    once: np.ndarray
    wait_outer: np.ndarray
    inner: np.ndarray
    outer: np.ndarray
    wire: np.ndarray
    peers: np.ndarray
    calls: int = 1
    kind: str = "ring"
    chunks: int = 0


def line(terms: Terms, profile: Profile, protocol: Protocol) -> tuple[np.ndarray, np.ndarray]:
    """(seconds at size 0, seconds per byte), float [k] each, of one algorithm by one protocol. A group of one costs
    nothing.
    """
    leaves = (terms.outer > 0) | (terms.wait_outer > 0)
    multicast = terms.kind == "multicast"
    base = profile.multicast_base if multicast else protocol.base + profile.direct_base * (terms.kind == "direct")
    launch = profile.launch + profile.launch_outer * leaves
    inside = terms.once if profile.rendezvous else terms.wait_inner
    wait = inside * profile.hop * protocol.hop_inner + terms.wait_outer * profile.hop_outer * protocol.hop_outer
    # Calls are enqueued ahead of their chunks: each chunk pays protocol and hops again, not the launch.
    alpha = terms.calls * launch + max(terms.chunks, 1) * (terms.calls * base + wait) + terms.peers * profile.peer
    inner = terms.inner / {"ring": profile.ring, "direct": profile.direct, "multicast": profile.multicast}[terms.kind]
    outer = terms.outer / (profile.direct_outer if terms.kind == "direct" else profile.ring_outer)
    beta = np.maximum(inner, outer)
    if terms.chunks:  # the first piece fills the pipe, then the slowest stage sets the pace
        beta = beta + np.minimum(inner, outer) / terms.chunks
    beta = beta / protocol.fraction
    works = leaves | (terms.inner > 0) | (terms.wait_inner > 0)
    return np.where(works, alpha, 0.0), np.where(works, beta, 0.0)


def protocols_of(terms: Terms, profile: Profile) -> tuple[Protocol, ...]:
    """In-switch reduction goes by the fat protocol only (NCCL: NVLS and SHARP are Simple)."""
    return profile.protocols[-1:] if terms.kind == "multicast" else profile.protocols


def ring(cluster: Cluster, op: str, span: Span, aware: bool) -> Terms:
    passes = _passes(op)
    hops = passes * (span.units[:, :-1] - span.units[:, 1:])
    n = span.members[:, None]
    return _terms(cluster, span, hops, np.where(span.crosses, passes * (n - 1) / n, 0.0))


def tree(cluster: Cluster, op: str, span: Span, aware: bool) -> Terms:
    passes = _passes(op)
    hops, wire = _tree_outside(span, passes, aware)
    inside = _fan_out(span)[:, 0]
    hops[:, 0] = passes * (inside - 1)
    wire[:, 0] = np.where(inside > 2, passes, np.where(inside > 1, passes / 2, 0.0))
    return _terms(cluster, span, hops, wire)


def multicast(cluster: Cluster, op: str, span: Span, aware: bool) -> Terms | None:
    """None where the innermost tier cannot, or a node's part of the group is too small (NCCL: NVLS needs more than 2).

    A reduce-scatter or all-gather in the switch saves hops, not bytes: one direction still carries all of S
    (nccl#1506).
    """
    inside, passes = _fan_out(span)[:, 0], _passes(op)
    if not cluster.tiers[0].multicast or (inside <= 2).any():
        return None
    hops, wire = _tree_outside(span, passes, aware=True)
    for t, tier in enumerate(cluster.tiers[1:], start=1):
        if tier.multicast:  # SHARP: the switch adds, each unit's sum leaves once
            hops[:, t] = np.where(hops[:, t] > 0, passes, 0)
            wire[:, t] = np.where(wire[:, t] > 0, 1.0, 0.0)
    hops[:, 0], wire[:, 0] = passes, 1.0
    return _terms(cluster, span, hops, wire, kind="multicast")


def hierarchical(cluster: Cluster, op: str, span: Span, aware: bool, chunks: int = 1, trees: bool = False) -> Terms:
    """One call per tier and direction: reduce-scatter from the inside out, all-reduce on the outermost, all-gather
    back.

    Each call is a ring over one tier's units, or outside the node a tree (`trees`).
    """
    passes, fan = _passes(op), _fan_out(span)
    stages = int((fan > 1).any(axis=0).sum())
    hops, wire = passes * (fan - 1), np.where(fan > 1, passes * (fan - 1) / fan, 0.0)
    if trees:
        by_tree = np.ceil(passes * np.log2(fan))[:, 1:]
        hops[:, 1:], wire[:, 1:] = by_tree, np.where(by_tree > 0, wire[:, 1:] if aware else float(passes), 0.0)
    calls = max(passes * stages - passes // 2, 1)  # an all-reduce on the outermost tier is one call
    return _terms(cluster, span, hops, wire, calls=calls, chunks=chunks)


def direct(cluster: Cluster, op: str, span: Span, aware: bool) -> Terms:
    """All-to-all. What leaves a unit is what its members hold for members elsewhere."""
    n = span.members[:, None]
    per_unit = n / span.units[:, :-1]
    wire = np.where(span.crosses, per_unit * (n - per_unit) / n, 0.0)
    inside = n[:, 0] / span.units[:, 1]
    wire[:, 0] = np.where(span.crosses[:, 0], (inside - 1) / n[:, 0], 0.0) * _torus_detour(span)
    return _terms(cluster, span, span.crosses.astype(float), wire, kind="direct", peers=span.members - 1.0)


def pipeline(cluster: Cluster, op: str, span: Span, aware: bool) -> Terms:
    return _terms(cluster, span, span.units[:, :-1] - span.units[:, 1:], np.where(span.crosses, 1.0, 0.0))


def shift(cluster: Cluster, groups: Any) -> Terms:
    """Permute: each member sends to the next one of its group."""
    uses, rate = hop_rates(cluster, groups)
    slowness = np.where(uses, 1.0 / rate, 0.0)
    waits = np.where(uses, [t.latency for t in cluster.tiers], 0.0)
    outer, wait_outer = slowness[:, 1:].max(axis=1, initial=0), waits[:, 1:].max(axis=1, initial=0)
    rows = np.unique(np.stack([waits[:, 0], waits[:, 0], wait_outer, slowness[:, 0], outer], axis=1), axis=0)
    return Terms(*rows.T, wire=np.zeros((len(rows), 0)), peers=np.zeros(len(rows)), kind="direct")


CHUNKS = (1, 2, 4, 8, 16, 32)
ALGORITHMS = {
    "ring": ring,
    "tree": tree,
    "multicast": multicast,
    "hierarchical": hierarchical,
    "direct": direct,
    "pipeline": pipeline,
}


def _terms(cluster: Cluster, span: Span, hops: np.ndarray, wire: np.ndarray, peers: Any = None, **more: Any) -> Terms:
    waits = hops * np.array([t.latency for t in cluster.tiers])
    seconds = wire / span.egress
    together = np.sum if more.get("chunks") else np.max
    outer = together(seconds[:, 1:], axis=1, initial=0.0)
    peers = np.zeros(len(wire)) if peers is None else peers
    once = np.where(hops[:, 0] > 0, cluster.tiers[0].latency, 0.0)
    return Terms(waits[:, 0], once, waits[:, 1:].sum(axis=1), seconds[:, 0], outer, wire, peers, **more)


def _passes(op: str) -> int:
    """An all-reduce is a reduce-scatter and an all-gather."""
    return 2 if op == "all_reduce" else 1


def _fan_out(span: Span) -> np.ndarray:
    return span.units[:, :-1] / span.units[:, 1:]


def _tree_outside(span: Span, passes: int, aware: bool) -> tuple[np.ndarray, np.ndarray]:
    """Hops and wire of a double binary tree over the units of every tier but the innermost (that is to be filled in).

    The sum of S over c units needs 2 (c-1)/c S out of each on average. Only a library that knows it (`aware`) takes
    trees for that; NCCL's built-in model counts 2 S and so keeps the ring for large messages (tuning.cc: ratio 0.5).
    """
    units = span.units[:, :-1]
    hops = np.ceil(passes * np.log2(_fan_out(span)))
    wire = np.where(span.crosses, passes * (units - 1) / units if aware else float(passes), 0.0)
    return hops, wire


def _torus_detour(span: Span) -> np.ndarray:
    """Links that a byte of an all-to-all passes on a torus, over the even spread that `egress` assumes (1 elsewhere).

    A ring of X sends a byte X/4 hops on average over its 2 links; the longest dimension binds (scaling book,
    all-to-all).
    """
    if span.torus.shape[1] == 0:
        return np.ones(len(span.units))
    dims = np.maximum((span.torus > 1).sum(axis=1), 1)
    return np.maximum(span.torus.max(axis=1) / 4.0, 1.0) * dims
