"""The allocator: laws, and small cases by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensjax.verify.allocator import Event, replay


@st.composite
def traces(draw):
    """Requests and returns in any order, each name held at most once."""
    events, held, n = [], [], 0
    for _ in range(draw(st.integers(0, 60))):
        if held and draw(st.booleans()):
            events.append(Event(held.pop(draw(st.integers(0, len(held) - 1))), None))
        else:
            events.append(Event(n, draw(st.integers(0, 40))))
            held.append(n)
            n += 1
    return events, held


def states(events, unit):
    """(event, place of it if it is a request, what is held before it) for each event."""
    made, held, asked = replay(events, unit), {}, 0
    for e in events:
        place = None
        if e.bytes is not None:
            place, asked = made.places[asked], asked + 1
        yield e, place, dict(held)
        if place is None:
            del held[e.name]
        else:
            held[e.name] = place


units = st.sampled_from([1, 4, 16])


@given(traces(), units)
def test_blocks_never_overlap_and_lie_inside_of_what_is_needed(trace, unit):
    need = replay(trace[0], unit).need
    for e, place, held in states(trace[0], unit):
        if place is None:
            continue
        start, end = place[0], sum(place)
        assert place[1] >= e.bytes and place[1] - e.bytes < unit and end <= need and start % unit == 0
        assert all(end <= a or start >= a + n for a, n in held.values() if n and place[1])


@given(traces(), units)
def test_no_less_is_needed_than_is_held_at_once(trace, unit):
    made = replay(trace[0], unit)
    most = max((sum(n for _, n in held.values()) for _, _, held in states([*trace[0], Event("end", 0)], unit)))
    assert made.peak == most <= made.need and made.ratio >= 1


@given(traces(), units)
def test_what_is_all_returned_is_one_block(trace, unit):
    events, held = trace
    made = replay([*events, *(Event(n, None) for n in held)], unit)
    assert made.free == (((0, made.need),) if made.need else ())


@given(traces(), units)
def test_free_blocks_never_touch(trace, unit):
    for n in range(len(trace[0]) + 1):
        free = replay(trace[0][:n], unit).free
        assert all(sum(a) < b[0] for a, b in itertools.pairwise(free))


@given(traces(), units)
def test_a_request_gets_the_tightest_block_and_the_region_grows_only_without_one(trace, unit):
    events = trace[0]
    places, asked = replay(events, unit).places, 0
    for n, e in enumerate(events):
        if e.bytes is None:
            continue
        before, after = replay(events[:n], unit), replay(events[: n + 1], unit)
        offset, size = places[asked]
        asked += 1
        fitting = [b for b in before.free if b[1] >= size]
        if fitting:
            assert after.need == before.need
            assert (offset, min(b[1] for b in fitting)) in fitting
        elif size:
            assert after.need == offset + size > before.need


@given(traces())
def test_what_is_returned_in_reverse_loses_nothing(trace):
    sizes = [e.bytes for e in trace[0] if e.bytes is not None]
    events = [Event(i, n) for i, n in enumerate(sizes)] + [Event(i, None) for i in reversed(range(len(sizes)))]
    assert replay(events).ratio == 1


def test_a_hole_that_is_too_small_is_lost():
    events = [Event("a", 4), Event("b", 2), Event("a", None), Event("c", 5)]
    made = replay(events, unit=1)
    assert made.places == ((0, 4), (4, 2), (6, 5)) and (made.need, made.peak) == (11, 7)
    assert made.free == ((0, 4),)


def test_the_last_free_block_grows():
    events = [Event("a", 4), Event("b", 2), Event("b", None), Event("c", 5)]
    assert replay(events, unit=1).need == 9


def test_names_are_held_once():
    with pytest.raises(ValueError, match="'a' is returned, and nothing is held"):
        replay([Event("a", None)])
    with pytest.raises(ValueError, match="'a' is requested a second time"):
        replay([Event("a", 1), Event("a", 1)])
