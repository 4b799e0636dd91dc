"""Placing a mesh on a fabric that is no clean tree: route every ring over the links, and improve the order by swaps.

Starting orders come from the structure of the graph: recursive bisection on effective conductances keeps near devices
together at every scale, which is what nested mesh axes ask for. The price of an order is exact for the
routes chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import networkx as nx
import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology.fabric import Fabric, effective_resistance, widest_paths

MAX_DEVICES = 128  # routes between all pairs are held; larger fabrics go through hierarchy.py
_EVEN = 0.05  # weight of uneven loads against the slowest link
_RESTARTS = 24  # of 100 fabrics of 8 and 9 devices none then misses the best order; 3 did with 12 and _EVEN = 0


def embedded_order(found: Fabric, members: Sequence[int] | None = None) -> list[int]:
    """Devices so that near ones are near in the list at every scale: recursive bisection on effective conductance."""
    members = list(range(found.devices)) if members is None else list(members)
    if len(members) < 3:
        return members
    resistance = effective_resistance(found, members)
    with np.errstate(divide="ignore"):
        conductance = np.where(resistance > 0, 1 / np.maximum(resistance, 1e-300), 0.0)
    return [members[i] for i in _bisect(conductance / conductance.max(), np.arange(len(members)))]


def _bisect(conductance: np.ndarray, members: np.ndarray) -> list[int]:
    """Halves with the least conductance between them, each ordered the same way."""
    if len(members) < 3:
        return [int(m) for m in members]
    inner = conductance[np.ix_(members, members)]
    half = 2 ** (math.ceil(math.log2(len(members))) - 1)
    laplacian = np.diag(inner.sum(axis=1)) - inner
    fiedler = np.argsort(np.round(np.linalg.eigh(laplacian)[1][:, 1], 9), kind="stable")
    # A torus has several vectors of equal value, any mixture of which may come back: the id order is a second start.
    sides = [_exchange(inner, start[:half]) for start in (np.arange(len(members)), fiedler)]
    near = min(sides, key=lambda side: _cut(inner, side))
    return _bisect(conductance, members[near]) + _bisect(conductance, members[~near])


def _cut(inner: np.ndarray, near: np.ndarray) -> float:
    return float(np.round(inner[np.ix_(near, ~near)].sum(), 9))


def _exchange(inner: np.ndarray, start: np.ndarray) -> np.ndarray:
    """bool [members]: one side of the bisection, after exchanges that lower the cut (Kernighan and Lin, 1970)."""
    near = np.zeros(len(inner), bool)
    near[start] = True
    while True:
        pull = inner @ np.where(near, -1.0, 1.0) * np.where(near, 1.0, -1.0)  # to the other side less to its own
        gain = pull[near][:, None] + pull[~near][None] - 2 * inner[np.ix_(near, ~near)]
        if gain.size == 0 or gain.max() <= 1e-9:
            return near
        a, b = np.unravel_index(gain.argmax(), gain.shape)
        swap = np.flatnonzero(near)[a], np.flatnonzero(~near)[b]
        near[swap[0]], near[swap[1]] = False, True


class Routes:
    """The links that traffic between each pair of devices takes: the widest path, the shortest among those.

    `load`: float [devices * devices, links], 1 where pair i * devices + j uses a link (directed); `capacity`:
    bytes/s.
    """

    def __init__(self, found: Fabric):
        if found.devices > MAX_DEVICES:
            raise ClusterError(
                f"{found.devices} devices are too many to route pair by pair",
                hint=f"at most {MAX_DEVICES}; lensjax.topology.hierarchy.cluster_of gives a Cluster to place on",
            )
        graph = found.graph()
        edges = [e for a, b in graph.edges for e in ((a, b), (b, a))]
        index = {edge: i for i, edge in enumerate(edges)}
        self.devices = found.devices
        self.capacity = np.array([graph[a][b]["bandwidth"] for a, b in edges])
        self.load = np.zeros((found.devices**2, len(edges)), np.float32)
        widest = widest_paths(found)
        for i in range(found.devices):
            for width in np.unique(widest[i][np.isfinite(widest[i])]):
                wide = nx.subgraph_view(graph, filter_edge=lambda a, b, w=width: graph[a][b]["bandwidth"] >= w)
                paths = nx.single_source_shortest_path(wide, i)
                for j in np.flatnonzero(widest[i] == width):
                    path = paths[int(j)]
                    self.load[i * found.devices + j, [index[edge] for edge in itertools.pairwise(path)]] = 1

    def seconds(self, orders: np.ndarray, shape: Sequence[int], nbytes: Sequence[float]) -> np.ndarray:
        """float [orders]: seconds of each order (int [orders, devices]) on a mesh of `shape`; rings in mesh order."""
        return sum((t.max(axis=1) for t in self._links(orders, shape, nbytes)), np.zeros(len(orders)))

    def scores(self, orders: np.ndarray, shape: Sequence[int], nbytes: Sequence[float]) -> np.ndarray:
        """The seconds, and a little of how unevenly the links are loaded: among orders with the same slowest link it
        prefers those that are nearer to relieving it."""
        uneven = (t.max(axis=1) + _EVEN * np.sqrt((t**2).mean(axis=1)) for t in self._links(orders, shape, nbytes))
        return sum(uneven, np.zeros(len(orders)))

    def _links(self, orders: np.ndarray, shape: Sequence[int], nbytes: Sequence[float]) -> Iterator[np.ndarray]:
        """Per axis, float [orders, links]: seconds that each link is busy."""
        meshes = orders.reshape(-1, *shape)
        for axis, traffic in enumerate(nbytes):
            if shape[axis] > 1 and traffic > 0:
                pairs = meshes * self.devices + np.roll(meshes, -1, axis=axis + 1)
                yield traffic * self.load[pairs.reshape(len(orders), -1)].sum(axis=1) / self.capacity


def place_fabric(found: Fabric, axes: Mapping[str, int], traffic: Mapping[str, float]) -> tuple[np.ndarray, float]:
    """(device ids in mesh order, predicted seconds) for a mesh that uses every device of a fabric.

    `traffic`: bytes each device sends along an axis per step. Swaps two devices while that helps, from structured and
    seeded random starts; deterministic. Raises ClusterError when the axes do not multiply to the devices.
    """
    shape, nbytes = tuple(axes.values()), [traffic.get(a, 0.0) for a in axes]
    if math.prod(shape) != found.devices:
        raise ClusterError(f"axes {dict(axes)} need {math.prod(shape)} devices; the fabric has {found.devices}")
    routes = Routes(found)
    best = min((_descend(routes, start, shape, nbytes) for start in _starts(found, shape)), key=lambda r: r[1])
    return best[0].reshape(shape), best[1]


def _starts(found: Fabric, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Structured orders under every nesting of the axes, then random ones."""
    starts = []
    for base in (list(range(found.devices)), embedded_order(found)):
        for nesting in itertools.permutations(range(len(shape))):
            array = np.array(base).reshape([shape[a] for a in nesting]).transpose(np.argsort(nesting))
            starts.append(array.ravel())
    random = np.random.default_rng(0)
    return starts + [random.permutation(found.devices) for _ in range(_RESTARTS)]


def _descend(
    routes: Routes, order: np.ndarray, shape: Sequence[int], nbytes: Sequence[float]
) -> tuple[np.ndarray, float]:
    """Best-improvement descent over all swaps of two devices. Equal moves are not taken, so it ends."""
    a, b = np.triu_indices(len(order), 1)
    score = float(routes.scores(order[None], shape, nbytes)[0])
    while True:
        moves = np.repeat(order[None], len(a), axis=0)
        rows = np.arange(len(a))
        moves[rows, a], moves[rows, b] = order[b], order[a]
        scores = routes.scores(moves, shape, nbytes)
        best = int(scores.argmin())
        if scores[best] >= score * (1 - 1e-9):
            return order, float(routes.seconds(order[None], shape, nbytes)[0])
        order, score = moves[best], float(scores[best])
