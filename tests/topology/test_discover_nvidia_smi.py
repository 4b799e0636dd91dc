"""`nvidia-smi topo -m`: texts of several driver generations, and malformed ones."""

from pathlib import Path

import pytest

from lensjax._errors import ClusterError
from lensjax.topology.discover import nvidia_smi

TEXTS = Path(__file__).parent / "texts"


def text(name):
    return (TEXTS / name).read_text()


def tiers(name, **options):
    cluster = nvidia_smi.discover(text(name), **options).cluster
    return [(t.name, t.size, round(t.usable / 1e9, 2), t.kind) for t in cluster.tiers], cluster


def test_h100_with_nvswitch_and_twelve_nics():
    found, cluster = tiers("smi_h100_535.txt", nodes=4)
    assert found == [("nvlink", 8, 450.0, "switch"), ("network", 32, 50.0, "switch")]
    assert cluster.device.name == "H100-SXM5-80GB" and cluster.regular
    assert any("does not name the GPUs" in n for n in cluster.notes) and any("catalogue" in n for n in cluster.notes)


def test_the_device_and_the_nics_can_be_told():
    found, cluster = tiers("smi_h100_535.txt", device="B200-SXM6-180GB", nodes=2, nic_bandwidth=25e9)
    assert found == [("nvlink", 8, 900.0, "switch"), ("network", 16, 25.0, "switch")]
    assert cluster.notes == ()


def test_a100_with_old_nic_names():
    found, cluster = tiers("smi_a100_470.txt", nodes=2)
    assert found == [("nvlink", 8, 300.0, "switch"), ("network", 16, 25.0, "switch")]
    assert cluster.device.name == "A100-SXM4-80GB"
    assert nvidia_smi.parse(text("smi_a100_470.txt")).nics == tuple(f"mlx5_{i}" for i in range(10))


def test_v100_cube_mesh_in_columns_of_spaces():
    found, cluster = tiers("smi_v100_440.txt")
    assert found == [("nvlink", 8, 150.0, "mesh")] and cluster.device.name == "V100-SXM2-32GB"
    breaking = {(a, b) for a, b, _ in nvidia_smi.discover(text("smi_v100_440.txt")).breaking}
    assert {(0, 5), (0, 6), (0, 7)} <= breaking and (0, 3) not in breaking
    several, cluster = tiers("smi_v100_440.txt", nodes=4)
    assert several[1] == ("network", 32, 6.25, "switch") and cluster.tiers[1].nic_sharing == 8  # one NIC for 8


def test_pcie_only_node_has_a_tier_for_switch_socket_and_node():
    found, _ = tiers("smi_pcie_550.txt")
    assert found == [("pcie", 2, 25.0, "switch"), ("pcie-2", 4, 12.5, "switch"), ("upi", 8, 2.5, "switch")]


def test_bridged_pairs_copied_from_a_terminal_with_its_underlines():
    found, cluster = tiers("smi_a100_bridges_ansi.txt")
    assert [(n, s) for n, s, *_ in found] == [("nvlink", 2), ("upi", 4)] and found[0][2] == 300.0
    assert cluster.tier_of([[0, 1], [2, 3], [1, 2]]).tolist() == [0, 0, 1]


def test_virtual_machine_without_nics():
    assert tiers("smi_p4d_vm.txt")[0] == [("nvlink", 8, 300.0, "switch")]
    assert tiers("smi_p4d_vm.txt", nodes=2)[0][1][1:3] == (16, 25.0)


def test_very_old_driver_says_soc():
    found, cluster = tiers("smi_p100_375.txt")
    assert [(n, s) for n, s, *_ in found] == [("pcie", 2), ("upi", 4)]
    assert any("no NVLink at all" in n for n in cluster.notes)


def test_text_around_the_matrix_and_windows_line_ends_do_not_matter():
    around = "$ nvidia-smi topo -m\r\n" + text("smi_h100_535.txt").replace("\n", "\r\n") + "\r\n$ \r\n"
    assert nvidia_smi.parse(around) == nvidia_smi.parse(text("smi_h100_535.txt"))


def broken(name, old, new, count=1):
    whole = text(name)
    assert old in whole
    return whole.replace(old, new, count)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: "", "no header line"),
        (lambda: "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "no header line"),
        (lambda: "\n".join(text("smi_h100_535.txt").splitlines()[:6]), "line 6 before the row of GPU5"),
        (lambda: text("smi_h100_535.txt")[:300], "line 3"),
        (lambda: text("smi_h100_535.txt")[: text("smi_h100_535.txt").index("\nNIC7\t")], "before the row of NIC7"),
        (lambda: broken("smi_h100_535.txt", "PXB\tNODE", "PXBNODE"), "line 2"),  # a tab lost when pasting
        (lambda: broken("smi_a100_470.txt", "NV12", "NVL12"), "'NVL12'"),
        (lambda: broken("smi_pcie_550.txt", "PIX", "NODE"), "line 3"),  # the two cells of a pair differ
        (lambda: broken("smi_v100_440.txt", "GPU3    NV2", "GPU2    NV2"), "one row for GPU2"),
        (lambda: broken("smi_v100_440.txt", "GPU1    GPU2", "GPU1    GPU1"), "line 1"),
        (lambda: broken("smi_v100_440.txt", "GPU7    SYS     SYS", "GPU9    SYS     SYS"), "line 9"),
        (lambda: broken("smi_pcie_550.txt", " X ", "PIX"), "X for itself"),
    ],
)  # fmt: skip
def test_a_malformed_text_is_an_error_with_its_line(bad, said):
    with pytest.raises(ClusterError) as e:
        nvidia_smi.discover(bad())
    assert said in str(e.value) and e.value.hint
