"""Kubernetes node labels, as JSON and as the table of kubectl."""

import json

import pytest

from lensjax._errors import ClusterError
from lensjax.topology.discover import kubernetes

AWS = "topology.k8s.aws/network-node-layer-"


def nodes(*items, kind="List"):
    """(name, labels[, capacity]) -> the JSON of kubectl get nodes -o json."""
    made = [
        {
            "kind": "Node",
            "metadata": {"name": n, "labels": labels},
            "status": {"capacity": capacity[0] if capacity else {}},
        }
        for n, labels, *capacity in items
    ]
    return json.dumps({"kind": kind, "items": made}, indent=1)


def shape(text, machine=None):
    cluster = kubernetes.discover(text, machine)
    return [(t.name, t.size) for t in cluster.tiers], cluster


def test_eks_with_network_layers():
    items = [
        (
            f"ip-{i}",
            {
                "node.kubernetes.io/instance-type": "p5.48xlarge",
                AWS + "1": "nn-a",
                AWS + "2": f"nn-b{i // 4}",
                AWS + "3": f"nn-c{i // 2}",
            },
            {"nvidia.com/gpu": "8"},
        )
        for i in range(8)
    ]
    found, cluster = shape(nodes(*items))
    assert [s for _, s in found] == [8, 16, 32, 64]
    assert cluster.device.name == "H100-SXM5-80GB" and cluster.tiers[1].bandwidth == 50e9
    assert any("catalogue" in n for n in cluster.notes)


def test_gke_with_blocks_listed_in_any_order():
    items = [
        (
            f"gke-{i}",
            {
                "node.kubernetes.io/instance-type": "a3-megagpu-8g",
                "cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb",
                "cloud.google.com/gce-topology-block": "B",
                "cloud.google.com/gce-topology-subblock": f"s{i % 2}",
            },
        )
        for i in range(4)
    ]
    found, cluster = shape(nodes(*items))
    assert found == [("nvlink", 8), ("gce-topology-subblock", 16), ("gce-topology-block", 32)]
    assert any("no nvidia.com/gpu.count" in n for n in cluster.notes)


def test_gpu_feature_discovery_on_premises_with_nvidias_topology_labels():
    labels = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8"}
    net = "network.topology.nvidia.com/"
    items = [(f"n{i}", {**labels, net + "core": "c", net + "spine": "s", net + "leaf": f"l{i // 2}"}) for i in range(4)]
    found, cluster = shape(nodes(*items))
    assert [s for _, s in found] == [8, 16, 32] and any("by its GPU product" in n for n in cluster.notes)
    assert cluster.device.name == "A100-SXM4-80GB"


def test_a_node_with_seven_gpus_and_nodes_without_any():
    labels = {"node.kubernetes.io/instance-type": "p4d.24xlarge"}
    items = [
        ("a", {**labels, "nvidia.com/gpu.count": "8"}),
        ("b", {**labels, "nvidia.com/gpu.count": "7"}),
        ("cpu", {"kubernetes.io/os": "linux"}),
    ]
    found, cluster = shape(nodes(*items))
    assert found == [("nvlink", 8), ("efa", 16)] and cluster.missing == (15,)
    assert any("equally near" in n for n in cluster.notes)


@pytest.mark.parametrize(("pools", "sizes"), [(1, [256]), (4, [256, 1024])])
def test_tpu_slices_are_node_pools(pools, sizes):
    labels = {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "16x16",
    }
    items = [
        (f"t{p}-{i}", {**labels, "cloud.google.com/gke-nodepool": f"p{p}"}, {"google.com/tpu": "4"})
        for p in range(pools)
        for i in range(64)
    ]
    found, cluster = shape(nodes(*items))
    assert [s for _, s in found] == sizes and cluster.tiers[0].shape == (16, 16)


def test_the_table_of_show_labels():
    row = "node{0} Ready <none> 12d v1.29.1 node.kubernetes.io/instance-type=p5.48xlarge,nvidia.com/gpu.count=8,zone=a"
    text = "NAME    STATUS   ROLES    AGE   VERSION   LABELS\n" + "\n".join(row.format(i) for i in range(3))
    assert shape(text)[1].devices == 24


def test_one_node_and_a_machine_that_is_told():
    item = json.dumps({"kind": "Node", "metadata": {"name": "x", "labels": {"nvidia.com/gpu.count": "4"}}})
    assert shape(item, "dgx-h100")[0] == [("nvlink", 4)]


LABELS = {"node.kubernetes.io/instance-type": "p5.48xlarge", "nvidia.com/gpu.count": "8"}


def tpu(shape):
    return {"cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice", "cloud.google.com/gke-tpu-topology": shape}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither JSON nor a table"),
        ("error: You must be logged in to the server (Unauthorized)", "neither JSON nor a table"),
        (nodes(("a", LABELS))[:-30], "line "),
        ('{"kind": "PodList"}', "'PodList' without items"),
        (nodes(), "no nodes"),
        ('{"items": [{"metadata": {}}]}', "items[0]"),
        (nodes(("a", {"nvidia.com/gpu.count": "8"})), "no one machine"),
        (nodes(("a", LABELS), ("b", {**LABELS, "node.kubernetes.io/instance-type": "p4d.24xlarge"})), "p4d.24xlarge"),
        (nodes(("a", {**LABELS, "nvidia.com/gpu.count": "many"})), "count of 'many'"),
        (nodes(("cpu", {"kubernetes.io/os": "linux"})), "no one machine"),
        (nodes(("t", tpu("big"))), "TPU kinds"),
        (nodes(("t", tpu("4x4x4")), ("u", tpu("2x2x4"))), "TPU kinds"),
        ("NAME STATUS LABELS\n", "before the first node"),
        ("NAME STATUS LABELS\nnode0 Ready", "line 2"),
    ],
)
def test_a_malformed_text_is_an_error(text, said):
    with pytest.raises(ClusterError) as e:
        kubernetes.discover(text)
    assert said in str(e.value)
