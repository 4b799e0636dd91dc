"""Kubernetes: nodes and their labels, as JSON (`kubectl get nodes -o json`) or the table of `--show-labels`.

Which machine, how many accelerators, and which block, rack or switch a node hangs under, as the clouds and NVIDIA's
operators label them. Bandwidths come from the catalogue's machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from lensjax._errors import ClusterError
from lensjax.topology import catalogue
from lensjax.topology.cluster import Cluster
from lensjax.topology.discover.hosts import Host, cluster_of_hosts
from lensjax.topology.discover.text import bad, clean, cut_off

SOURCE = "Kubernetes node labels"
_TYPE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
# Families of labels that place a node, outermost first. NVIDIA topograph; AWS EKS; Google GKE.
_PLACES = (
    ("network.topology.nvidia.com/core", "network.topology.nvidia.com/spine", "network.topology.nvidia.com/leaf"),
    (
        "network.topology.nvidia.com/datacenter",
        "network.topology.nvidia.com/spine",
        "network.topology.nvidia.com/block",
    ),
    tuple(f"topology.k8s.aws/network-node-layer-{i}" for i in (1, 2, 3)),
    ("cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock"),
    ("topology.kubernetes.io/zone", "topology.kubernetes.io/rack"),
    ("topology.kubernetes.io/zone",),
)
_TPU = {
    "tpu-v4-podslice": "tpu-v4",
    "tpu-v5-lite-podslice": "tpu-v5e",
    "tpu-v5p-slice": "tpu-v5p",
    "tpu-v6e-slice": "tpu-v6e",
}
_TPU_PER_NODE = (1, 4, 8)  # chips of a GKE node: ct4p, ct5p: 4; ct5lp, ct6e: 1, 4 or 8
# nvidia.com/gpu.product (GPU feature discovery) -> the catalogue's machine with that device
_PRODUCT = {
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "GB200": "gb200-nvl72",
    "A100-SXM4-40GB": "dgx-a100-40",
    "A100-SXM4-80GB": "dgx-a100-80",
    "V100": "dgx1-v100",
}


def parse(text: str) -> dict[str, dict[str, str]]:
    """Node name -> labels, in the order of the text. Raises ClusterError with the line."""
    text = clean(text)
    nodes = _from_json(text) if text.lstrip().startswith("{") else _from_table(text)
    if not nodes:
        raise ClusterError(f"{SOURCE}: no nodes", hint="paste the output of kubectl get nodes -o json")
    return nodes


def _from_json(text: str) -> dict[str, dict[str, str]]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        lines = text.splitlines()
        raise bad(SOURCE, e.lineno, lines[min(e.lineno, len(lines)) - 1], f"JSON ({e.msg})") from e
    except (ValueError, RecursionError) as e:
        raise ClusterError(f"{SOURCE}: not JSON that lensjax reads: {e}", hint="kubectl get nodes -o json") from e
    items = data.get("items") if isinstance(data.get("items"), list) else [data] if data.get("kind") == "Node" else None
    if items is None:
        raise ClusterError(
            f"{SOURCE}: JSON of kind {data.get('kind')!r} without items", hint="kubectl get nodes -o json"
        )
    nodes = {}
    for i, item in enumerate(items):
        metadata = _under(item, "metadata")
        name, labels = metadata.get("name"), metadata.get("labels")
        if not isinstance(name, str) or not isinstance(labels, Mapping):
            raise ClusterError(f"{SOURCE}: items[{i}] has no metadata.name or metadata.labels")
        if name in nodes:
            raise ClusterError(f"{SOURCE}: items[{i}] is another node {name!r}", hint="each node once")
        nodes[name] = {**{str(k): str(v) for k, v in labels.items()}, **_capacity(item)}
    return nodes


def _under(data: Any, key: str) -> Mapping[str, Any]:
    found = data.get(key) if isinstance(data, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _capacity(item: Mapping[str, Any]) -> dict[str, str]:
    """Counts of accelerators that the node offers, under the label names that say the same."""
    capacity = _under(_under(item, "status"), "capacity")
    names = {"nvidia.com/gpu": "nvidia.com/gpu.count", "google.com/tpu": "google.com/tpu", "amd.com/gpu": "amd.com/gpu"}
    return {label: str(capacity[key]) for key, label in names.items() if key in capacity}


def _from_table(text: str) -> dict[str, dict[str, str]]:
    """The table of `kubectl get nodes --show-labels`: the last column is comma-separated labels."""
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if line.split()[:1] == ["NAME"]), None)
    if header is None or lines[header].split()[-1] != "LABELS":
        raise ClusterError(f"{SOURCE}: neither JSON nor a table with NAME and LABELS", hint="kubectl get nodes -o json")
    nodes = {}
    for number, line in enumerate(lines[header + 1 :], header + 2):
        if not line.strip():
            continue
        words = line.split()
        labels = words[-1].split(",")
        if len(words) < len(lines[header].split()) or not all("=" in label for label in labels):
            raise bad(SOURCE, number, line, "as many columns as the header, the last KEY=VALUE,KEY=VALUE")
        if words[0] in nodes:
            raise bad(SOURCE, number, line, f"one row for {words[0]}")
        nodes[words[0]] = dict(label.split("=", 1) for label in labels)
    if len(lines) == header + 1:
        raise cut_off(SOURCE, len(lines), "the first node")
    return nodes


def discover(text: str, machine: str | None = None) -> Cluster:
    """The cluster of the nodes that have accelerators. `machine`: its catalogue name, where the labels do not tell."""
    nodes = {n: labels for n, labels in parse(text).items() if _is_tpu(labels) or _gpus(n, labels) != 0}
    tpus = {n: labels for n, labels in nodes.items() if _is_tpu(labels)}
    if tpus:
        cluster, rest = _tpu_cluster(tpus), len(nodes) - len(tpus)
        said = (f"{rest} nodes with GPUs left out: the rest are TPUs",) * (rest > 0)
        return dataclasses.replace(cluster, notes=(*cluster.notes, *said))
    machine, notes = (machine, []) if machine else _machine(nodes)
    found = catalogue.machine(machine)
    unit = catalogue.make(found, (1,)).devices
    family = next((f for f in _PLACES if nodes and all(k in labels for labels in nodes.values() for k in f)), ())
    if not family:
        notes.append("no label places the nodes in the network: taken as equally near")
    hosts = []
    for name, labels in nodes.items():
        count = _gpus(name, labels)
        hosts.append(Host(name, unit if count is None else count, tuple(labels[k] for k in family)))
        if count is None and "nvidia.com/gpu.count" not in "".join(notes):
            notes.append(f"no nvidia.com/gpu.count: {unit} devices a node, the catalogue's for {found.name}")
    hosts.sort(key=lambda h: h.path)  # nodes of one place together; the order within is the text's
    return cluster_of_hosts(hosts, found, "kubernetes", [k.rpartition("/")[2] for k in family], notes)


def _is_tpu(labels: Mapping[str, str]) -> bool:
    return "cloud.google.com/gke-tpu-accelerator" in labels


def _gpus(name: str, labels: Mapping[str, str]) -> int | None:
    """GPUs of a node; None where no label tells but the node is of an accelerator type; 0 for a node without any."""
    count = labels.get("nvidia.com/gpu.count") or labels.get("amd.com/gpu")
    if count is not None:
        if not re.fullmatch("[0-9]{1,6}", count):
            raise ClusterError(f"{SOURCE}: node {name} has a count of {count!r}", hint="expected a whole number")
        return int(count)
    known = any(labels.get(t, "") in _machine_names() for t in _TYPE)
    return None if known or "cloud.google.com/gke-accelerator" in labels else 0


def _machine_names() -> set[str]:
    return {alias for m in catalogue.machines().values() for alias in (m.name, *m.data.get("aliases", ()))}


def _machine(nodes: Mapping[str, Mapping[str, str]]) -> tuple[str, list[str]]:
    """(catalogue name, notes) from the instance type, else from the GPU product."""
    types = {next((labels[t] for t in _TYPE if t in labels), "") for labels in nodes.values()}
    known = types & _machine_names()
    if len(types) == 1 and known:
        return known.pop(), []
    products = {labels.get("nvidia.com/gpu.product", "") for labels in nodes.values()}
    matches = {name for p in products for key, name in _PRODUCT.items() if p and key in p.split("NVIDIA-")[-1]}
    if "gb200-nvl72" in matches:
        matches.discard("dgx-b200")
    if len(matches) != 1:
        raise ClusterError(
            f"{SOURCE}: instance types {sorted(types)}, GPU products {sorted(products)}: no one machine",
            hint="pass machine= with a name of the catalogue",
        )
    name = matches.pop()
    return name, [f"instance type not in the catalogue: taken for {name} by its GPU product"]


def _tpu_cluster(nodes: Mapping[str, Mapping[str, str]]) -> Cluster:
    """Slices of one shape; a slice is a node pool."""
    kinds = {labels["cloud.google.com/gke-tpu-accelerator"] for labels in nodes.values()}
    shapes = {labels.get("cloud.google.com/gke-tpu-topology", "") for labels in nodes.values()}
    pools = {labels.get("cloud.google.com/gke-nodepool", "") for labels in nodes.values()}
    sides = next(iter(shapes)).split("x")
    if len(kinds) != 1 or len(shapes) != 1 or not all(re.fullmatch("[1-9][0-9]{0,4}", s) for s in sides):
        raise ClusterError(
            f"{SOURCE}: TPU kinds {sorted(kinds)}, topologies {sorted(shapes)}", hint="slices of one kind and shape"
        )
    name = _TPU.get(kinds.pop())
    if name is None:
        raise ClusterError(f"{SOURCE}: TPU kind not known", hint=f"one of {', '.join(_TPU)}")
    shape = tuple(int(s) for s in sides)
    chips, counts = math.prod(shape) * len(pools), [labels.get("google.com/tpu", "") for labels in nodes.values()]
    told = all(re.fullmatch("[0-9]{1,6}", c) for c in counts)
    if sum(map(int, counts)) != chips if told else chips % len(nodes) or chips // len(nodes) not in _TPU_PER_NODE:
        raise ClusterError(
            f"{SOURCE}: {len(nodes)} nodes in {len(pools)} slices of {next(iter(shapes))}, {chips} chips",
            hint="every node of each slice: is the text cut off?",
        )
    return catalogue.make(catalogue.machine(name), shape if len(pools) == 1 else (len(pools), *shape))
