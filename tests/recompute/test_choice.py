"""Levels: their spelling, and the choice of the cheapest."""

import itertools

import numpy as np
import pytest

from lensjax._errors import PlanError
from lensjax.cost.levels import Group, Option, stacked
from lensjax.plan.levels import LEVELS, Level, for_stack, level_of, parse
from lensjax.plan.plan import Axis, MeshPlan, Plan
from lensjax.plan.validate import validate
from lensjax.search.levels import cheapest, corrected, frontier, solve


@pytest.mark.parametrize("text", [*LEVELS, "named:attn,mlp", "recompute*28+keep*4", "named:a*2+dots*1"])
def test_levels_are_read_and_written(text):
    assert "+".join(map(str, parse(text))) == text


@pytest.mark.parametrize("text", ["", "all", "keep*0", "keep+dots", "dots:a", "recompute*2+keep", "keep * 2 2"])
def test_what_is_no_level_is_named(text):
    plan = Plan(MeshPlan((Axis("dp", 1),)), layers={"block": text})
    with pytest.raises(PlanError, match=r"field 'layers.block'"):
        validate(plan)


def test_a_layers_own_entry_comes_before_patterns():
    layers = {"a/block_*": "dots", "*": "inputs", "a/block_1": "keep"}
    assert level_of(layers, "a/block_1") == (Level("keep"),)
    assert level_of(layers, "a/block_2") == (Level("dots"),)
    assert level_of(layers, "b") == (Level("inputs"),)
    assert level_of(layers, "") == (Level("keep"),)
    assert level_of({}, "b") == (Level("keep"),)


def test_counts_of_a_stack_add_up():
    assert [p.count for p in for_stack(parse("inputs"), 7, "s")] == [7]
    with pytest.raises(PlanError, match="which is for 5 layers; the stack has 7"):
        for_stack(parse("inputs*3+keep*2"), 7, "s")


def held(layers, picks):
    """Bytes held at most: while a layer runs backwards, what those before it kept, and what it needs itself."""
    kept, most = 0.0, 0.0
    for options, k in zip(layers, picks):
        most = max(most, kept + options[k].need)
        kept += options[k].kept
    return most


@pytest.mark.parametrize("seed", range(3))
def test_eight_layers_at_five_levels(seed):
    """All 390,625 choices at once: kept[i] and need[i] are arrays with one dimension a layer."""
    rng = np.random.default_rng(1000 + seed)
    layers = some_layers(rng, 8, 5)
    along = lambda i, values: np.array(values).reshape([-1 if d == i else 1 for d in range(8)])
    kept, most, seconds = np.zeros([1] * 8), np.zeros([1] * 8), np.zeros([1] * 8)
    for i, options in enumerate(layers):
        most = np.maximum(most, kept + along(i, [o.need for o in options]))
        kept = kept + along(i, [o.kept for o in options])
        seconds = seconds + along(i, [o.seconds for o in options])
    for budget in np.quantile(most, [0.01, 0.1, 0.5]):
        found = cheapest(layers, float(budget))
        assert found is not None and held(layers, found) <= budget
        assert added(layers, found) == pytest.approx(
            np.broadcast_to(seconds, most.shape)[most <= budget].min(), abs=1e-12
        )


def added(layers, picks):
    return sum(options[k].seconds for options, k in zip(layers, picks))


def some_layers(rng, count, levels):
    made = []
    for _ in range(count):
        options = [Option("keep", *(2 * [float(rng.integers(50, 100))]), 0.0)]
        for _ in range(levels - 1):
            kept = float(rng.integers(0, 60))
            options.append(Option("other", kept, kept + float(rng.integers(0, 60)), float(rng.random())))
        made.append(options)
    return made


@pytest.mark.parametrize("seed", range(200))
def test_the_choice_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    count, levels = int(rng.integers(1, 6)) if seed % 10 else 7, int(rng.integers(2, 6)) if seed % 10 else 4
    layers = some_layers(rng, count, levels)
    budget = float(rng.uniform(20, 70 * count))
    every = [p for p in itertools.product(range(levels), repeat=count) if held(layers, p) <= budget]
    found = cheapest(layers, budget)
    if not every:
        assert found is None
    else:
        assert found is not None and held(layers, found) <= budget
        assert added(layers, found) == pytest.approx(min(added(layers, p) for p in every), abs=1e-12)


def test_more_layers_than_sums_can_be_told_apart_still_fit():
    rng = np.random.default_rng(0)
    layers = [
        [Option("keep", x, x, 0.0), *(Option("o", x * k, x, (1 - k) * y) for k in rng.random(4))]
        for x, y in zip(rng.random(126), rng.random(126))
    ]
    found = cheapest(layers, 20.0)
    assert found is not None and held(layers, found) <= 20.0
    lower = added(layers, cheapest(layers, 20.5))
    assert lower <= added(layers, found) + 1e-9


GROUP = Group("stack", 6, (Option("keep", 10, 10, 0.0), Option("inputs", 1, 11, 3.0), Option("dots", 4, 10, 1.0)))


def test_the_later_layers_of_a_stack_keep_more():
    chosen = solve([GROUP], 40.0)
    first, rest = parse(chosen["stack"])
    assert (first.count or 0) + (rest.count or 0) == 6
    assert rest.kind == "keep" or first.kind == "inputs"
    assert solve([GROUP], 60.0) == {"stack": "keep"}
    assert solve([GROUP], 10.0) == {}


def test_what_was_priced_whole_corrects_the_figures():
    """At `dots` a step was faster than with everything kept: it is taken before memory is short. At `inputs` it held
    less: it is taken where it seemed not to fit."""
    assert solve([GROUP], 60.0) == {"stack": "keep"}
    (faster,) = corrected([GROUP], "dots", seconds=-3.0, held=34.0)
    assert {o.level: o.seconds for o in faster.options} == {"keep": 0.0, "inputs": 3.0, "dots": pytest.approx(-0.5)}
    assert solve([faster], 60.0) == {"stack": "dots"}
    assert solve([GROUP], 10.0) == {}
    (less,) = corrected([GROUP], "inputs", seconds=18.0, held=9.0)
    assert solve([less], 10.0) == {"stack": "inputs"}


def test_two_levels_in_a_stack_are_never_worse_than_one():
    for budget in range(12, 61, 4):
        costs = []
        for parts in (1, 2):
            whole = stacked(GROUP, parts)
            picked = cheapest([whole.options], float(budget))
            costs.append(whole.options[picked[0]].seconds if picked else np.inf)
        assert costs[1] <= costs[0]


def test_less_memory_takes_no_less_time():
    points = frontier([GROUP, GROUP], points=12)
    budgets, seconds, _ = zip(*points)
    assert list(budgets) == sorted(budgets, reverse=True) and list(seconds) == sorted(seconds)
    assert seconds[0] == 0.0 and len(points) > 3
