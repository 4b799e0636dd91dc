"""Levels: for each layer the cheapest way to hold less, so that the whole fits.

What a device holds while layer l runs backwards is what the layers up to l kept, and what l's own backward needs. So
layers are taken in forward order, and all that matters about those before is how much they keep: a dynamic program over
that sum finds the fastest choice exactly.
"""

from __future__ import annotations

import dataclasses
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
# Levels that are priced whole first, for all layers at once: what the inner figures are wrong by is known then.
PRICED = ("scores", "dots", "inputs")


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

    found = measured(found, whole, attempt)
    # What is offloaded is made again as well: it is never faster, and only tried where nothing else fits.
    for some in (on_device(found), found):
        for parts in (1, 2) if any(g.count > 1 for g in found) else (1,):
            budget = memory - outside
            for _ in range(ROUNDS):
                choice = solve(some, budget, parts)
                made = attempt(choice) if choice else None
                if made is None or made.predicted is None or made.predicted.peak_bytes <= memory:
                    break
                budget -= 1.05 * (made.predicted.peak_bytes - memory)
        if fitting:
            break
    if not fitting:
        attempt({"*": "recompute"})
    return min(fitting, key=lambda p: p.predicted.step_s if p.predicted else 0.0, default=None)


def on_device(found: Sequence[Group]) -> tuple[Group, ...]:
    """`found` without the levels that offload."""
    return tuple(dataclasses.replace(g, options=tuple(o for o in g.options if not o.host)) for g in found)


def measured(found: Sequence[Group], whole: Plan, priced: Callable[[dict[str, str]], Plan | None]) -> tuple[Group, ...]:
    """`found` corrected by levels that are priced for all layers at once. `whole`: the plan that keeps everything;
    `priced`: {layer: level} -> the plan with it."""
    assert whole.predicted is not None
    outside = max(whole.predicted.peak_bytes - _held(found), 0.0)
    for kind in PRICED:
        made = priced({"*": kind})
        if made is not None and made.predicted is not None:
            more, held = made.predicted.step_s - whole.predicted.step_s, made.predicted.peak_bytes - outside
            found = corrected(found, kind, more, held)
    return tuple(found)


def corrected(found: Sequence[Group], kind: str, seconds: float, held: float) -> tuple[Group, ...]:
    """`found` with its figures for one level moved so that all layers at that level add `seconds` to a step and hold
    `held` bytes, as priced whole. What is not kept is not written to memory and read back either (a scan stacks it):
    a step may be faster for it, which the figures of one layer do not show.

    The error in seconds is shared out by the bytes that a layer does not keep; levels that are made of the same
    recompute and are not priced (`named`, `offload`) are moved with `inputs`."""
    moved = {"inputs": ("inputs", "named", "offload")}.get(kind, (kind,))
    at = [(g, next((o for o in g.options if o.level == kind), None)) for g in found]
    gone = sum((g.options[0].kept - o.kept) * g.count for g, o in at if o is not None)
    if gone <= 0:
        return tuple(found)
    rate = (seconds - sum(o.seconds * g.count for g, o in at if o is not None)) / gone
    before, most = 0.0, 0.0
    for g, o in at:
        o = o or g.options[0]
        most = max(most, before + o.kept * (g.count - 1) + o.need)
        before += o.kept * g.count
    made = []
    for g in found:
        options = []
        for o in g.options:
            if o.level in moved:
                more = rate * (g.options[0].kept - o.kept)
                need = max(o.kept, o.need + held - most)
                o = dataclasses.replace(o, seconds=o.seconds + more, need=need)
            options.append(o)
        made.append(dataclasses.replace(g, options=tuple(options)))
    return tuple(made)


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
