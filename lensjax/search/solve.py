"""The best choice of a case, exactly: a mixed-integer program over the options of every group (scipy's HiGHS).

    minimise   sum over regions of T_r + EXPOSED * net_r
    where      T_r >= kernels_r + work_r,  T_r >= net_r,  one option for each group
    and        bytes at every moment <= limit

Memory has a row for each moment at which a solution was too large (cutting planes): a handful in practice. Where the
cheapest option of every group happens to fit and nothing competes for a region, it is the answer and no program is
solved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from lensjax.search.inner import EXPOSED, Case


@dataclasses.dataclass(frozen=True)
class Solution:
    """A case with an option chosen for each group; seconds and bytes of the inner model."""

    case: Case
    chosen: tuple[int, ...]
    seconds: float
    bytes: float


def solve(case: Case, limit: float) -> Solution | None:
    """The fastest choice that holds at most `limit` bytes at every moment; None where none does."""
    greedy = [int(np.argmin([(o.net * (1 + EXPOSED) + o.work).sum() for o in options]) ) for options in case.options]
    if case.bytes(greedy) <= limit and case.seconds(greedy) <= case.bound * (1 + 1e-9):
        return _solution(case, greedy)
    least = [int(np.argmin([o.held for o in options])) for options in case.options]
    moments: list[int] = []
    for start in (greedy, least):
        worst = int(case.by_moment(start).argmax())
        moments += [worst] if worst not in moments else []
    while True:
        chosen = _program(case, limit, moments)
        if chosen is None:
            return None
        bytes_ = case.by_moment(chosen)
        worst = int(bytes_.argmax())
        if case.fixed + bytes_[worst] <= limit * (1 + 1e-9) or worst in moments:
            return _solution(case, chosen)
        moments.append(worst)


def _solution(case: Case, chosen: list[int]) -> Solution:
    return Solution(case, tuple(chosen), case.seconds(chosen), case.bytes(chosen))


def _program(case: Case, limit: float, moments: list[int]) -> list[int] | None:
    counts = [len(o) for o in case.options]
    flat = [o for options in case.options for o in options]
    regions, n = len(case.kernels), len(flat)
    net = np.array([o.net for o in flat]).reshape(n, regions)
    work = np.array([o.work for o in flat]).reshape(n, regions)
    scale = max(case.bound, 1e-12)  # seconds and bytes near one: the solver's tolerances are absolute
    cost = np.concatenate([EXPOSED * net.sum(1), np.ones(regions)]) / scale
    rows, low, high = [], [], []
    start = 0
    for count in counts:
        row = np.zeros(n + regions)
        row[start : start + count] = 1
        rows, low, high, start = [*rows, row], [*low, 1.0], [*high, 1.0], start + count
    for r in range(regions):
        for seconds, free in ((work[:, r], case.kernels[r]), (net[:, r], 0.0)):
            if not seconds.any() and not free:
                continue
            row = np.zeros(n + regions)
            row[:n], row[n + r] = -seconds / scale, 1.0
            rows, low, high = [*rows, row], [*low, free / scale], [*high, np.inf]
    group = np.repeat(np.arange(len(counts)), counts)
    held = np.array([o.held + (case.gathered[g] if o.storage.params else 0.0) for o, g in zip(flat, group)])
    share = np.array([o.share for o in flat])
    for m in moments:
        row = np.zeros(n + regions)
        row[:n] = (held + case.stored[m, group] * share) / limit
        rows, low, high = [*rows, row], [*low, -np.inf], [*high, 1.0 - (case.fixed + case.moments[m]) / limit]
    objective = cost * np.concatenate([np.ones(n), np.full(regions, scale)])
    integral = np.concatenate([np.ones(n), np.zeros(regions)])
    upper = np.concatenate([np.ones(n), np.full(regions, np.inf)])
    found = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        integrality=integral,
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 1e-6},
    )
    if found.x is None:
        return None
    out, start = [], 0
    for count in counts:
        out.append(int(found.x[start : start + count].argmax()))
        start += count
    return out


@dataclasses.dataclass(frozen=True)
class Searched:
    """Solutions, best first (the best of each pattern and mesh), and the seconds that nothing in the space undercuts.

    `examined` of `total` cases were solved; the others cannot be better than what was kept (`complete`), or time ran
    out."""

    solutions: tuple[Solution, ...]
    bound: float
    examined: int
    total: int
    complete: bool


def best_first(
    floors: Iterable[tuple[float, object]],
    make: object,
    limit: float,
    keep: int,
    stop: object = None,
    slack: float = 1.0,
) -> Searched:
    """The `keep` best solutions of all cases, by branch and bound over cases.

    floors: (seconds that a case cannot undercut, key of the case); make(key): its cases. A case whose floor is above the
    worst that is kept (times `slack`) is not opened: the answer is the same as if all were. `stop()` says when time is
    up.
    """
    order = sorted(enumerate(floors), key=lambda x: (x[1][0], x[0]))
    kept: list[Solution] = []
    examined, open_floor = 0, np.inf
    for _, (floor, key) in order:
        if len(kept) >= keep and floor > kept[-1].seconds * slack:
            return Searched(tuple(kept), kept[0].seconds, examined, len(order), True)
        if stop is not None and examined and stop():  # type: ignore[operator]
            open_floor = floor
            break
        examined += 1
        for case in _cases(make, key):
            if len(kept) >= keep and case.bound > kept[-1].seconds * slack:
                continue
            solution = solve(case, limit)
            if solution is not None:
                kept = sorted([*kept, solution], key=lambda s: (s.seconds, s.bytes))[:keep]
    complete = examined == len(order)
    best = kept[0].seconds if kept else np.inf
    return Searched(tuple(kept), min(best, open_floor), examined, len(order), complete)


def _cases(make: object, key: object) -> Iterator[Case]:
    yield from make(key)  # type: ignore[operator]
