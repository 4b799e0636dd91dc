"""Tiers from a fabric: which groups of devices meet at which bandwidth, and what does not fit such a tree.

Devices joined by links of at least some bandwidth form groups; lowering the bandwidth merges groups (single linkage
on the widest path), so the groups nest: a tree. Where links of one bandwidth go through stages of switches (leaf,
spine), groups that share a switch merge before those that only reach each other through more. Each merging is a tier.
Its bandwidth per device is what leaves a group over its devices, so a shared NIC and an oversubscribed trunk show.
Uneven groups become missing slots and weak ones slow links.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from lensjax.topology.cluster import Cluster, Device, Slow, Tier
from lensjax.topology.embed import embedded_order
from lensjax.topology.fabric import Fabric, effective_resistance

_COUNTED = (
    0.4  # links of at least this part of a level's bandwidth carry its traffic; others (PCIe next to NVLink) do not
)
_FEW = 0.25  # at most this part of the devices may be damaged; more are a tier of their own
_SAME = 0.8  # links within 20 % of a bandwidth belong to its level: generations of a link differ by 2
_UNLIKE = 1.25  # resistances within a group that differ by more than this break the tree
_MAX_RESISTANCE = 256  # nodes; the pseudo-inverse is cubic


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """A fabric as a cluster, and what the tree hides: `breaking` pairs of devices, each with why."""

    cluster: Cluster
    breaking: tuple[tuple[int, int, str], ...]


@dataclasses.dataclass
class _Level:
    """One merging: the group (an index) of each device after it, and, per device, the bytes/s it gets of what leaves
    its group of before (0 where nothing of this level leaves it)."""

    bandwidth: float
    group: np.ndarray
    each: np.ndarray
    latency: float
    kind: str


def cluster_of(
    found: Fabric, device: Device, name: str = "discovered", names: Sequence[str] = (), notes: Sequence[str] = ()
) -> Hierarchy:
    """The cluster that a fabric amounts to. `names`: of the tiers, innermost first; else the kinds of the links."""
    levels = _levels(found)
    if not levels:  # a single device
        tier = Tier("device", 1, 1.0, 0.0, sources={"bandwidth": "one device: no links"})
        return Hierarchy(Cluster(name, device, (tier,), notes=tuple(notes)), ())
    breaking = _breaking(found, levels[0].group)
    order = _device_order(found, levels, embed=bool(breaking))
    slots, sizes = nested_slots([level.group for level in levels], order)
    tiers = _tiers(found, levels, sizes, names)
    missing = tuple(int(s) for s in np.setdiff1d(np.arange(sizes[-1]), slots))
    rank = np.argsort(np.argsort(slots))
    moved = None if (rank == np.arange(len(rank))).all() else tuple(int(r) for r in rank)
    slow = _slow(levels, tiers, slots)
    return Hierarchy(Cluster(name, device, tiers, missing, slow, (), moved, tuple(notes)), breaking)


class _Merger:
    """The graph as arrays, with a label per node: nodes of one label are joined already."""

    def __init__(self, found: Fabric):
        graph = found.graph()
        index = {node: i for i, node in enumerate(graph)}  # devices come first
        edges = list(graph.edges(data=True))
        self.devices = found.devices
        self.ends = np.array([(index[a], index[b]) for a, b, _ in edges]).reshape(-1, 2)
        self.bandwidth = np.array([d["bandwidth"] for *_, d in edges])
        self.latency = np.array([d["latency"] for *_, d in edges])
        self.kind = [str(d["kind"]) for *_, d in edges]
        self.label = np.arange(len(index))
        self.settled = 0  # number of groups when they last took in their own switches

    def groups(self) -> np.ndarray:
        """int [devices]: the group of each device, numbered from 0."""
        return np.unique(self.label[: self.devices], return_inverse=True)[1]

    def stage(self, bandwidth: float) -> tuple[np.ndarray, np.ndarray]:
        """Joins along links of at least `bandwidth`, one stage of switches; returns (those links, bytes/s per device
        of the links over which its group joined). No links: nothing is left to join.

        A few groups whose links are all slower (a slow NIC) join through those as if they were not.
        """
        if self.settled != len(np.unique(self.label[: self.devices])):
            # Once for each grouping: doing it again would measure from what was taken in, and take in ever more.
            self.label = self._with_private()
            self.settled = len(np.unique(self.label[: self.devices]))
        ends, many = self.label[self.ends], len(self.label)
        cross = ends[:, 0] != ends[:, 1]
        count = np.bincount(self.label[: self.devices], minlength=many)
        widest = np.zeros(many)
        np.maximum.at(widest, ends[cross].ravel(), np.repeat(self.bandwidth[cross], 2))
        weak = (count > 0) & (widest < bandwidth * _SAME)
        limit = np.where(weak, widest, bandwidth)  # of each group
        wide = self.bandwidth >= bandwidth * _SAME
        if 0 < count[weak].sum() <= _FEW * self.devices:
            wide = wide | (self.bandwidth >= np.where(weak[ends], limit[ends] * _SAME, np.inf).min(axis=1))
        joined = np.flatnonzero(cross & wide & (count[ends] > 0).any(axis=1))
        device_label = self.label[: self.devices]
        self._join(joined)
        carries = cross & (self.label[self.ends[:, 0]] == self.label[self.ends[:, 1]])
        total = np.zeros(many)
        for at in ends.T:
            counted = carries & (self.bandwidth >= _COUNTED * limit[at])
            total += np.bincount(at[counted], weights=self.bandwidth[counted], minlength=many)
        return joined, (total / np.maximum(count, 1))[device_label]

    def _with_private(self) -> np.ndarray:
        """The labels after every group took in the switches, NICs and sockets that are nearer to it than to others:
        what leaves a group is then what leaves its own NICs, however it reaches them.
        """
        ends, many = self.label[self.ends], len(self.label)
        cross = ends[:, 0] != ends[:, 1]
        here, there = np.r_[ends[cross, 0], ends[cross, 1]], np.r_[ends[cross, 1], ends[cross, 0]]
        owner = np.full(many, -1)  # of each label: -1 nobody yet, -2 several
        owner[self.label[: self.devices]] = self.label[: self.devices]
        while True:
            low, high = np.full(many, many), np.full(many, -3)
            known = owner[here] != -1
            np.minimum.at(low, there[known], owner[here[known]])
            np.maximum.at(high, there[known], owner[here[known]])
            new = (owner == -1) & (high > -3)
            if not new.any():
                return np.where(owner >= 0, owner, np.arange(many))[self.label]
            owner[new] = np.where(low == high, low, -2)[new]

    def _join(self, edges: np.ndarray) -> None:
        pairs, many = self.label[self.ends[edges]], len(self.label)
        links = sparse.coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(many, many))
        self.label = csgraph.connected_components(links, directed=False)[1][self.label]


def _levels(found: Fabric) -> list[_Level]:
    """The merging steps, widest links first and within a bandwidth nearest switches first; only those that join
    devices.
    """
    merger, levels = _Merger(found), []
    rest = np.unique(merger.bandwidth)[::-1]
    while len(rest):
        bandwidth, rest = float(rest[0]), rest[rest < rest[0] * _SAME]
        while True:
            before = merger.groups()
            edges, each = merger.stage(bandwidth)
            if len(edges) == 0:
                break
            direct = (merger.ends[edges] < found.devices).all(axis=1)
            after = merger.groups()
            if after.max() < before.max():
                kind = Counter(merger.kind[e] for e in edges).most_common(1)[0][0]
                # A stage is crossed up and down, two cables, but one where devices are joined directly.
                latency = float((merger.latency[edges] * np.where(direct, 1, 2)).max())
                levels.append(_Level(bandwidth, after, each, latency, kind))
    return levels


def _device_order(found: Fabric, levels: list[_Level], embed: bool) -> np.ndarray:
    """Devices sorted by group, outermost first; inside a group of direct links that is no full mesh, by the
    embedding.
    """
    inner = np.arange(found.devices)
    if embed:
        for members in (np.flatnonzero(levels[0].group == g) for g in range(int(levels[0].group.max()) + 1)):
            inner[embedded_order(found, [int(m) for m in members])] = np.arange(len(members))
    return np.lexsort((inner, *(level.group for level in levels)))


def nested_slots(groups: Sequence[np.ndarray], order: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """(slot of each device, size of each tier) for nested groups, innermost first, every group padded to the largest
    of its tier; groups and devices are numbered in the sequence of `order`."""
    place = np.zeros(len(order), int)
    child, size, sizes = np.arange(len(order)), 1, []
    for group in groups:
        pairs, pair = np.unique(np.stack([group, child]), axis=1, return_inverse=True)
        first = np.full(pairs.shape[1], len(order))
        np.minimum.at(first, pair, np.argsort(order))
        position = np.zeros(pairs.shape[1], int)
        rank = np.lexsort((first, pairs[0]))
        start = np.r_[True, np.diff(pairs[0][rank]) > 0]
        position[rank] = np.arange(len(rank)) - np.maximum.accumulate(np.where(start, np.arange(len(rank)), 0))
        place += size * position[pair]
        size *= int(position.max()) + 1
        sizes.append(size)
        child = group
    return place, sizes


def _tiers(found: Fabric, levels: list[_Level], sizes: list[int], names: Sequence[str]) -> tuple[Tier, ...]:
    tiers: list[Tier] = []
    where = found.source or "the graph"
    for i, level in enumerate(levels):
        each = float(np.median(level.each[level.each > 0]))
        name = names[i] if i < len(names) else level.kind or f"tier{i}"
        sources = {"bandwidth": f"{where}: what leaves a group, over its devices", "latency": where}
        tier = Tier(_fresh(name, tiers), sizes[i], each, level.latency, sources=sources)
        if i == 0 and _direct(found, level.group):
            tier = dataclasses.replace(tier, kind="mesh")
        elif _same_cables(levels, i) and each < tiers[-1].usable * 0.99:
            # A further stage of switches over the same cables: less leaves it than enters.
            ratio = tiers[-1].bandwidth / each
            sources = {**sources, "oversubscription": f"{where}: cables below over cables above"}
            below = tiers[-1]
            tier = dataclasses.replace(tier, bandwidth=below.bandwidth, nic_sharing=below.nic_sharing)
            tier = dataclasses.replace(tier, oversubscription=ratio, sources=sources)
        elif i:
            sharing = tiers[-1].nic_sharing if _same_cables(levels, i) else level.bandwidth / each
            tier = dataclasses.replace(tier, nic_sharing=max(1, round(sharing)))
        tiers.append(tier)
    return tuple(tiers)


def _same_cables(levels: list[_Level], i: int) -> bool:
    """Whether level i is a further stage of switches over the cables of the level below."""
    return i > 0 and levels[i].bandwidth == levels[i - 1].bandwidth and (i > 1 or levels[0].kind == levels[1].kind)


def _fresh(name: str, tiers: Sequence[Tier]) -> str:
    taken = {t.name for t in tiers}
    return next(n for n in [name, *(f"{name}-{i}" for i in range(2, 99))] if n not in taken)


def _direct(found: Fabric, group: np.ndarray) -> bool:
    pairs = [(k.a, k.b) for k in found.links if isinstance(k.a, int) and isinstance(k.b, int)]
    return any(group[a] == group[b] for a, b in pairs)


def _slow(levels: list[_Level], tiers: Sequence[Tier], slots: np.ndarray) -> tuple[Slow, ...]:
    result = []
    for _i, (level, tier) in enumerate(zip(levels, tiers)):
        each = level.each / tier.usable
        for factor in np.unique(np.round(each[each < _SAME], 6)):
            members = tuple(int(s) for s in np.sort(slots[np.isclose(each, factor, atol=1e-6)]))
            if factor > 0:
                result.append(Slow(tier.name, members, float(factor), "what leaves the group is less than elsewhere"))
    return tuple(result)


def _breaking(found: Fabric, group: np.ndarray) -> tuple[tuple[int, int, str], ...]:
    """Pairs of one innermost group that are farther apart than the closest pairs of it, by effective resistance."""
    if not _direct(found, group) or len(found.graph()) > _MAX_RESISTANCE:
        return ()
    resistance, result = effective_resistance(found), []
    for members in (np.flatnonzero(group == g) for g in range(int(group.max()) + 1)):
        inner = resistance[np.ix_(members, members)]
        upper = inner[np.triu_indices(len(members), 1)]
        for i, j in zip(*np.triu_indices(len(members), 1)):
            if inner[i, j] > _UNLIKE * upper.min():
                ratio = inner[i, j] / upper.min()
                result.append(
                    (int(members[i]), int(members[j]), f"{ratio:.2f} times the resistance of the closest pair")
                )
    return tuple(result)
