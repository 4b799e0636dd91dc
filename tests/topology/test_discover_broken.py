"""Texts that look right and are not: an error that names the line or the entry; never another machine."""

import json
from pathlib import Path

import pytest

from lensjax._errors import ClusterError
from lensjax.topology.discover import ibnet, kubernetes, nccl_xml, nvidia_smi, slurm

TEXTS = {path.name: path.read_text() for path in sorted((Path(__file__).parent / "texts").iterdir())}
CONF = "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\nSwitchName=s Switches=l[1-2]\n"
JOB = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_ON_NODE": "8"}
P5 = {"node.kubernetes.io/instance-type": "p5.48xlarge"}
TPU = {"cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice", "cloud.google.com/gke-tpu-topology": "2x2x2"}


def nodes(*labels):
    return json.dumps({"items": [{"metadata": {"name": f"n{i}", "labels": each}} for i, each in enumerate(labels)]})


def discovered(name, text):
    if name.startswith("smi"):
        return nvidia_smi.discover(text).cluster
    if name.startswith("nccl"):
        return nccl_xml.discover(text).cluster
    return ibnet.discover(text, "dgx-h100").cluster


@pytest.mark.few(6)
@pytest.mark.parametrize("name", list(TEXTS))
@pytest.mark.parametrize("how", ["crlf", "bom", "colour", "spaces at the end"])
def test_what_a_terminal_or_an_editor_adds_changes_nothing(name, how):
    text = TEXTS[name]
    changed = {
        "crlf": text.replace("\n", "\r\n"),
        "bom": "\ufeff" + text,
        "colour": "\x1b[1;4m" + text.replace("\n", "\x1b[0m\n\x1b[32m", 3),
        "spaces at the end": text.replace("\n", "   \n"),
    }[how]
    assert discovered(name, changed) == discovered(name, text)


def test_schedulers_texts_from_another_system_too():
    there = slurm.discover(JOB, "p5", "\ufeff\x1b[32m" + CONF.replace("\n", "\r\n"))
    assert there == slurm.discover(JOB, "p5", CONF)
    assert kubernetes.discover("\ufeff" + nodes(P5, P5)) == kubernetes.discover(nodes(P5, P5))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-999999999999]"}, "n\\[1-9"),
        ({"SLURM_JOB_NODELIST": "a[1-1000]b[1-1000]c[1-1000]"}, "a\\[1-1000\\]b"),
        ({"SLURM_JOB_NODELIST": "n1,n1"}, "n1,n1"),
        ({"SLURM_JOB_NODELIST": "n1 n2"}, "n1 n2"),
        ({"SLURM_GPUS_ON_NODE": "h100:4,a100:4"}, "h100:4,a100:4"),
        ({"SLURM_GPUS_ON_NODE": "²"}, "SLURM_GPUS_ON_NODE"),
        ({"SLURM_GPUS_ON_NODE": None, "SLURM_TASKS_PER_NODE": "8(x999999999999)"}, "TASKS_PER_NODE"),
        ({"SLURM_GPUS_ON_NODE": None, "SLURM_TASKS_PER_NODE": "8(x3),0"}, "without tasks"),
    ],
)
def test_a_broken_slurm_environment(environment, said):
    job = {k: v for k, v in {**JOB, **environment}.items() if v is not None}
    with pytest.raises(ClusterError, match=said):
        slurm.discover(job, "p5")


def test_gpus_taken_from_tasks_are_noted():
    found = slurm.discover({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "8(x2)"}, "p5")
    assert found.devices == 16 and any("one GPU for each task" in note for note in found.notes)


