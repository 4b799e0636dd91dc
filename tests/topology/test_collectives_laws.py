"""What must hold of any price: more bytes, slower links and more damage never cost less; names do not matter."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lensjax.topology.cluster import Cluster, Slow
from lensjax.topology.collectives import OPS, collective_time, span, wire_bytes
from lensjax.topology.collectives_profile import profile_of

LAW = settings(max_examples=40, deadline=None)
SPECS = (
    "dgx-h100:4",
    "p4de:4",
    "gb200-nvl72:2",
    "dgx1-v100:2",
    "mi300x:2",
    "hbm2e-nvswitch:8",
    "tpu-v5e:8x8",
    "cpu:2x4",
)
BYTES = st.floats(1.0, 1e11)


@st.composite
def cases(draw):
    """(cluster, groups): the parts of a mesh axis, or a random subset."""
    cluster = Cluster.parse(draw(st.sampled_from(SPECS)))
    n = cluster.devices
    if draw(st.booleans()):
        members = draw(st.sampled_from([m for m in (2, 4, 8, 16, 36) if n % m == 0]))
        inner = draw(st.sampled_from([i for i in (1, 2, 4, 8) if n % (members * i) == 0]))
        return cluster, np.arange(n).reshape(-1, members, inner).swapaxes(1, 2).reshape(-1, members)
    size = draw(st.integers(2, min(n, 12)))
    return cluster, np.array([draw(st.lists(st.integers(0, n - 1), min_size=size, max_size=size, unique=True))])


@LAW
@given(cases(), st.sampled_from(OPS), BYTES, st.floats(1.0, 100.0))
def test_more_bytes_never_cost_less(case, op, size, factor):
    cluster, groups = case
    assert collective_time(cluster, op, groups, size * factor) >= collective_time(cluster, op, groups, size)


@LAW
@given(cases(), st.sampled_from(OPS), BYTES, st.data())
def test_a_slower_tier_never_costs_less(case, op, size, data):
    cluster, groups = case
    t = data.draw(st.integers(0, len(cluster.tiers) - 1))
    by = data.draw(st.floats(1.0, 10.0))
    tier = cluster.tiers[t]
    slower = dataclasses.replace(
        tier, bandwidth=tier.bandwidth / by, latency=tier.latency * data.draw(st.floats(1.0, 10.0))
    )
    slow = dataclasses.replace(cluster, tiers=(*cluster.tiers[:t], slower, *cluster.tiers[t + 1 :]))
    assert collective_time(slow, op, groups, size) >= collective_time(cluster, op, groups, size) * (1 - 1e-12)


@LAW
@given(cases(), st.sampled_from(OPS), BYTES, st.data())
def test_a_damaged_link_never_costs_less(case, op, size, data):
    cluster, groups = case
    slots = tuple(data.draw(st.sets(st.integers(0, cluster.capacity - 1), min_size=1, max_size=4)))
    tier = data.draw(st.sampled_from(cluster.tiers)).name
    damaged = dataclasses.replace(cluster, slow=(Slow(tier, slots, data.draw(st.floats(0.05, 1.0))),))
    assert collective_time(damaged, op, groups, size) >= collective_time(cluster, op, groups, size) * (1 - 1e-12)


@LAW
@given(cases(), st.sampled_from([op for op in OPS if op != "permute"]), BYTES, st.randoms())
def test_the_order_of_members_and_groups_does_not_matter(case, op, size, random):
    cluster, groups = case
    rows = [random.sample(row, len(row)) for row in groups.tolist()]
    random.shuffle(rows)
    assert collective_time(cluster, op, rows, size) == collective_time(cluster, op, groups, size)


@LAW
@given(cases(), st.sampled_from(OPS), BYTES, st.randoms())
def test_renaming_devices_does_not_matter(case, op, size, random):
    """Devices of one cluster under other numbers: the same slots, so the same price."""
    cluster, groups = case
    order = list(range(cluster.devices))
    random.shuffle(order)
    renamed = dataclasses.replace(cluster, order=tuple(order))
    name = np.argsort(order)  # slot -> its new id
    assert collective_time(renamed, op, name[groups], size) == collective_time(cluster, op, groups, size)


@LAW
@given(
    st.sampled_from([s for s in SPECS if not s.startswith("tpu")]), st.sampled_from(OPS), BYTES, st.randoms(), st.data()
)
def test_swapping_whole_units_does_not_matter(spec, op, size, random, data):
    """Nodes are alike: a group may sit in any of them, on any of their devices."""
    cluster = Cluster.parse(spec)
    node = cluster.tiers[0].size
    units = cluster.devices // node
    members = data.draw(st.integers(2, min(8, cluster.devices)))
    group = np.array(random.sample(range(cluster.devices), members))
    nodes = np.array(random.sample(range(units), units)) if len(cluster.tiers) == 2 else np.arange(units)
    inside = np.array([random.sample(range(node), node) for _ in range(units)])
    moved = nodes[group // node] * node + inside[group // node, group % node]
    assert np.isclose(
        collective_time(cluster, op, [moved], size), collective_time(cluster, op, [group], size), rtol=1e-9
    )


@LAW
@given(cases(), BYTES, st.sampled_from(["auto", "ring", "tree", "hierarchical"]))
def test_an_all_reduce_is_at_most_a_reduce_scatter_and_an_all_gather(case, size, algorithm):
    cluster, groups = case
    whole = collective_time(cluster, "all_reduce", groups, size, algorithm=algorithm)
    halves = [
        collective_time(cluster, op, groups, size, algorithm=algorithm) for op in ("reduce_scatter", "all_gather")
    ]
    assert whole <= sum(halves) * (1 + 1e-9)


@LAW
@given(cases(), BYTES)
def test_a_ring_all_reduce_is_exactly_its_two_halves(case, size):
    """With no cost per call: the two halves are two calls, each with a launch of its own."""
    cluster, groups = case
    profile = profile_of(cluster)
    free = tuple(dataclasses.replace(p, base=0.0) for p in profile.protocols)
    profile = dataclasses.replace(profile, launch=0.0, launch_outer=0.0, protocols=free, rendezvous=False)
    cost = [
        collective_time(cluster, op, groups, size, algorithm="ring", profile=profile)
        for op in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    assert np.isclose(cost[0], cost[1] + cost[2], rtol=1e-9)
    wire = [wire_bytes(cluster, op, groups, size) for op in ("all_reduce", "reduce_scatter", "all_gather")]
    for tier, bytes_ in wire[0].items():
        assert np.isclose(bytes_, wire[1][tier] + wire[2][tier], rtol=1e-9)


@LAW
@given(cases(), BYTES)
def test_a_reduce_scatter_is_at_most_an_all_reduce(case, size):
    cluster, groups = case
    assert collective_time(cluster, "reduce_scatter", groups, size) <= collective_time(
        cluster, "all_reduce", groups, size
    )


@LAW
@given(cases(), st.sampled_from([op for op in OPS if op != "permute"]), st.lists(BYTES, min_size=1, max_size=5))
def test_many_sizes_at_once_cost_what_they_cost_one_by_one(case, op, sizes):
    cluster, groups = case
    lies = span(cluster, groups)
    together = collective_time(cluster, op, lies, np.array(sizes))
    assert together.tolist() == [collective_time(cluster, op, groups, s) for s in sizes]


@LAW
@given(cases(), st.sampled_from(OPS), BYTES, st.floats(0.1, 10.0))
def test_wire_bytes_are_proportional_to_the_payload(case, op, size, factor):
    cluster, groups = case
    one, other = wire_bytes(cluster, op, groups, size), wire_bytes(cluster, op, groups, size * factor)
    assert one.keys() == other.keys()
    assert all(np.isclose(other[t], factor * one[t]) for t in one)
