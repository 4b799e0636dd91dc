"""`nvidia-smi topo -m`: the matrix of how GPUs and NICs of one node reach each other.

Cells: NV# (# NVLink links), PIX (one PCIe switch), PXB (several), PHB (host bridge), NODE (one NUMA node), SYS
(across sockets; SOC in old drivers). Old drivers name NICs mlx5_0 in the header, newer ones NIC0; both print affinity
columns. The matrix tells no bandwidth: that of a link comes from the device's generation.
"""

from __future__ import annotations

import dataclasses
import re

from lensjax._errors import ClusterError
from lensjax.topology import catalogue
from lensjax.topology.cluster import Device
from lensjax.topology.discover.text import bad, clean, cut_off
from lensjax.topology.fabric import Fabric, Link, fabric
from lensjax.topology.hierarchy import Hierarchy, cluster_of

SOURCE = "nvidia-smi topo -m"
_COLUMN = re.compile(r"^(GPU\d+|NIC\d+|(mlx|efa|bnxt|irdma|ib|roce|rdma|hns|qedr|cxgb)\w*)$")
_NVLINK = re.compile(r"^NV([1-9]|[12][0-9]|3[0-6])$")  # 18 links are the most a GPU had by 2025
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first

# Bytes/s of one NVLink link in one direction, and the links of a GPU. NVIDIA datasheets: V100 6 x 25, A100 12 x 25,
# H100 18 x 25, B200 18 x 50 GB/s.
_LINKS = {"V100": (25e9, 6), "A100": (25e9, 12), "H100": (25e9, 18), "H200": (25e9, 18), "B200": (50e9, 18)}
_UPI = 10e9  # between sockets; NCCL src/graph/topo.h SKL_QPI_BW
_LATENCY = {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4e-6}  # NCCL src/graph/tuning.cc hwLat, ring, LL128


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The cells by pair of names, `X` on the diagonal; GPUs and NICs in the order of the header."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: dict[tuple[str, str], str]


def parse(text: str) -> Matrix:
    """The matrix in a text. Raises ClusterError with the line for an unknown cell, a short row, a missing row, or a
    pair whose two cells differ."""
    lines = clean(text).splitlines()
    top = next((i for i, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and "X" not in line.split()), None)
    if top is None:
        raise ClusterError(
            f"{SOURCE}: no header line that starts with GPU0", hint="paste its whole output, legend included"
        )
    names = [word for word in lines[top].split() if _COLUMN.match(word)]
    if len(set(names)) < len(names):
        raise bad(SOURCE, top + 1, lines[top], "each GPU and NIC once in the header")
    cells: dict[tuple[str, str], str] = {}
    where: dict[str, int] = {}
    for number, line in enumerate(lines[top + 1 :], top + 2):
        words = line.split()
        if not words or words[0] not in names:
            if words and _COLUMN.match(words[0]):
                raise bad(SOURCE, number, line, f"a row of one of {', '.join(names)}")
            if len(where) == len(names) or (words and words[0].startswith("Legend")):
                break
            continue
        if words[0] in where:
            raise bad(SOURCE, number, line, f"one row for {words[0]}, there is one at line {where[words[0]]}")
        where[words[0]] = number
        cells |= _row(words, names, number, line)
    lost = [n for n in names if n not in where]
    if lost:
        raise cut_off(SOURCE, len(lines), f"the row of {lost[0]}")
    _check_symmetric(cells, names, where)
    gpus = tuple(n for n in names if n.startswith("GPU"))
    return Matrix(gpus, tuple(n for n in names if n not in gpus), cells)


def _row(words: list[str], names: list[str], number: int, line: str) -> dict[tuple[str, str], str]:
    if len(words) < len(names) + 1:
        raise bad(SOURCE, number, line, f"{len(names)} cells after {words[0]}, found {len(words) - 1}")
    result = {}
    for name, cell in zip(names, words[1:]):
        cell = "SYS" if cell == "SOC" else cell
        if (cell == "X") != (name == words[0]) or not (cell in ("X", *_PCIE) or _NVLINK.match(cell)):
            raise bad(SOURCE, number, cell, f"how {words[0]} reaches {name}: X for itself, NV#, {', '.join(_PCIE)}")
        result[words[0], name] = cell
    return result


def _check_symmetric(cells: dict[tuple[str, str], str], names: list[str], where: dict[str, int]) -> None:
    for a in names:
        for b in names:
            if cells[a, b] != cells[b, a]:
                raise bad(SOURCE, where[b], f"{b} {a} {cells[b, a]}", f"{cells[a, b]}, as {a} {b} at line {where[a]}")


