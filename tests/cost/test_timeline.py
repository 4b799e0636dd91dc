"""Overlap: what hides and what cannot, and bounds that hold for every program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensjax.cost.communication import Prices
from lensjax.cost.timeline import timeline
from lensjax.partition.data import Collective, Operation, Region
from lensjax.topology.cluster import Cluster

PRICES = Prices(Cluster.parse("dgx-h100:1"), {"d": 8})
SIZE = 4.5e9  # about 10 ms on NVLink


def work(seconds, reads=(), writes=()):
    return Operation("dot_general", seconds, 0.0, "bf16", 1, "", "", reads, writes)


def gather(reads=(), writes=(), size=SIZE):
    return Collective("all_gather", ("d",), 8, size, "bf16", 1, "", "", reads, writes)


def times(*items, trips=1, overlap=True):
    return timeline(Region(trips, items), PRICES, lambda o: o.flops, overlap)


COMM = times(gather()).comm


def test_a_gather_hides_behind_what_does_not_need_it():
    t = times(gather((), (1,)), work(10 * COMM, (), (2,)), work(1.0, (1, 2), (3,)))
    assert t.exposed == pytest.approx(0.0, abs=1e-9)


def test_a_gather_that_is_needed_at_once_is_exposed():
    t = times(gather((), (1,)), work(1.0, (1,), (2,)))
    assert t.exposed == pytest.approx(COMM)


def test_a_reduction_at_the_end_is_exposed():
    assert times(work(1.0, (), (1,)), gather((1,), (2,))).exposed == pytest.approx(COMM)


def test_without_overlap_everything_waits():
    t = times(gather((), (1,)), work(1.0, (), (2,)), overlap=False)
    assert t.total == pytest.approx(1.0 + COMM)


def test_what_nobody_waits_for_sends_when_nothing_else_does():
    """Ready first, but at the end of a short chain: the gather that the step's work waits for goes before it."""
    idle = gather((), (1,))
    t = times(idle, gather((), (2,)), work(3 * COMM, (2,), (3,)))
    assert t.exposed == pytest.approx(COMM)  # the second gather's; the first hides behind the work


def test_loops_multiply():
    body = Region(7, (gather((), (1,)), work(1.0, (1,), (2,))))
    t = times(body, work(1.0))
    assert t.total == pytest.approx(7 * (1 + COMM) + 1)
    assert t.compute == pytest.approx(8.0)
    assert t.comm == pytest.approx(7 * COMM)


@st.composite
def programs(draw):
    items = []
    for i in range(draw(st.integers(1, 12))):
        reads = tuple(draw(st.sets(st.integers(0, max(i - 1, 0)), max_size=3))) if i else ()
        if draw(st.booleans()):
            items.append(work(draw(st.floats(0.001, 0.1)), reads, (i,)))
        else:
            items.append(gather(reads, (i,), draw(st.sampled_from([1e8, 1e9, 5e9]))))
    return tuple(items)


@given(programs())
def test_a_step_lasts_at_least_its_compute_and_at_most_everything_in_turn(items):
    t = times(*items)
    assert max(t.compute, t.comm) <= t.total + 1e-9
    assert t.total <= t.compute + t.comm + 1e-9
