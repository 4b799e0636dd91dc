"""The best choice of a case, exactly: a mixed-integer program over the options of every group (scipy's HiGHS).

    minimise   sum over regions of T_r + EXPOSED * net_r + waits_r
    where      T_r >= kernels_r + work_r,  T_r >= net_r,  one option for each group
    and        bytes at every moment <= limit

Memory has a row for each moment at which a solution was too large (cutting planes): a handful in practice. Where the
cheapest option of every group happens to fit and nothing competes for a region, it is the answer and no program is
solved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import numpy as np

from lensjax._errors import PlanError
from lensjax.search.inner import EXPOSED, Case

# Solutions that differ by less than this part of their seconds are as good as each other: the simpler is kept.
AS_GOOD = 5e-4


@dataclasses.dataclass(frozen=True)
class Solution:
    """A case with an option chosen for each group; seconds and bytes of the inner model."""

    case: Case
    chosen: tuple[int, ...]
    seconds: float
    bytes: float


def solve(case: Case, limit: float) -> Solution | None:
    """The fastest choice that holds at most `limit` bytes at every moment; None where none does."""
    alone = lambda o: (o.net * (1 + EXPOSED) + o.work).sum() + case.waited(o)
    greedy = [int(np.argmin([alone(o) for o in options])) for options in case.options]
    if case.bytes(greedy) <= limit and case.seconds(greedy) <= case.bound * (1 + 1e-9):
        return _solution(case, greedy)
    if case.least > limit * (1 + 1e-9):
        return None
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
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, and often not needed

    counts = [len(o) for o in case.options]
    flat = [o for options in case.options for o in options]
    regions, n = len(case.kernels), len(flat)
    net = np.array([o.net for o in flat]).reshape(n, regions)
    work = np.array([o.work for o in flat]).reshape(n, regions)
    # Seconds and bytes near one: the solver's tolerances are absolute, and it fails on coefficients of a huge range.
    scale = max(case.bound, 1e-3 * float(max(net.max(initial=0), work.max(initial=0)))) or 1.0
    waits = np.array([case.waited(o) for o in flat])
    objective = np.concatenate([(EXPOSED * net.sum(1) + waits) / scale, np.ones(regions)])
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
    integral = np.concatenate([np.ones(n), np.zeros(regions)])
    upper = np.concatenate([np.ones(n), np.full(regions, np.inf)])
    found = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),  # pyright: ignore[reportArgumentType]
        integrality=integral,
        bounds=Bounds(0, upper),  # pyright: ignore[reportArgumentType]
        options={"mip_rel_gap": 1e-6},
    )
    if found.x is None:
        if found.status != 2:  # no answer is not the answer that nothing fits
            raise PlanError(f"the solver gave no answer: {found.message}", hint="presets are compared all the same")
        return None
    out, start = [], 0
    for count in counts:
        out.append(int(found.x[start : start + count].argmax()))
        start += count
    return out


@dataclasses.dataclass(frozen=True)
class Searched:
    """Solutions, best first, and the seconds that nothing in the space undercuts (infinite where nothing fits).

    `examined` of `total` shapes were opened; the others cannot be better than what was kept (`complete`), or time ran
    out."""

    solutions: tuple[Solution, ...]
    bound: float
    examined: int
    total: int
    complete: bool


Key = TypeVar("Key")


def best_first(
    floors: Iterable[tuple[float, Key]],
    cases: Callable[[Key], Iterable[Case]],
    limit: float,
    keep: int,
    *,
    family: Callable[[Solution], Hashable] = lambda s: None,
    each: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Searched:
    """The `keep` best solutions, at most `each` of one family, by branch and bound over shapes.

    floors: (seconds that a shape cannot undercut, shape); cases(shape): its cases. A shape whose floor lies above the
    worst solution that is kept is not opened: the answer is the same as if all were. `stop()` says when time is up.
    """
    order = sorted(enumerate(floors), key=lambda x: (x[1][0], x[0]))
    kept: list[Solution] = []
    examined, open_floor, best = 0, np.inf, np.inf
    for _, (floor, key) in order:
        if len(kept) >= keep and floor > kept[-1].seconds:
            break
        if examined and stop():
            open_floor = floor
            break
        examined += 1
        for case in cases(key):
            if len(kept) >= keep and case.bound > kept[-1].seconds:
                continue
            solution = solve(case, limit)
            if solution is not None:
                best = min(best, solution.seconds)
                kept = _keep([*kept, solution], keep, family, each)
    return Searched(tuple(kept), min(best, open_floor), examined, len(order), open_floor == np.inf)


def _keep(found: list[Solution], keep: int, family: Callable[[Solution], Hashable], each: int | None) -> list[Solution]:
    """The best of all, no more than `each` of a family; of those that are as good the mesh with fewer axes."""
    if each is None:
        return sorted(found, key=lambda s: (s.seconds, len(s.case.sizes), s.bytes))[:keep]
    least = min(s.seconds for s in found)
    found = sorted(found, key=lambda s: (int((s.seconds / least - 1) / AS_GOOD), len(s.case.sizes), s.bytes))
    count: dict[Hashable, int] = {}
    out = []
    for s in found:
        key = family(s)
        count[key] = count.get(key, 0) + 1
        if count[key] <= each and len(out) < keep:
            out.append(s)
    return out
