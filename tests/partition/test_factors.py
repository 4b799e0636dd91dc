"""Laws of the union-find over factored dimensions."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lensjax.partition.factors import Factors


def sizes(f, x):
    return [f.size(leaf) for leaf in f.leaves(x)]


def test_a_merged_dimension_has_the_factors_of_its_parts():
    f = Factors()
    batch, seq, merged, other = f.new(8), f.new(32), f.new(256), f.new(256)
    f.join([merged], [other])
    f.join([merged], [batch, seq])
    assert f.leaves(other) == [f.find(batch), f.find(seq)]


def test_two_factorings_of_one_dimension_refine_each_other():
    f = Factors()
    x, a, b, c, d = f.new(24), f.new(4), f.new(6), f.new(8), f.new(3)
    f.join([x], [a, b])
    f.join([x], [c, d])
    assert sizes(f, x) == [4, 2, 3]
    assert f.leaves(c) == [*f.leaves(a), f.leaves(b)[0]]


def test_factorings_that_share_nothing_stay_apart():
    f = Factors()
    x, a, b, c, d = f.new(6), f.new(2), f.new(3), f.new(3), f.new(2)
    f.join([x], [a, b])
    f.join([x], [c, d])
    assert sizes(f, x) == [2, 3]
    assert sizes(f, c) == [3]


def test_a_slice_joins_without_a_factoring():
    f = Factors()
    tokens, inputs, a, b = f.new(33), f.new(32), f.new(4), f.new(8)
    f.join([tokens], [inputs])
    assert f.size(inputs) == 33
    f.join([inputs], [a, b])  # 33 is no product of 4 and 8
    assert f.leaves(inputs) == [f.find(tokens)]


@given(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_joining_keeps_sizes_and_both_sides_agree(parts, data):
    f = Factors()
    whole = f.new(math.prod(parts))
    cut = data.draw(st.integers(0, len(parts)))
    left = [f.new(math.prod(parts[:cut])), f.new(math.prod(parts[cut:]))]
    right = [f.new(n) for n in parts]
    f.join([whole], left)
    f.join([whole], right)
    assert math.prod(sizes(f, whole)) == math.prod(parts)
    flat = [leaf for x in right for leaf in f.leaves(x)]
    assert [leaf for leaf in flat if f.size(leaf) > 1] == [leaf for leaf in f.leaves(whole) if f.size(leaf) > 1]
