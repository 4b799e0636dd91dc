"""`ibnetdiscover`: rail-optimised, oversubscribed and one-switch fabrics, and malformed texts."""

from pathlib import Path

import pytest

from lensjax._errors import ClusterError
from lensjax.topology.discover import ibnet

TEXTS = Path(__file__).parent / "texts"


def text(name):
    return (TEXTS / name).read_text()


def tiers(name, machine="dgx-a100", **options):
    cluster = ibnet.discover(text(name), machine, **options).cluster
    return [
        (t.size, round(t.usable / 1e9, 3), t.nic_sharing, round(t.oversubscription, 2)) for t in cluster.tiers
    ], cluster


def test_two_units_with_a_leaf_for_each_rail():
    found, cluster = tiers("ib_two_units_hdr.txt")
    assert found == [(8, 300.0, 1, 1.0), (16, 6.25, 4, 1.0), (32, 6.25, 4, 1.0)]  # 2 x 200 Gb/s for 8 GPUs
    assert cluster.device.name == "A100-SXM4-80GB" and any("catalogue" in n for n in cluster.notes)
    assert len(ibnet.parse(text("ib_two_units_hdr.txt")).switches) == 6  # and the aggregation node is no host


def test_an_oversubscribed_spine():
    found, _ = tiers("ib_oversubscribed_ndr.txt")
    assert found[1:] == [(32, 6.25, 8, 1.0), (64, 3.125, 8, 2.0)]


def test_one_switch():
    found, cluster = tiers("ib_one_leaf_edr.txt", "dgx1-v100")
    assert [t[0] for t in found] == [8, 24] and found[1][1] == round(100 / 8 / 8, 3)
    assert cluster.devices == 24


def test_some_of_the_hosts_in_a_given_order():
    found, cluster = tiers("ib_two_units_hdr.txt", hosts=["gpu003", "gpu001", "gpu004"])
    assert [t[0] for t in found] == [8, 16, 32] and cluster.devices == 24
    assert cluster.tier_of([[0, 16], [0, 8]]).tolist() == [1, 2]


def test_hosts_are_in_natural_order():
    assert ibnet.parse(text("ib_one_leaf_edr.txt")).hosts == ["gpu001", "gpu002", "gpu003"]
    assert sorted(["node10", "node2", "a1"], key=ibnet._natural) == ["a1", "node2", "node10"]


MANUAL = """
#
# Topology file: generated on Tue Jun  5 14:15:10 2007
#
# Max of 3 hops discovered
# Initiated from node 0008f10403960558 port 0008f10403960559

Non-Chassis Nodes

vendid=0x8f1
switchguid=0x5442ba00003080(5442ba00003080)
Switch  24 "S-005442ba00003080"         # "ISR9024 Voltaire" base port 0 lid 6 lmc 0
[22]    "H-0008f10403961354"[1](8f10403961355)         # "n2 HCA-1" lid 4 4xSDR
[8]     "H-0008f10403960558"[2](8f1040396055a)         # "n1 HCA-1" lid 14 4xSDR

caguid=0x8f10403961354
Ca      2 "H-0008f10403961354"          # "n2 HCA-1"
[1](8f10403961355)      "S-005442ba00003080"[22]       # lid 4 lmc 1 "ISR9024 Voltaire" lid 6 4xSDR

caguid=0x8f10403960558
Ca      2 "H-0008f10403960558"          # "n1 HCA-1"
[2](8f1040396055a)      "S-005442ba00003080"[8]        # lid 14 lmc 1 "ISR9024 Voltaire" lid 6 4xSDR
"""


def test_the_form_of_the_manual_page():
    network = ibnet.parse(MANUAL)
    assert network.hosts == ["n1", "n2"] and set(network.cables.values()) == {1e9}
    assert ibnet.parse("ibwarn: [6931] sim_connect: attached\n" + MANUAL) == network


def broken(old, new, whole=MANUAL):
    assert old in whole
    return whole.replace(old, new, 1)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: "", "no switch and no adapter"),
        (lambda: "src/query_smp.c:228; umad (DR path slid 0; dlid 0; 0 Attr 0x11:0) bad status 110", "line 1"),
        (lambda: MANUAL[: MANUAL.index("caguid=0x8f10403960558")], "before the block of H-0008f10403960558"),
        (lambda: MANUAL[: MANUAL.rindex("[2]")], "before the ports of H-0008f10403960558"),
        (lambda: MANUAL[:-20], "[port]"),
        (lambda: broken("4xSDR", "4xWARP"), "line 13"),
        (lambda: broken('003080"[22]', '003080"[21]'), "line 18"),
        (lambda: broken("lid 6 4xSDR", "lid 6 4xDDR"), "at one rate"),
        (lambda: broken("[22]    ", "[8]    "), "port 8 once"),
        (lambda: broken('Ca      2 "H-0008f10403960558"', 'Ca      2 "H-0008f10403961354"'), "one block for"),
        (lambda: broken("vendid=0x8f1", '[1] "H-1"[1] # "x" lid 1 4xSDR'), "above the ports"),
        (lambda: broken("Non-Chassis Nodes", "Some Nodes"), "line 8"),
    ],
)
def test_a_malformed_text_is_an_error_with_its_line(bad, said):
    with pytest.raises(ClusterError) as e:
        ibnet.discover(bad(), "dgx-a100")
    assert said in str(e.value)


def test_a_host_that_is_not_there():
    with pytest.raises(ClusterError, match="n9"):
        ibnet.discover(MANUAL, "dgx-a100", ["n1", "n9"])
