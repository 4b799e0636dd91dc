"""How groups lie: units touched, and what may leave each, against counting by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensjax.topology.cluster import Cluster, Slow
from lensjax.topology.collectives_fabric import CUBE_MESH, ring_share
from lensjax.topology.collectives_span import span


def brute_units(cluster, group):
    sizes = [1, *(t.size for t in cluster.tiers)]
    return [len({int(cluster.slots[i]) // size for i in group}) for size in sizes]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["dgx-h100:40", "hbm2e-nvswitch:8", "gb200-nvl72:2"]), st.data())
def test_units_are_counted_right_for_any_subset(spec, data):
    cluster = Cluster.parse(spec)
    group = data.draw(st.lists(st.integers(0, cluster.devices - 1), min_size=2, max_size=20, unique=True))
    assert span(cluster, [group]).units.tolist() == [brute_units(cluster, group)]


def test_alike_groups_are_kept_once_and_others_apart():
    cluster = Cluster.parse("dgx-h100:4")
    assert len(span(cluster, np.arange(32).reshape(4, 8)).units) == 1
    assert len(span(cluster, [[0, 1], [2, 8]]).units) == 2


def test_a_slow_nic_slows_the_groups_that_use_it():
    cluster = Cluster.parse("dgx-h100:2")
    strided = np.arange(16).reshape(2, 8).T
    damaged = dataclasses.replace(cluster, slow=(Slow("rail", (3,), 0.25),))
    assert sorted(span(damaged, strided).egress[:, 1].tolist()) != sorted(span(cluster, strided).egress[:, 1].tolist())
    assert span(damaged, strided).egress[:, 1].min() == pytest.approx(0.25 * 50e9)


def test_a_missing_device_takes_its_nic_along():
    cluster = dataclasses.replace(Cluster.parse("dgx-h100:2"), missing=(15,))
    assert span(cluster, np.arange(15)).egress[0, 1] == pytest.approx(7 * 50e9)


def test_oversubscription_and_the_third_tier():
    cluster = Cluster.parse("hbm2e-nvswitch:8")  # 64 devices, racks of 32, the spine oversubscribed
    spine = cluster.tiers[2]
    whole = span(cluster, np.arange(64))
    assert whole.units.tolist() == [[64, 8, 2, 1]]
    assert whole.egress[0, 2] == pytest.approx(32 * spine.bandwidth / spine.oversubscription)


# V100 DGX-1, vTrain's all-reduce traces: asymptotic bus bandwidth over one link's 22.5 GB/s, GPUs 0..n-1.
@pytest.mark.parametrize(("members", "measured"), [(2, 1.0), (3, 2.0), (4, 3.8), (6, 2.03), (7, 3.87), (8, 5.98)])
def test_rings_of_the_hybrid_cube_mesh_are_those_that_were_measured(members, measured):
    assert 6 * ring_share(members) == pytest.approx(measured, rel=0.06)


def test_five_gpus_of_a_cube_mesh_close_no_ring_and_forward():
    assert 6 * ring_share(5) == pytest.approx(1.65, rel=0.25)  # measured 37 of 22.5 GB/s


def test_every_gpu_of_the_cube_mesh_has_six_links():
    assert {sum(links for pair, links in CUBE_MESH.items() if gpu in pair) for gpu in range(8)} == {6}


def test_a_pair_on_a_full_mesh_has_one_of_its_links():
    mi300 = Cluster.parse("mi300x:1")
    assert span(mi300, [0, 1]).egress[0, 0] == pytest.approx(64e9)
    assert span(mi300, np.arange(8)).egress[0, 0] == pytest.approx(448e9)
