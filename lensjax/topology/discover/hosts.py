"""Hosts with their place in the network -> a cluster: what schedulers know (SLURM, Kubernetes) and what they do not.

A scheduler knows which hosts there are and which switches or blocks they share. It does not know bandwidths: those of
the node and of the network come from the catalogue's machine, and the cluster's notes say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology.catalogue import Machine, make
from lensjax.topology.cluster import Cluster, Tier
from lensjax.topology.hierarchy import nested_slots


@dataclasses.dataclass(frozen=True)
class Host:
    """`devices` accelerators on one host; `path`: names of what it hangs under, outermost first (spine, leaf)."""

    name: str
    devices: int
    path: tuple[str, ...] = ()


def cluster_of_hosts(
    hosts: Sequence[Host], machine: Machine, name: str, levels: Sequence[str] = (), notes: Sequence[str] = ()
) -> Cluster:
    """The cluster of these hosts, devices numbered host by host as listed.

    `levels`: what the parts of the paths are called, outermost first. Hosts with fewer devices than the rest leave
    slots empty. Raises ClusterError when there are no hosts or their paths differ in depth.
    """
    if not hosts:
        raise ClusterError(f"{name}: no hosts", hint="the text names none, or none of those asked for")
    depth = len(hosts[0].path)
    odd = next((h for h in hosts if len(h.path) != depth), None)
    if odd is not None:
        raise ClusterError(f"{name}: host {odd.name} hangs under {odd.path}, {hosts[0].name} under {hosts[0].path}")
    node, network = _catalogue_tiers(machine, max(h.devices for h in hosts))
    owner = np.repeat(np.arange(len(hosts)), [h.devices for h in hosts])
    groups, tiers = [owner], [node[-1]]
    for level in reversed(range(depth)):
        paths = [h.path[: level + 1] for h in hosts]
        index = {path: i for i, path in enumerate(dict.fromkeys(paths))}
        group = np.array([index[path] for path in paths])[owner]
        if group.max() < groups[-1].max():
            groups.append(group)
            tiers.append(dataclasses.replace(network, name=levels[level] if level < len(levels) else f"level{level}"))
    if groups[-1].max() > 0:
        groups.append(np.zeros(len(owner), int))
        tiers.append(network)
    slots, sizes = nested_slots(groups, np.arange(len(owner)))
    inner = [t for t in node[:-1] if t.size < sizes[0]]
    tiers = inner + [dataclasses.replace(t, size=s) for t, s in zip(tiers, sizes)]
    missing = tuple(int(s) for s in np.setdiff1d(np.arange(sizes[-1]), slots))
    rank = np.argsort(np.argsort(slots))
    order = None if (rank == np.arange(len(rank))).all() else tuple(int(r) for r in rank)
    said = f"bandwidths and latencies are the catalogue's for {machine.name}: {name} does not tell them"
    device = make(machine).device
    return Cluster(name, device, tuple(_renamed(tiers)), missing, order=order, notes=(*notes, said))


def _catalogue_tiers(machine: Machine, devices: int) -> tuple[list[Tier], Tier]:
    """(tiers of one node of `devices`, the network tier above) of a catalogue machine."""
    if "torus" in machine.data:
        raise ClusterError(
            f"{machine.name} is a torus, not hosts on a network", hint="use its coordinates or its topology label"
        )
    unit = int(machine.data["unit"]["size"])
    big = make(machine, (4096,))
    node = [t for t in big.tiers if t.size <= unit]
    network = next(t for t in big.tiers if t.size > unit)
    if devices < unit:
        node = [t for t in node if t.size < devices] + [dataclasses.replace(node[-1], size=devices)]
    elif devices > unit:
        raise ClusterError(f"a host with {devices} devices; a {machine.unit} of {machine.name} has {unit}")
    return node, network


def _renamed(tiers: Sequence[Tier]) -> list[Tier]:
    seen: dict[str, int] = {}
    result = []
    for tier in tiers:
        seen[tier.name] = seen.get(tier.name, 0) + 1
        again = seen[tier.name]
        result.append(tier if again == 1 else dataclasses.replace(tier, name=f"{tier.name}-{again}"))
    return result
