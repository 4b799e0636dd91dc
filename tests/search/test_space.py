"""The space: meshes multiply to the devices, rules follow roles, groups price like the links that they use."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensjax import Cluster
from lensjax.cost.communication import Prices, groups
from lensjax.search.links import Links, lie_of, members
from lensjax.search.presets import split
from lensjax.search.problem import Problem
from lensjax.search.space import factorings
from lensjax.search.storage import parts, storages
from tests.search.families import family


@settings(deadline=None)
@given(st.integers(1, 256), st.integers(1, 4))
def test_factorings_are_all_ordered_products(n, count):
    found = list(factorings(n, count))
    assert len(set(found)) == len(found)
    assert all(math.prod(f) == n and len(f) == count for f in found)
    assert all(min(f) > 1 for f in found) or count == 1
    if n <= 64 and count == 2:
        assert len(found) == sum(n % d == 0 for d in range(2, n // 2 + 1))


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_groups_of_a_lie_are_those_of_the_mesh(sizes, data):
    axes = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    names = {f"a{i}": n for i, n in enumerate(sizes)}
    expected = groups(names, tuple(f"a{a}" for a in sorted(axes)))
    found = members(math.prod(sizes), lie_of(sizes, axes))
    as_sets = lambda g: {frozenset(row) for row in np.asarray(g).tolist()}
    assert as_sets(found) == as_sets(expected)


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (2,), (0, 2)])
def test_links_price_like_the_scorer(op, axes):
    cluster, sizes = Cluster.parse("dgx-h100:2"), (2, 4, 2)
    nbytes = np.array([1e3, 1e6, 1e9])
    prices = Prices(cluster, {f"a{i}": n for i, n in enumerate(sizes)})
    expected = prices.seconds(op, tuple(f"a{a}" for a in axes), nbytes)
    assert Links(cluster, 16).seconds(op, sizes, axes, nbytes) == pytest.approx(expected, rel=1e-12)


def test_storage_choices_hold_zero_fsdp_and_hsdp():
    pairs = {(s.params, s.state) for s in storages((0, 1))}
    assert {((), ()), ((), (0, 1)), ((0, 1), (0, 1)), ((1,), (1,)), ((1,), (0, 1))} <= pairs
    assert all(set(p) <= set(s) for p, s in pairs) and len(pairs) == 9


def test_parts_follow_the_presets_rule():
    assert parts((64, 64), False, ((), ()), (0, 1), (0, 1), (2, 4)) == 8
    assert parts((64, 64), False, ((), (0,)), (1,), (1,), (2, 4)) == 8
    assert parts((8,), False, ((),), (0,), (0,), (2,)) == 1, "a small leaf stays whole"
    assert parts((3, 64, 63), True, ((), (), ()), (0,), (0,), (4,)) == 4, "never along the stack"
    assert parts((24, 128), False, ((), ()), (0,), (0, 1), (3, 16)) == 1, "lies where most can: 128 has no third"


def test_all_that_is_stored_of_a_leaf_lies_on_one_dimension():
    """Two would cost an all-reduce of the whole gradient, and the state would not be a part of its parameters' part."""
    sizes = {"dp": 4, "fsdp": 8}
    both = split((64, 56), ((), ()), ["fsdp", "dp"], sizes, False)
    assert both == (("fsdp", "dp"), ())
    assert split((64, 56), ((), ()), ["fsdp"], sizes, False, ["fsdp", "dp"]) == (("fsdp",), ())
    assert split((24, 56), ((), ()), ["fsdp", "dp"], sizes, False) == ((), ("fsdp",)), "none divides by 32"
    assert split((64, 64), ((), ("tp",)), ["fsdp", "dp"], {**sizes, "tp": 2}, False) == (("fsdp", "dp"), ("tp",))


def test_every_shape_uses_every_device_and_divides_the_batch():
    program, cluster = family("mlp"), Cluster.parse("dgx-h100:2")
    problem = Problem(program, cluster, 1e12)
    assert problem.shapes
    for s in problem.shapes:
        assert math.prod(s.sizes) == 16 and len(s.sizes) == len(s.pattern.roles)
        ways = math.prod(n for r, n in zip(s.pattern.roles, s.sizes) if r in ("data", "expert"))
        assert program.batch.size % ways == 0
        ruled = [m for _, mesh in s.pattern.rules for m in mesh]
        assert set(ruled) == set(range(len(s.sizes))), "no mesh axis without a rule"
