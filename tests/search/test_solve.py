"""The solver is exact: on random cases it equals going through every choice; more of anything never makes it worse."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lensjax.search.inner import Case
from lensjax.search.rules import Pattern
from lensjax.search.solve import best_first, solve
from lensjax.search.storage import Option, Storage, storages
from lensjax.search.strategies import brute_force


def random_case(rng: np.random.Generator, groups: int = 3, regions: int = 3, most: int = 5) -> Case:
    """A case with random prices and sizes, some of them equal and some nothing, as in real programs."""

    def price(*shape):
        return rng.integers(0, 6, shape) * rng.choice([0.0, 1e-3, 0.1])

    options = []
    for _ in range(groups):
        ways = storages((0, 1))[: int(rng.integers(1, most + 1))]
        options.append([
            Option(
                s, price(regions), price(regions), rng.integers(0, 20) * 1e9, float(rng.choice([1, 0.5, 0.25])),
                price(regions) ** 2,
            )
            for s in ways
        ])  # fmt: skip
    moments = rng.integers(0, 30, int(rng.integers(1, 6))) * 1e9
    return Case(
        pattern=Pattern(("data", "data"), ()),
        sizes=(2, 4),
        again=bool(rng.integers(2)),
        kernels=price(regions),
        blocking=price(regions),
        options=options,
        moments=moments.astype(float),
        stored=rng.integers(0, 10, (len(moments), groups)) * 1e9,
        fixed=float(rng.integers(0, 5)) * 1e9,
        gathered=rng.integers(0, 5, groups) * 1e9,
        waits=price(regions) * 10,
    )


@pytest.mark.parametrize("seed", range(200))
def test_the_solver_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    limit = float(rng.integers(10, 110)) * 1e9
    found, expected = solve(case, limit), brute_force(case, limit)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-6, abs=1e-12)
        assert found.bytes <= limit * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_branch_and_bound_over_shapes_equals_brute_force(seed):
    rng = np.random.default_rng(1000 + seed)
    cases = [random_case(rng) for _ in range(12)]
    limit = float(rng.integers(20, 110)) * 1e9
    floors = [(float((c.kernels + c.blocking).sum()), i) for i, c in enumerate(cases)]
    found = best_first(floors, lambda i: [cases[i]], limit, keep=3)
    every = sorted(s.seconds for c in cases if (s := brute_force(c, limit)) is not None)
    assert [s.seconds for s in found.solutions] == pytest.approx(every[:3], rel=1e-6, abs=1e-12)
    assert found.bound == pytest.approx(every[0] if every else np.inf, rel=1e-6)


def test_when_time_is_up_the_bound_still_holds():
    rng = np.random.default_rng(5)
    cases = sorted((random_case(rng) for _ in range(20)), key=lambda c: (c.kernels + c.blocking).sum())
    floors = [(float((c.kernels + c.blocking).sum()), i) for i, c in enumerate(cases)]
    limit = 200e9
    best = min(s.seconds for c in cases if (s := brute_force(c, limit)) is not None)
    found = best_first(floors, lambda i: [cases[i]], limit, keep=3, stop=lambda: True)
    assert found.examined == 1 and not found.complete and found.bound <= best + 1e-12


SETTINGS = settings(max_examples=60, deadline=None)


@SETTINGS
@given(st.integers(0, 10_000), st.integers(10, 100), st.integers(0, 100))
def test_more_memory_is_never_slower(seed, limit, more):
    case = random_case(np.random.default_rng(seed))
    small, large = solve(case, limit * 1e9), solve(case, (limit + more) * 1e9)
    if small is not None:
        assert large is not None and large.seconds <= small.seconds * (1 + 1e-6) + 1e-12


@SETTINGS
@given(st.integers(0, 10_000), st.floats(0.1, 1.0))
@example(192, 0.90124832150044)  # nothing is free of cost but one choice, whose bound is zero
def test_a_faster_link_is_never_slower(seed, factor):
    case = random_case(np.random.default_rng(seed))
    faster = dataclasses.replace(
        case,
        blocking=case.blocking * factor,
        options=[
            [dataclasses.replace(o, net=o.net * factor, squares=o.squares * factor**2) for o in options]
            for options in case.options
        ],
    )
    before, after = solve(case, 60e9), solve(faster, 60e9)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.seconds <= before.seconds * (1 + 1e-6) + 1e-12


@SETTINGS
@given(st.integers(0, 10_000))
def test_one_more_choice_is_never_slower(seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    other = Option(Storage((0,), (0,)), rng.random(3) * 0.1, rng.random(3) * 0.1, 1e9, 0.5)
    more = dataclasses.replace(case, options=[[*case.options[0], other], *case.options[1:]])
    before, after = solve(case, 60e9), solve(more, 60e9)
    if before is not None:
        assert after is not None and after.seconds <= before.seconds * (1 + 1e-6) + 1e-12
