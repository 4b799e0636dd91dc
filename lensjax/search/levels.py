"""Levels: for each layer the cheapest way to hold less, so that the whole fits.

What a device holds while layer l runs backwards is what the layers up to l kept, and what l's own backward needs. So
layers are taken in forward order, and all that matters about those before is how much they keep: a dynamic program over
that sum finds the fastest choice exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lensjax.cost.levels import Group, Option, groups, stacked
from lensjax.cost.price import price
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.topology.cluster import Cluster

# Sums that the dynamic program keeps apart. Beyond it they are rounded up to as many steps: what is found fits, and is
# within one step for each layer of the best.
SUMS = 4_000
# Whole plans priced for one choice; each is lowered and partitioned.
ROUNDS = 3


def cheapest(layers: Sequence[Sequence[Option]], budget: float) -> tuple[int, ...] | None:
    """For each layer (in forward order) the index of its option, so that the bytes held never pass `budget` and the
    added seconds are least; None where nothing fits. Exact as long as there are at most SUMS different sums."""
    kept, seconds = np.zeros(1), np.zeros(1)
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for options in layers:
        sums, times, froms, picks = [], [], [], []
        for k, option in enumerate(options):
            fits = np.flatnonzero(kept + option.need <= budget)
            sums.append(kept[fits] + option.kept)
            times.append(seconds[fits] + option.seconds)
            froms.append(fits)
            picks.append(np.full(len(fits), k))
        total, time = np.concatenate(sums), np.concatenate(times)
        if not len(total):
            return None
        best = _frontier(total, time)
        if len(best) > SUMS:
            total = np.ceil(total / (budget / SUMS)) * (budget / SUMS)
            best = _frontier(total, time)
        trail.append((np.concatenate(froms)[best], np.concatenate(picks)[best]))
        kept, seconds = total[best], time[best]
    at = int(seconds.argmin())
    chosen = []
    for came, pick in reversed(trail):
        chosen.append(int(pick[at]))
        at = int(came[at])
    return tuple(reversed(chosen))


def _frontier(total: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Indices of the entries that no other beats in both, by growing total."""
    order = np.lexsort((time, total))
    sorted_time = time[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_time)[:-1]])
    return order[sorted_time < before]


def levels(
    program: Program, plan: Plan, cluster: Cluster, memory: float, pricer: Callable[[Plan], Plan] | None = None
) -> Plan | None:
    """The plan with levels under which it fits `memory` bytes per device, priced; the fastest of those looked at. None
    where there is none. A plan that fits as it is comes back as it is (priced). `pricer`: what prices a plan, where
    other plans of this program are priced too."""
    priced = pricer if pricer is not None else lambda p: price(program, p, cluster)
    whole = plan if plan.predicted is not None and not plan.layers else priced(plan.replace(layers={}))
    assert whole.predicted is not None
    if whole.predicted.peak_bytes <= memory:
        return whole
    found = groups(program, whole, cluster)
    if not found:
        return None
    outside = max(whole.predicted.peak_bytes - _held(found), 0.0)
    fitting: list[Plan] = []
    seen: set[tuple[tuple[str, str], ...]] = set()

    def attempt(layers: dict[str, str]) -> Plan | None:
        key = tuple(sorted(layers.items()))
        if key in seen:
            return None
        seen.add(key)
        made = priced(plan.replace(layers=layers))
        if made.predicted is not None and made.predicted.peak_bytes <= memory:
            fitting.append(made)
        return made

    for parts in (1, 2) if any(g.count > 1 for g in found) else (1,):
        budget = memory - outside
        for _ in range(ROUNDS):
            choice = solve(found, budget, parts)
            made = attempt(choice) if choice else None
            if made is None or made.predicted is None or made.predicted.peak_bytes <= memory:
                break
            budget -= 1.05 * (made.predicted.peak_bytes - memory)
    if not fitting:
        for kind in ("inputs", "recompute"):
            attempt({"*": kind})
    return min(fitting, key=lambda p: p.predicted.step_s if p.predicted else 0.0, default=None)


def solve(found: Sequence[Group], budget: float, parts: int = 2) -> dict[str, str]:
    """{layer: level} of the cheapest choice within `budget` bytes of activations; {} where there is none. `parts`: how
    many levels one stack may have."""
    whole = [stacked(g, parts) for g in found]
    picked = cheapest([g.options for g in whole], budget)
    if picked is None:
        return {}
    return {g.name: g.options[k].level for g, k in zip(whole, picked)}


def frontier(found: Sequence[Group], points: int = 16, parts: int = 2) -> list[tuple[float, float, dict[str, str]]]:
    """(bytes of activations allowed, seconds added, levels) from everything kept down to the least that there is."""
    most = _held(found)
    whole = [stacked(g, parts) for g in found]
    out: list[tuple[float, float, dict[str, str]]] = []
    for budget in np.linspace(most, 0.0, points + 1):
        picked = cheapest([g.options for g in whole], float(budget))
        if picked is None:
            break
        chosen = {g.name: g.options[k].level for g, k in zip(whole, picked)}
        if not out or out[-1][2] != chosen:
            out.append((float(budget), sum(g.options[k].seconds for g, k in zip(whole, picked)), chosen))
    return out


def _held(found: Sequence[Group]) -> float:
    """Bytes that the layers hold when everything is kept."""
    return sum(g.options[0].kept * g.count for g in found)
