"""The price of a collective against formulas worked out by hand, and its contract."""

import itertools

import numpy as np
import pytest

from lensjax._errors import ClusterError
from lensjax.topology.cluster import Cluster, Device, Tier
from lensjax.topology.collectives import OPS, collective_choice, collective_lines, collective_time, span, wire_bytes
from lensjax.topology.collectives_profile import PLAIN, Profile

IDEAL = Profile("ideal", PLAIN)
S = 1e9


def machine(*tiers):
    return Cluster("test", Device("A100", "cuda", 1e10, 1e12, {"float32": 1e13}), tiers)


NODES = machine(Tier("node", 8, 300e9, 2e-6), Tier("net", 32, 25e9, 5e-6))
ALL = np.arange(32).reshape(1, 32)


def test_ring_in_a_node_is_patarasuk_and_yuan():
    seconds = collective_time(NODES, "all_reduce", np.arange(8), S, algorithm="ring", profile=IDEAL)
    assert seconds == pytest.approx(14 * 2e-6 + 14 / 8 * S / 300e9)


def test_a_flat_ring_over_nodes_is_bound_by_what_leaves_a_node():
    # 8 NICs of 25 GB/s carry the rings; 3 of 31 links a pass are between nodes.
    seconds = collective_time(NODES, "all_gather", ALL, S, algorithm="ring", profile=IDEAL)
    assert seconds == pytest.approx(28 * 2e-6 + 3 * 5e-6 + 31 / 32 * S / 200e9)


def test_hierarchical_is_the_sum_of_its_stages():
    seconds = collective_time(NODES, "all_reduce", ALL, S, algorithm="hierarchical", profile=IDEAL)
    inside, across = 2 * 7 / 8 * S / 300e9, 2 * 3 / 4 * (S / 8) / 25e9
    latency = 14 * 2e-6 + 6 * 5e-6
    pieces = (1, 2, 4, 8, 16, 32)
    assert seconds == pytest.approx(min(latency * m + max(inside, across) + min(inside, across) / m for m in pieces))


def test_three_tiers_of_hierarchy():
    racks = machine(Tier("node", 8, 300e9, 2e-6), Tier("rack", 32, 25e9, 5e-6), Tier("spine", 64, 12.5e9, 7e-6))
    small = collective_time(racks, "reduce_scatter", np.arange(64), 1e3, algorithm="hierarchical", profile=IDEAL)
    stages = 7 / 8 * 1e3 / 300e9 + 3 / 4 * (1e3 / 8) / 25e9 + 1 / 2 * (1e3 / 32) / 12.5e9
    hops = 7 * 2e-6 + 2 * 5e-6 + 1 * 7e-6  # one chunk; a tree over the rack's four nodes
    assert small == pytest.approx(hops + stages, rel=1e-3)


def test_all_to_all_sends_each_byte_straight_to_its_owner():
    seconds = collective_time(NODES, "all_to_all", ALL, S, profile=IDEAL)
    assert seconds == pytest.approx(2e-6 + 5e-6 + 24 / 32 * S / 25e9)


def test_strided_groups_split_the_nics_that_one_group_has_for_itself():
    strided = np.arange(32).reshape(4, 8).T
    assert span(NODES, strided).egress[0, 1] == pytest.approx(25e9)
    assert span(NODES, strided[:1]).egress[0, 1] == pytest.approx(25e9)  # nic_sharing 1: a device has one NIC, no more
    assert span(NODES, ALL).egress[0, 1] == pytest.approx(200e9)


def test_one_device_alone_has_the_whole_shared_nic():
    shared = machine(Tier("node", 8, 300e9, 2e-6), Tier("net", 16, 6.25e9, 5e-6, nic_sharing=2))
    strided = np.arange(16).reshape(2, 8).T
    assert span(shared, strided).egress[:, 1].tolist() == [6.25e9]
    assert span(shared, strided[:1]).egress[:, 1].tolist() == [12.5e9]


def test_permute_shares_links_like_the_flows_do():
    ring = np.arange(32)  # one flow leaves each node
    assert collective_time(NODES, "permute", ring, S, profile=IDEAL) == pytest.approx(5e-6 + S / 25e9)
    slow = machine(Tier("node", 8, 300e9, 2e-6), Tier("net", 16, 3e9, 5e-6, nic_sharing=8))
    pairs = np.arange(16).reshape(2, 8).T  # eight flows on one NIC of 24 GB/s
    assert collective_time(slow, "permute", pairs, S, profile=IDEAL) == pytest.approx(5e-6 + S / 3e9)
    assert collective_time(slow, "permute", pairs[:1], S, profile=IDEAL) == pytest.approx(5e-6 + S / 24e9)


def test_multicast_adds_in_the_switch():
    hopper = machine(Tier("node", 8, 450e9, 2e-6, multicast=True))
    assert collective_time(
        hopper, "all_reduce", np.arange(8), S, algorithm="multicast", profile=IDEAL
    ) == pytest.approx(2 * 2e-6 + S / 450e9)


def test_a_half_duplex_link_has_half_the_bandwidth():
    half = machine(Tier("bus", 8, 300e9, 2e-6, full_duplex=False))
    assert span(half, np.arange(8)).egress[0, 0] == pytest.approx(150e9)


def test_torus_axis_has_the_links_of_its_dimension():
    torus = machine(Tier("ici", 16, 400e9, 1e-6, kind="torus", shape=(4, 4), wrap=(True, True)))
    row, whole = np.arange(16).reshape(4, 4), np.arange(16)
    assert span(torus, row).egress[0, 0] == pytest.approx(200e9)
    assert span(torus, whole).egress[0, 0] == pytest.approx(400e9)
    line = machine(Tier("ici", 16, 400e9, 1e-6, kind="torus", shape=(4, 4), wrap=(False, False)))
    assert span(line, row).egress[0, 0] == pytest.approx(100e9)


