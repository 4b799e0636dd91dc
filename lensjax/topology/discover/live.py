"""The machine at hand, from `jax.devices()`: platform, kind, slice, process and coordinates of each device.

Which processes share a host, JAX does not say: one process with several devices is taken for a host; where every
process has one device, `hosts` (a host name per process) or SLURM's environment tells, else the catalogue's machine.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology import catalogue
from lensjax.topology.cluster import Cluster
from lensjax.topology.discover import nvidia_smi, slurm
from lensjax.topology.discover.hosts import Host, cluster_of_hosts


def live(devices: Sequence[Any] | None = None, hosts: Sequence[str] | None = None) -> Cluster:
    """The cluster of `devices` (default: all that JAX sees), device i of the list being device id i.

    `hosts`: the host name of each process, by process index. Raises ClusterError for mixed kinds of devices.
    """
    if devices is None:
        import jax

        devices = jax.devices()
        topo = _nvidia_smi_topo(devices)
        if topo is not None:
            return topo
    kinds = {d.device_kind for d in devices}
    if len(kinds) != 1:
        raise ClusterError(
            f"devices of {len(kinds)} kinds: {', '.join(sorted(kinds))}", hint="describe a mixed cluster in a file"
        )
    if devices[0].platform == "cpu":
        return _cpu(devices)
    if getattr(devices[0], "coords", None) is not None:
        return _torus(devices)
    return _gpus(devices, hosts, os.environ)


def _cpu(devices: Sequence[Any]) -> Cluster:
    counts = np.unique([d.process_index for d in devices], return_counts=True)[1]
    if len(set(counts.tolist())) > 1:
        raise ClusterError(
            f"processes with {sorted(set(counts.tolist()))} CPU devices", hint="give each process the same number"
        )
    cluster = Cluster.parse(f"cpu:{len(counts)}x{counts[0]}" if len(counts) > 1 else f"cpu:{counts[0]}")
    return _ordered(cluster, np.argsort(np.argsort([d.process_index for d in devices], kind="stable")))


def _ordered(cluster: Cluster, rank: np.ndarray) -> Cluster:
    same = (rank == np.arange(len(rank))).all()
    return cluster if same else dataclasses.replace(cluster, order=tuple(int(r) for r in rank))


def _torus(devices: Sequence[Any]) -> Cluster:
    """TPU slices: the coordinates of each slice fill a box; devices with the same coordinates are cores of one
    chip.
    """
    kind = devices[0].device_kind
    device = catalogue.device_of_kind(kind)
    machine = catalogue.machine_of(device) if device else None
    if machine is None:
        raise ClusterError(
            f"no {kind!r} in the catalogue", hint="write a cluster file: lensjax topo --json shows the format"
        )
    coords = np.array([d.coords for d in devices])
    slices = np.array([getattr(d, "slice_index", 0) or 0 for d in devices])
    rank = int(machine.data["torus"]["rank"])
    low = coords.min(axis=0)
    sides = coords.max(axis=0) - low + 1
    shape = tuple(int(s) for s in (sides if rank == 3 else sides[:rank]))
    count = len(np.unique(slices))
    at = np.unique(slices, return_inverse=True)[1] * int(np.prod(shape))
    at = at + np.ravel_multi_index(tuple((coords - low)[:, :rank].T), shape)
    if len(np.unique(at)) != len(devices) or len(devices) != count * np.prod(shape):
        raise ClusterError(
            f"{len(devices)} {kind} do not fill {count} slices of {'x'.join(map(str, shape))}",
            hint="pass a whole slice, one device per chip",
        )
    cluster = catalogue.make(machine, shape if count == 1 else (count, *shape))
    return _ordered(cluster, np.argsort(np.argsort(at)))


def _gpus(devices: Sequence[Any], hosts: Sequence[str] | None, environment: Mapping[str, str]) -> Cluster:
    kind = devices[0].device_kind
    device = catalogue.device_of_kind(kind)
    if device is None:
        raise ClusterError(
            f"no {kind!r} in the catalogue", hint="write a cluster file; lensjax topo dgx-h100 --json shows the format"
        )
    machine = catalogue.machine_of(device)
    processes = [d.process_index for d in devices]
    names, notes = _host_names(processes, hosts, environment)
    if names is None:
        unit = catalogue.make(machine, (1,)).devices
        names = {p: f"host{i // unit}" for i, p in enumerate(sorted(set(processes)))}
        notes.append(f"one device per process and no host names: taken for hosts of {unit}, as {machine.name}")
    owner = [names[p] for p in processes]
    order = sorted(range(len(devices)), key=lambda i: (owner.index(owner[i]), i))
    listed = [Host(h, owner.count(h)) for h in dict.fromkeys(owner)]
    cluster = cluster_of_hosts(listed, machine, "jax.devices()", notes=notes)
    return _ordered(cluster, np.argsort(order))


def _host_names(
    processes: Sequence[int], hosts: Sequence[str] | None, environment: Mapping[str, str]
) -> tuple[dict[int, str] | None, list[str]]:
    """(process -> host name or None, notes)."""
    distinct = sorted(set(processes))
    if hosts is not None:
        return {p: hosts[p] for p in distinct}, []
    if len(processes) > len(distinct) or len(distinct) == 1:
        return {p: f"process {p}" for p in distinct}, []
    if "SLURM_JOB_NODELIST" in environment:
        named = [h for h, n in slurm.parse_environment(environment) for _ in range(n)]
        if len(named) == len(distinct):
            return dict(zip(distinct, named)), ["hosts of the processes from SLURM's environment"]
    return None, []


def _nvidia_smi_topo(devices: Sequence[Any]) -> Cluster | None:
    """One process on one NVIDIA node: its own driver knows the links."""
    program = shutil.which("nvidia-smi")
    one = len({d.process_index for d in devices}) == 1 and devices[0].platform in ("gpu", "cuda")
    device = catalogue.device_of_kind(devices[0].device_kind) if devices else None
    if not program or not one or device is None:
        return None
    try:
        text = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=20, check=True).stdout
        cluster = nvidia_smi.discover(text, device.name).cluster
    except (subprocess.SubprocessError, OSError, ClusterError):
        return None
    return cluster if cluster.devices == len(devices) else None