def test_a_key_twice_in_topology_conf():
    with pytest.raises(ClusterError, match="line 1"):
        slurm.discover(JOB, "p5", "SwitchName=l1 Nodes=n[1-2] Nodes=n[3-4]\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"items": [{"metadata": null}]}', r"items\[0\]"),
        ('{"items": [{"metadata": {"name": "a", "labels": {}}, "status": null}]}', "no one machine"),
        ('{"items": [{"metadata": {"name": "a", "labels": {}}, "status": {"capacity": null}}]}', "no one machine"),
        ('{"items": ' + "[" * 100_000, "not JSON"),
        (json.dumps({"items": [{"metadata": {"name": "a", "labels": P5}}] * 2}), "another node 'a'"),
        (nodes({**P5, "nvidia.com/gpu.count": "²"}), "n0"),
        (nodes(*[{**TPU, "cloud.google.com/gke-tpu-topology": "0x4x4"}]), "topologies"),
        (nodes(*[{**TPU, "cloud.google.com/gke-tpu-topology": "4x4x4"}] * 3), "3 nodes in 1 slices of 4x4x4, 64 chips"),
        (nodes({**TPU, "google.com/tpu": "4"}), "1 nodes in 1 slices"),
    ],
)
def test_broken_kubernetes_nodes(text, said):
    with pytest.raises(ClusterError, match=said):
        kubernetes.discover(text)


def test_a_slice_with_all_its_nodes_and_gpus_elsewhere():
    found = kubernetes.discover(nodes(TPU, TPU, P5))
    assert found.tiers[0].shape == (2, 2, 2) and found.notes == ("1 nodes with GPUs left out: the rest are TPUs",)


GPU = (
    '<system version="1"><cpu numaid="0">\n<pci busid="0000:07:00.0" link_speed="16 GT/s" link_width="16">\n'
    '<gpu dev="0" sm="90" rank="0">\n<nvlink target="0000:d0:00.0" count="4" tclass="0x068000"/>\n</gpu></pci>'
    "</cpu></system>"
)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('sm="90"', 'sm="89"', "compute capability 89"),
        ('sm="90"', 'sm="120"', "compute capability 120"),
        ('sm="90" ', "", "line 3"),
        ('count="4" ', "", "line 4"),
        ('count="4"', 'count="0"', "line 4"),
        ("</gpu>", '<nvlink target="0000:d0:00.0" count="4" tclass="0x068000"/></gpu>', "line 5.*d0:00.0"),
        ("<gpu dev", '<nvlink target="0000:d1:00.0" count="1"/><gpu dev', "line 3"),
        ('"16 GT/s"', '"0 GT/s"', "line 2"),
        ('link_width="16"', 'link_width="-16"', "line 2"),
    ],
)
def test_broken_nccl_xml(old, new, said):
    assert nccl_xml.discover(GPU).cluster.device.name == "H100-SXM5-80GB"
    with pytest.raises(ClusterError, match=said):
        nccl_xml.discover(GPU.replace(old, new))


@pytest.mark.parametrize("cell", ["NV0", "NV99", "NV", "nv4", "P2P"])
def test_a_cell_that_nvidia_smi_never_prints(cell):
    text = f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{cell}\t0-63\nGPU1\t{cell}\t X \t0-63\n"
    with pytest.raises(ClusterError, match="line 2"):
        nvidia_smi.discover(text)


@pytest.mark.parametrize(
    "text", ["", "bash: nvidia-smi: command not found", "NVIDIA-SMI has failed", "GPU  Name  Bus-Id"]
)
def test_what_is_no_matrix_is_said_to_be_none(text):
    with pytest.raises(ClusterError, match="no header line"):
        nvidia_smi.discover(text)


def test_an_adapter_without_a_name_is_not_another_host():
    text = TEXTS["ib_two_units_hdr.txt"]
    line = next(line for line in text.splitlines() if line.startswith("Ca") and "gpu001 mlx5_0" in line)
    for broken in (line.split("#")[0], line.replace('mlx5_0"', ""), line.replace("gpu001 mlx5_0", "")):
        with pytest.raises(ClusterError, match="line"):
            ibnet.discover(text.replace(line, broken), "dgx-h100")
