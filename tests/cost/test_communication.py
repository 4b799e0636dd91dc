"""Groups from meshes, and the bytes and seconds of collectives on tiers."""

from __future__ import annotations

import numpy as np
import pytest

from lensjax.cost.communication import COMBINE, Prices, groups
from lensjax.partition.data import Collective
from lensjax.topology.cluster import Cluster

MESH = {"a": 4, "b": 8}
H100 = Cluster.parse("dgx-h100:4")


def collective(op="all_gather", axes=("b",), size=1e8, trips=1):
    group = int(np.prod([MESH[a] for a in axes]))
    return Collective(op, axes, group, size, "f32", trips, "", "")


def test_groups_follow_the_mesh_row_major():
    assert groups(MESH, ("b",)).tolist()[0] == list(range(8))
    assert groups(MESH, ("a",)).tolist()[0] == [0, 8, 16, 24]
    assert groups(MESH, ("a", "b")).tolist() == [list(range(32))]
    assert groups(MESH, ("b", "a")).tolist()[0][:4] == [0, 8, 16, 24]


def test_a_device_order_renames_members():
    order = np.arange(32).reshape(8, 4).T.ravel()  # axis a runs inside the node now
    assert groups(MESH, ("a",), order).tolist()[0] == [0, 1, 2, 3]


def test_sub_axes_cut_an_axis():
    assert groups(MESH, ("b:(2)4",)).tolist()[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(MESH, ("b:(1)2",)).tolist()[0] == [0, 4]
    assert groups(MESH, ("b:(1)2", "b:(4)2")).shape == (8, 4)


def test_every_device_is_in_one_group():
    for axes in (("a",), ("b",), ("a", "b"), ("b:(2)4",), ("a", "b:(1)2")):
        assert sorted(groups(MESH, axes).ravel()) == list(range(32))


def test_wire_bytes_stay_on_the_tier_of_the_axis():
    prices = Prices(H100, MESH)
    assert prices.wire(collective(axes=("b",))) == {"nvlink": pytest.approx(7 / 8 * 1e8)}
    assert prices.wire(collective(axes=("a",))) == {"rail": pytest.approx(3 / 4 * 1e8)}
    assert prices.wire(collective("all_reduce", ("b",))) == {"nvlink": pytest.approx(2 * 7 / 8 * 1e8)}


def test_the_same_axis_across_nodes_is_slower():
    inside, across = Prices(H100, MESH), Prices(H100, MESH, np.arange(32).reshape(8, 4).T.ravel().tolist())
    size = np.array([1e9])
    assert across.seconds("all_reduce", ("b",), size) > 3 * inside.seconds("all_reduce", ("b",), size)


def test_small_calls_of_one_stage_are_combined():
    prices = Prices(H100, MESH)
    items = [(collective(size=1e5), 1) for _ in range(50)]
    together, apart = sum(prices.calls(items)), sum(prices.calls([(c, i) for i, (c, _) in enumerate(items)]))
    assert together < 0.2 * apart
    one = sum(prices.calls([(collective(size=50 * 1e5), 1)]))
    assert together == pytest.approx(one)


def test_large_calls_are_not_combined():
    prices = Prices(H100, MESH)
    alone = prices.calls([(collective(size=COMBINE), 1)])[0]
    assert prices.calls([(collective(size=COMBINE), 1)] * 2) == pytest.approx([alone, alone])
