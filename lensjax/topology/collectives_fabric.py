"""What a part of an innermost tier gets of its links, where the links are not a switch.

On a switch any subset of devices has each member's full bandwidth. On a mesh, a torus or NVLink's hybrid cube a subset
has only the links among its own members: two MI300X share one of seven links, five V100 of a DGX-1 cannot close a ring
at all.
"""

from __future__ import annotations

import functools
import itertools

import networkx as nx
import numpy as np
from scipy.optimize import linprog

from lensjax.topology.cluster import Cluster, Tier

# Links between the 8 V100 of a DGX-1 or p3.16xlarge (a hybrid cube mesh, 6 links a GPU). Source: NVIDIA DGX-1 with
# Tesla V100 system architecture whitepaper, NVLink topology; as `nvidia-smi topo -m` prints it (NV1, NV2).
CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1, (2, 6): 2, (3, 7): 2,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1,
}  # fmt: skip


def share_of_links(cluster: Cluster, inside: np.ndarray, torus: np.ndarray) -> np.ndarray:
    """Fraction of a device's innermost bandwidth that its links to the other members make up.

    `inside`: int [k] members in one innermost unit; `torus`: int [k, dims] from `torus_extents`. Returns float [k] in
    (0, 1]. By the number of members alone (the first of the unit, as a job gets them), so that renaming devices changes
    nothing.
    """
    tier = cluster.tiers[0]
    inside = np.clip(np.asarray(inside), 2, max(tier.size, 2))
    if tier.kind == "mesh":
        if tier.size <= 8 and cluster.device.name.startswith("V100"):
            return np.array([ring_share(int(n)) for n in inside])
        return (inside - 1) / max(tier.size - 1, 1)
    if tier.kind == "torus":
        wraps = np.array([w and e > 2 for w, e in zip(tier.wrap, tier.shape)])
        spanned = torus > 1
        whole = spanned & wraps & (torus == np.array(tier.shape))
        # A line has one way round where a ring has two: half the bandwidth (scaling book, "TPU networking").
        links = np.where(whole, 1.0, np.where(spanned, 0.5, 0.0)).sum(axis=1)
        return np.maximum(links, 0.5) / len(tier.shape)
    return np.ones(len(inside))


def torus_extents(tier: Tier, slots: np.ndarray) -> np.ndarray:
    """int [groups, dims]: how many coordinates each group covers along each dimension (dims = 0 for no torus)."""
    if tier.kind != "torus":
        return np.zeros((len(slots), 0), int)
    coordinates = np.unravel_index(slots % tier.size, tier.shape)
    extents = []
    for values in coordinates:
        ordered = np.sort(values, axis=1)
        extents.append(1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1))
    return np.stack(extents, axis=1)


@functools.cache
def ring_share(members: int) -> float:
    """Rings that the links among GPUs 0..members-1 of a hybrid cube mesh can carry, over the 6 links of one GPU.

    The library packs edge-disjoint rings (NCCL, graph search); where no ring closes, data is forwarded through a
    neighbour and the smallest cut bounds it (ForestColl, arXiv 2402.06787: throughput of a fabric = its tightest cut).
    """
    capacity = {}
    for (a, b), links in CUBE_MESH.items():
        if b < members:
            capacity[a, b] = capacity[b, a] = links
    rings = [(0, *p) for p in itertools.permutations(range(1, members))]
    rings = [r for r in rings if all((a, b) in capacity for a, b in zip(r, (*r[1:], r[0])))]
    if rings:
        edges = {edge: i for i, edge in enumerate(capacity)}
        use = np.zeros((len(edges), len(rings)))
        for column, ring in enumerate(rings):
            for a, b in zip(ring, (*ring[1:], ring[0])):
                use[edges[a, b], column] += 1
        best = linprog(-np.ones(len(rings)), A_ub=use, b_ub=[capacity[e] for e in edges])
        return -best.fun / 6
    graph = nx.Graph()
    for (a, b), links in capacity.items():
        graph.add_edge(a, b, weight=links)
    return nx.stoer_wagner(graph)[0] / 6