def discover(text: str, device: str | None = None, nodes: int = 1, nic_bandwidth: float | None = None) -> Hierarchy:
    """The cluster of `nodes` nodes like the one in the text.

    `device`: a name of the catalogue; without it the NVLink generation tells (and the notes say so). `nic_bandwidth`:
    bytes/s of one NIC; without it the catalogue's network of a node, over the NICs that are near a GPU.
    """
    matrix, notes = parse(text), []
    found = catalogue.device(device) if device else _guess(matrix, notes)
    if nodes > 1 and nic_bandwidth is None:
        machine = catalogue.machine_of(found)
        network = catalogue.make(machine, (2,)).tiers[-1]
        nic_bandwidth = network.bandwidth * len(matrix.gpus) / max(len(_compute_nics(matrix)), 1)
        notes.append(f"the network's bandwidth is the catalogue's for {machine.name}: {SOURCE} does not tell it")
    return cluster_of(node_fabric(matrix, found, nodes, nic_bandwidth or 0.0), found, "nvidia-smi", notes=notes)


def _guess(matrix: Matrix, notes: list[str]) -> Device:
    most = max((int(m[1]) for c in matrix.cells.values() if (m := _NVLINK.match(c))), default=0)
    name = "H100-SXM5-80GB" if most > 12 else "A100-SXM4-80GB" if most > 6 or not most else "V100-SXM2-32GB"
    said = f"up to {most} NVLink links a pair" if most else "no NVLink at all"
    notes.append(f"{SOURCE} does not name the GPUs: taken for {name} by {said}; pass device= for another")
    return catalogue.device(name)


def node_fabric(matrix: Matrix, device: Device, nodes: int = 1, nic_bandwidth: float = 0.0) -> Fabric:
    """The links of `nodes` equal nodes; their NICs meet in one network when there are several."""
    links: list[Link] = []
    for node in range(nodes):
        offset = node * len(matrix.gpus)
        ends = {n: offset + i for i, n in enumerate(matrix.gpus)} | {n: f"{node}/{n}" for n in matrix.nics}
        links += _nvlinks(matrix, device, ends, node) + _pcie(matrix, device, ends, node)
        if nodes > 1:
            # Without NICs in the matrix the node still has its network, on the host side.
            at = [ends[n] for n in _compute_nics(matrix)] or [f"{node}/SYS0"]
            links += [Link(a, "network", nic_bandwidth, _LATENCY["network"] / 2, "network") for a in at]
    return fabric(nodes * len(matrix.gpus), links, SOURCE)


def _compute_nics(matrix: Matrix) -> list[str]:
    """The NICs under a PCIe switch with a GPU; where there are none, all (others are for storage and management)."""
    near = [n for n in matrix.nics if any(matrix.cells[n, g] in ("PIX", "PXB") for g in matrix.gpus)]
    return near or list(matrix.nics)


def _nvlinks(matrix: Matrix, device: Device, ends: dict, node: int) -> list[Link]:
    each, total = next((v for k, v in _LINKS.items() if k in device.name), (25e9, 18))
    pairs = {
        (a, b): int(match[1])
        for i, a in enumerate(matrix.gpus)
        for b in matrix.gpus[i + 1 :]
        if (match := _NVLINK.match(matrix.cells[a, b]))
    }
    counts = set(pairs.values())
    latency = _LATENCY["nvlink"]
    everyone = len(pairs) == len(matrix.gpus) * (len(matrix.gpus) - 1) // 2
    if everyone and len(counts) == 1 and max(counts) * (len(matrix.gpus) - 1) > total:
        # More links a pair than a GPU has for all of its peers: they go through a switch.
        rate = max(counts) * each
        return [Link(ends[g], f"{node}/NVSwitch", rate, latency / 2, "nvlink") for g in matrix.gpus]
    return [Link(ends[a], ends[b], n * each, latency, "nvlink") for (a, b), n in pairs.items()]


def _pcie(matrix: Matrix, device: Device, ends: dict, node: int) -> list[Link]:
    """The PCIe tree: what is within PIX of each other hangs under one switch, those within PXB under the next, ..."""
    names = [*matrix.gpus, *matrix.nics]
    below = {n: ends[n] for n in names}
    links = []
    for rank, code in enumerate(_PCIE):
        groups = _within(matrix, names, rank)
        rate = _UPI if code == "SYS" else device.host_bandwidth or 25e9
        above = {n: f"{node}/{code}{g}" for g, members in enumerate(groups) for n in members}
        for low, high in dict.fromkeys((below[n], above[n]) for n in names):
            links.append(Link(low, high, rate, _LATENCY["pcie"] / 2, "upi" if code == "SYS" else "pcie"))
        below = above
    return links


def _within(matrix: Matrix, names: list[str], rank: int) -> list[list[str]]:
    """Groups of names that reach each other by PCIe within _PCIE[rank]; SYS joins all."""
    if _PCIE[rank] == "SYS":
        return [names]
    near, groups, seen = set(_PCIE[: rank + 1]), [], set()
    for name in names:
        if name in seen:
            continue
        members, todo = [], [name]
        while todo:
            a = todo.pop()
            if a not in seen:
                seen.add(a)
                members.append(a)
                todo += [b for b in names if matrix.cells[a, b] in near]
        groups.append(sorted(members, key=names.index))
    return groups