def test_a_group_of_one_is_free_for_every_operation():
    for op in OPS:
        assert collective_time(NODES, op, [[3]], S) == 0.0
        assert wire_bytes(NODES, op, [[3]], S) == {}


def test_numbers_in_numbers_out_arrays_in_arrays_out():
    assert isinstance(collective_time(NODES, "all_reduce", ALL, S), float)
    seconds = collective_time(NODES, "all_reduce", ALL, np.array([[0.0, 1e3], [1e6, 1e9]]))
    assert seconds.shape == (2, 2)
    assert seconds[1, 1] == collective_time(NODES, "all_reduce", span(NODES, ALL), 1e9)


def test_the_price_as_lines_is_the_price():
    lines = collective_lines(NODES, "all_reduce", [[0, 1, 2], [7, 8, 9]])
    for size in (0.0, 1e5, 1e9):
        price = (lines[:, :, 0] + lines[:, :, 1] * size).min(axis=1).max()
        assert price == collective_time(NODES, "all_reduce", [[0, 1, 2], [7, 8, 9]], size)


def test_the_slowest_group_counts():
    mixed = np.array([[0, 1], [7, 8]])
    assert collective_time(NODES, "all_reduce", mixed, S) == collective_time(NODES, "all_reduce", [[7, 8]], S)


def test_wire_bytes_count_the_ring_on_each_tier():
    found = wire_bytes(NODES, "all_reduce", ALL, 32.0)
    assert found["net"] == pytest.approx(2 * 31 / 32 * 32 / 8)  # one ring leaves a node, its 8 members share it
    assert found["node"] == pytest.approx(2 * 31 / 32 * 32 * 7 / 8)
    assert wire_bytes(NODES, "all_reduce", ALL.reshape(4, 8).T, 32.0) == {"net": pytest.approx(2 * 3 / 4 * 32)}
    assert wire_bytes(NODES, "all_to_all", ALL, 32.0) == {"node": pytest.approx(7.0), "net": pytest.approx(24.0)}
    assert wire_bytes(NODES, "permute", [[0, 8]], 5.0) == {"net": 5.0}
    stages = wire_bytes(NODES, "all_reduce", ALL, 32.0, algorithm="hierarchical")
    assert stages == {"node": pytest.approx(2 * 7 / 8 * 32), "net": pytest.approx(2 * 3 / 4 * 32 / 8)}


def test_the_library_switches_protocol_and_algorithm_by_size():
    h100, node = Cluster.parse("dgx-h100:4"), np.arange(8)
    by_size = [collective_choice(h100, "all_reduce", node, s) for s in np.logspace(2, 10, 60)]
    assert by_size[0][1] == "LL" and by_size[-1] == ("multicast", "Simple")
    assert len(dict.fromkeys(by_size)) == sum(a != b for a, b in itertools.pairwise(by_size)) + 1  # no choice returns
    across = np.arange(32)
    assert (
        collective_choice(h100, "all_reduce", across, 1e3)[0] == "tree"
    )  # latency: log2 of the nodes, not their number


def test_efficiency_grows_with_size_and_is_not_two_constants():
    node, sizes = np.arange(8), np.array([1e5, 1e6, 1e7, 1e8, 1e9])
    seconds = collective_time(Cluster.parse("dgx-a100:1"), "all_reduce", node, sizes)
    slopes = np.diff(seconds) / np.diff(sizes)
    assert (np.diff(sizes / seconds) > 0).all()
    assert slopes[0] > 1.15 * slopes[-1]  # a straight line in bytes would have one slope


def test_a_million_prices_are_those_of_each_size():
    sizes = np.random.default_rng(0).uniform(1e3, 1e9, 1_000_000)
    cluster = Cluster.parse("dgx-h100:4")
    prices = collective_time(cluster, "all_reduce", ALL, sizes)
    assert prices.shape == sizes.shape
    np.testing.assert_allclose(prices[:5], [collective_time(cluster, "all_reduce", ALL, s) for s in sizes[:5]])


def test_sixteen_thousand_devices():
    big = Cluster.parse("dgx-h100:2048")
    for groups in (np.arange(16384).reshape(-1, 8), np.arange(16384).reshape(-1, 8).T, np.arange(16384)):
        assert collective_time(big, "all_reduce", groups, S) > 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: collective_time(NODES, "allreduce", ALL, S), "no collective 'allreduce'"),
        (lambda: collective_time(NODES, "all_reduce", [[0, 99]], S), "0..31"),
        (lambda: collective_time(NODES, "all_reduce", [[0, 0]], S), "twice"),
        (lambda: collective_time(NODES, "all_reduce", [[0.5, 1]], S), "whole numbers"),
        (lambda: collective_time(NODES, "all_reduce", ALL, -1.0), "at least 0"),
        (lambda: collective_time(NODES, "all_reduce", ALL, S, algorithm="magic"), "no algorithm 'magic'"),
        (lambda: collective_time(NODES, "all_reduce", ALL, S, algorithm="multicast"), "does not apply"),
    ],
)
def test_wrong_calls_say_what_was_found(call, text):
    with pytest.raises(ClusterError, match=text):
        call()


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf"), [1.0, float("nan")]])
def test_bytes_that_are_no_amount(size):
    with pytest.raises(ClusterError, match="at least 0 and finite"):
        collective_time(Cluster.parse("dgx-h100:2"), "all_reduce", [0, 1], size)


def test_groups_of_different_sizes_are_said_to_be_so():
    with pytest.raises(ClusterError, match="different sizes"):
        collective_time(Cluster.parse("dgx-h100:2"), "all_reduce", [[0, 1], [2]], 1e6)
