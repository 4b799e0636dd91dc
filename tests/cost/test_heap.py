"""Packing of buffers: laws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lensjax.cost.heap import Buffer, live, pack

buffers = st.lists(
    st.builds(lambda s, n, b: Buffer(s, s + n, float(b)), st.integers(0, 20), st.integers(0, 10), st.integers(1, 100)),
    max_size=25,
)


@given(buffers)
def test_a_heap_holds_what_is_alive_and_no_more_than_everything(found):
    assert live(found)[0] <= pack(found) <= sum(b.size for b in found)


@given(buffers)
def test_live_is_the_largest_sum_over_steps(found):
    steps = range(max((b.end for b in found), default=0) + 1)
    assert live(found)[0] == max((sum(b.size for b in found if b.start <= t <= b.end) for t in steps), default=0)


def test_buffers_that_never_meet_share():
    assert pack([Buffer(0, 1, 10.0), Buffer(2, 3, 8.0), Buffer(4, 5, 9.0)]) == 10


def test_fragments():
    # The small one in the middle outlives its neighbours and stands in the way of the large one.
    assert pack([Buffer(0, 1, 4.0), Buffer(0, 3, 2.0), Buffer(0, 1, 3.0), Buffer(2, 3, 6.0)]) >= 8
