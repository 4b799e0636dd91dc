"""The whole price: closed forms on a decoder, and laws that a planner relies on."""

from __future__ import annotations

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from lensjax.cost import cost
from lensjax.partition import partition
from lensjax.topology.cluster import Cluster
from tests.partition.decoder import Config, Rules, abstract_mesh, fsdp, lowered, tensor
from tests.partition.test_partition import wire

CONFIG = Config()


@pytest.fixture(scope="module")
def parts():
    return {
        "fsdp": partition(lowered(CONFIG, Rules(abstract_mesh(d=8), fsdp("d"), P("d"), gather=True), P("d"))),
        "dp": partition(lowered(CONFIG, Rules(abstract_mesh(d=8), {}, P("d")), P("d"))),
        "hsdp": partition(
            lowered(CONFIG, Rules(abstract_mesh(r=2, d=4), fsdp("d"), P(("r", "d")), gather=True), P(("r", "d")))
        ),
        "tp": partition(lowered(CONFIG, Rules(abstract_mesh(d=2, t=4), tensor("t"), P("d")), P("d"))),
    }


def test_bytes_on_the_only_tier_are_the_ring_bytes(parts):
    node = Cluster.parse("dgx-h100:1")
    for p in parts.values():
        assert cost(p, node).tiers["nvlink"] == pytest.approx(wire(p))


def test_hsdp_sends_only_the_shard_across_nodes(parts):
    two = Cluster.parse("cpu:2x4")
    tiers = [t.name for t in two.tiers]
    found = cost(parts["hsdp"], two).tiers
    # All but the table's gradient, which XLA reduces whole, and the loss.
    whole = sum(c.bytes for c in parts["hsdp"].collectives if c.axes == ("r", "d"))
    assert found[tiers[1]] <= wire(parts["hsdp"], ("r",)) + whole
    assert cost(parts["dp"], two).tiers[tiers[1]] > found[tiers[1]]


def test_a_faster_link_or_less_work_is_never_slower(parts):
    cluster = Cluster.parse("dgx-h100:1")
    fast = dataclasses.replace(
        cluster, tiers=tuple(dataclasses.replace(t, bandwidth=2 * t.bandwidth) for t in cluster.tiers)
    )
    for p in parts.values():
        assert cost(p, fast).step_s <= cost(p, cluster).step_s
        assert cost(p, cluster).step_s <= cost(p, cluster, overlap=False).step_s


def test_device_order_decides_which_tier_pays(parts):
    cluster = Cluster.parse("cpu:2x4")
    inner, outer = (t.name for t in cluster.tiers[:2])
    good = cost(parts["tp"], cluster)
    bad = cost(parts["tp"], cluster, order=[0, 2, 4, 6, 1, 3, 5, 7])
    assert bad.tiers[outer] > good.tiers[outer] and bad.step_s > good.step_s
    assert good.tiers[inner] > good.tiers[outer]


def test_what_holds_memory_adds_up_and_follows_roles(parts):
    p = parts["fsdp"]
    roles = ["parameter"] * 9 + ["optimizer"] * (len(p.arguments) - 10) + ["batch"]
    c = cost(p, Cluster.parse("dgx-h100:1"), roles=roles)
    assert sum(c.held.values()) == pytest.approx(c.peak_bytes)
    assert c.held["optimizer"] == pytest.approx(2 * c.held["parameter"], rel=0.01)


def test_flops_are_of_one_device(parts):
    whole = cost(parts["dp"], Cluster.parse("dgx-h100:1")).flops
    assert cost(parts["tp"], Cluster.parse("dgx-h100:1")).flops == pytest.approx(whole)
