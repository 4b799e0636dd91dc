"""NCCL's topology XML: an NVSwitch node, a cube mesh, bridged pairs on a cloud machine, and malformed ones."""

from pathlib import Path

import pytest

from lensjax._errors import ClusterError
from lensjax.topology.discover import nccl_xml

TEXTS = Path(__file__).parent / "texts"


def text(name):
    return (TEXTS / name).read_text()


def tiers(body, **options):
    cluster = nccl_xml.discover(body, **options).cluster
    return [(t.name, t.size, round(t.usable / 1e9, 2), t.kind) for t in cluster.tiers], cluster


def test_h100_node_with_nvswitch_and_a_nic_for_each_gpu():
    found, cluster = tiers(text("nccl_p5_switch.xml"), nodes=2)
    assert found == [("nvlink", 8, 450.0, "switch"), ("network", 16, 50.0, "switch")]
    assert cluster.tiers[1].nic_sharing == 1 and cluster.device.name == "H100-SXM5-80GB"


def test_v100_cube_mesh_whose_gpus_share_nics_in_pairs():
    found, cluster = tiers(text("nccl_dgx1_cube.xml"), nodes=2)
    assert found == [("nvlink", 8, 150.0, "mesh"), ("network", 16, 6.25, "switch")]
    assert cluster.tiers[1].nic_sharing == 2 and nccl_xml.discover(text("nccl_dgx1_cube.xml")).breaking


def test_bridged_pairs_with_an_unknown_pcie_speed_and_one_socket_nic():
    found, cluster = tiers(text("nccl_ncv4_pairs.xml"), nodes=4)
    assert [(n, s) for n, s, *_ in found] == [("nvlink", 2), ("upi", 4), ("network", 16)]
    assert found[2][2] == round(100 / 8 / 4, 2)  # 100 Gb/s for four GPUs
    assert any("PCIe link without a known speed" in n for n in cluster.notes)


def test_amd_sockets_and_two_hosts_in_one_file():
    one = text("nccl_p5_switch.xml")
    body = one.replace('<system version="1">', "").replace("</system>", "")
    second = (
        body.replace("0xaa11eea3fd2808", "0xbb")
        .replace("0000:4", "0001:4")
        .replace("0000:5", "0001:5")
        .replace("0000:6", "0001:6")
    )
    second = (
        second.replace("0000:7", "0001:7")
        .replace("0000:8", "0001:8")
        .replace("0000:9", "0001:9")
        .replace("0000:a", "0001:a")
        .replace("0000:b", "0001:b")
    )
    for i in range(8):
        second = second.replace(f'rank="{i}"', f'rank="{i + 8}"')
    cluster = nccl_xml.discover(f'<system version="1">{body}{second}</system>').cluster
    assert cluster.devices == 16


def test_pcie_only_node():
    body = "".join(
        f'<cpu numaid="{c}" vendor="GenuineIntel">'
        + "".join(
            f'<pci busid="0000:{c}{g}:00.0" link_speed="16.0 GT/s PCIe" link_width="16">'
            f'<gpu dev="{2 * c + g}" sm="86" rank="{2 * c + g}"/></pci>'
            for g in range(2)
        )
        + "</cpu>"
        for c in range(2)
    )
    found, _ = tiers(f'<system version="1">{body}</system>', device="A100-SXM4-40GB")  # 86 is none of the catalogue's
    assert [(n, s) for n, s, *_ in found] == [("pcie", 2), ("upi", 4)]
    assert found[0][2] == pytest.approx(31.51, abs=0.01)  # 16 GT/s x 16 lanes, 128/130 coding


def test_ranks_give_the_order_of_devices():
    body = '<cpu numaid="0">' + "".join(
        f'<pci busid="0000:0{g}:00.0" link_speed="16 GT/s" link_width="16">'
        f'<gpu dev="{g}" sm="90" rank="{1 - g}"/></pci>'
        for g in range(2)
    )
    assert nccl_xml.parse(f'<system version="1">{body}</cpu></system>').devices == 2


def broken(name, old, new, count=1):
    whole = text(name)
    assert old in whole
    return whole.replace(old, new, count)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: "", "line 1"),
        (lambda: text("nccl_p5_switch.xml")[:900], "line "),  # cut off
        (lambda: broken("nccl_p5_switch.xml", "</gpu>", "</gqu>"), "line 15"),
        (lambda: "<topology/>", "<system>"),
        (lambda: '<system version="1"></system>', "<cpu> elements"),
        (lambda: '<system version="1"><cpu numaid="0"/></system>', "no <gpu>"),
        (lambda: broken("nccl_dgx1_cube.xml", 'count="2"', 'count="1"'), "the same number at the other end"),
        (lambda: broken("nccl_dgx1_cube.xml", 'target="0000:07:00.0"', 'target="0000:77:00.0"'), "line 6"),
        (lambda: broken("nccl_dgx1_cube.xml", 'rank="3"', 'rank="three"'), "whole number"),
        (lambda: broken("nccl_ncv4_pairs.xml", ' busid="0002:00:00.0"', ""), "attribute busid"),
        (lambda: broken("nccl_p5_switch.xml", 'speed="400000"', 'speed="0"', 99), "above 0"),
    ],
)
def test_a_malformed_text_is_an_error_with_its_line(bad, said):
    with pytest.raises(ClusterError) as e:
        nccl_xml.discover(bad(), nodes=2)
    assert said in str(e.value)
