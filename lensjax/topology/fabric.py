"""A fabric: the graph of devices, switches and links, as wiring diagrams and discovery tools describe it.

Two distances come out of it. The *widest path* (the best bottleneck bandwidth) says at which level of a hierarchy two
devices meet; the *effective resistance* (links as conductors of their bandwidth) also counts parallel paths and
detours, so it tells a torus from a switch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

import networkx as nx
import numpy as np

from lensjax._errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Link:
    """A cable between two nodes: devices are integers 0..n-1, everything else (switch, NIC, socket) has a text name.

    `bandwidth`: bytes/s in one direction; `latency`: seconds; `kind`: nvlink, pcie, infiniband, ...
    """

    a: Hashable
    b: Hashable
    bandwidth: float
    latency: float = 0.0
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Fabric:
    """Devices 0..devices-1 and their links. `source`: what it was read from."""

    devices: int
    links: tuple[Link, ...]
    source: str = ""

    def __post_init__(self):
        for link in self.links:
            if not link.bandwidth > 0:
                raise ClusterError(f"link {link.a}-{link.b}: bandwidth {link.bandwidth} must be positive")
            bad = [x for x in (link.a, link.b) if isinstance(x, int) and not 0 <= x < self.devices]
            if bad or link.a == link.b:
                raise ClusterError(f"link {link.a}-{link.b} in a fabric of devices 0..{self.devices - 1}")

    def graph(self) -> nx.Graph:
        """The networkx graph; parallel links are one edge with their bandwidths added."""
        graph = nx.Graph()
        graph.add_nodes_from(range(self.devices))
        for link in self.links:
            if graph.has_edge(link.a, link.b):
                graph[link.a][link.b]["bandwidth"] += link.bandwidth
            else:
                graph.add_edge(link.a, link.b, bandwidth=link.bandwidth, latency=link.latency, kind=link.kind)
        return graph


def fabric(devices: int, links: Iterable[Link], source: str = "") -> Fabric:
    """A fabric in which every device is reachable. Raises ClusterError naming the devices that are not."""
    result = Fabric(devices, tuple(links), source)
    lost = set(range(devices)) - nx.node_connected_component(result.graph(), 0)
    if lost:
        raise ClusterError(f"devices {sorted(lost)[:8]} have no path to device 0", hint="is a cable or switch missing?")
    return result


def widest_paths(found: Fabric) -> np.ndarray:
    """float [devices, devices]: bytes/s of the best bottleneck between each pair; infinity on the diagonal.

    The bottleneck of the path in a maximum spanning tree (Hu, 1961), merged as single linkage does.
    """
    result = np.full((found.devices, found.devices), np.inf)
    parts = {node: [node] if isinstance(node, int) else [] for node in found.graph()}
    leader = {node: node for node in parts}
    for a, b, data in sorted(found.graph().edges(data=True), key=lambda e: -e[2]["bandwidth"]):
        a, b = _find(leader, a), _find(leader, b)
        if a != b:
            result[np.ix_(parts[a], parts[b])] = data["bandwidth"]
            result[np.ix_(parts[b], parts[a])] = data["bandwidth"]
            leader[b] = a
            parts[a] = parts[a] + parts[b]
    return result


def _find(leader: dict, node: Hashable) -> Hashable:
    while leader[node] != node:
        leader[node] = leader[leader[node]]
        node = leader[node]
    return node


def effective_resistance(found: Fabric, members: Iterable[int] | None = None) -> np.ndarray:
    """float [members, members]: seconds/byte between devices when each link conducts its bandwidth.

    From the pseudo-inverse of the Laplacian (Klein and Randic, 1993); cubic in the number of nodes.
    """
    graph = found.graph()
    nodes = list(graph)
    laplacian = nx.laplacian_matrix(graph, nodelist=nodes, weight="bandwidth").toarray().astype(float)
    scale = laplacian.max() or 1.0
    inverse = np.linalg.pinv(laplacian / scale, hermitian=True) / scale
    members = list(range(found.devices)) if members is None else list(members)
    index = [nodes.index(m) for m in members]
    inner = inverse[np.ix_(index, index)]
    diagonal = np.diag(inner)
    return np.maximum(diagonal[:, None] + diagonal[None] - 2 * inner, 0.0)


def is_direct(found: Fabric) -> bool:
    """Whether devices are joined by cables among themselves (a torus, a cube mesh) and not only through switches."""
    return any(isinstance(link.a, int) and isinstance(link.b, int) for link in found.links)
