"""The outer level: never worse than a preset, deterministic, within its time; strategies, the cache, what-if."""

import dataclasses
import json
import math
import types

import jax
import jax.numpy as jnp
import pytest

from lensjax import Cluster, DoesNotFit, PlanError
from lensjax.cost.price import price
from lensjax.cost.pricer import Pricer
from lensjax.execute.planning import Options, make_plan
from lensjax.passes.emit import lower
from lensjax.plan.plan import Plan
from lensjax.program.program import analyze
from lensjax.search import strategies
from lensjax.search.candidates import price_all
from lensjax.search.choose import choose
from lensjax.search.problem import Problem
from lensjax.search.reading import solution_of
from lensjax.search.strategies import Proposal, brute_force
from tests.search.families import family
from tests.zoo import FAMILIES

MACHINES = ("dgx-h100:1", "p3.16xlarge:2", "tpu-v5e:4x4")
FAST = [("mlp", "dgx-h100:1"), ("two_tower_contrastive", "p3.16xlarge:2")]
STATES = [n for n, f in FAMILIES.items() if f.form == "state"]


def never_worse(name, machine):
    choice = choose(family(name), Cluster.parse(machine))
    presets = [
        c for c in choice.candidates if c.name in Problem(family(name), Cluster.parse(machine), 0).preset_names()
    ]
    best = min((c.step_s for c in presets if c.fits(choice.memory)), default=math.inf)
    assert choice.plan.predicted.step_s <= best
    assert not any("failed" in c.reason for c in choice.candidates)
    # and what was chosen is what the scorer says of it, not what the search's model hoped
    assert price(family(name), choice.plan, Cluster.parse(machine)).predicted == choice.plan.predicted
    return choice


@pytest.mark.few(1)
@pytest.mark.parametrize("name, machine", FAST)
def test_never_worse_than_the_best_preset(name, machine):
    choice = never_worse(name, machine)
    assert choice.shapes and (choice.gap is None or choice.gap >= 0)


@pytest.mark.slow
@pytest.mark.parametrize("k, name", enumerate(STATES))
def test_never_worse_than_the_best_preset_anywhere(k, name):
    never_worse(name, MACHINES[k % len(MACHINES)])


@pytest.mark.slow
def test_the_same_question_has_the_same_answer():
    first, second = (choose(family("mlp"), Cluster.parse("dgx-h100:1")) for _ in range(2))
    assert first.plan == second.plan
    assert [c.name for c in first.candidates] == [c.name for c in second.candidates]


@pytest.mark.parametrize("name", [pytest.param("mlp"), pytest.param("gpt_scan_remat_dropout", marks=pytest.mark.slow)])
def test_one_lowering_for_many_plans_gives_the_same_price(name, monkeypatch):
    """To the bit, whichever plan was lowered first; constraints that a plan lacks are taken out of another's."""
    program, cluster = family(name), Cluster.parse("dgx-h100:2")
    problem = Problem(program, cluster, 1e12)
    lowered = []
    monkeypatch.setattr("lensjax.cost.pricer.lower", lambda *a: lowered.append(a) or lower(*a))
    names = ("fsdp:again", "dp=2,zero1=8", "dp=8,fsdp:once=2", "zero1=2,fsdp:again=8", "dp=16")
    plans = {n: problem.preset(n) for n in names}
    for order in (names, names[::-1]):
        pricer = Pricer(program, cluster)
        lowered.clear()
        for n in order:
            assert pricer(plans[n]) == price(program, plans[n], cluster), n
        assert len(lowered) < len(names)
    lowered.clear()
    found = price_all([(n, lambda n=n: plans[n]) for n in names], Pricer(program, cluster))
    assert [c.plan for c in found] == [price(program, plans[n], cluster) for n in names]
    assert len(lowered) <= 3, "plans that differ in constraints alone share a lowering"


def test_the_search_equals_brute_force_over_its_space():
    """On a small program and cluster every choice of every shape is tried."""
    program, cluster = family("mlp"), Cluster.parse("cpu:4")
    problem = Problem(program, cluster, cluster.device.memory)
    cases = [c for s in problem.shapes for c in problem.cases(s)]
    best = min(s.seconds for c in cases if (s := brute_force(c, problem.memory)) is not None)
    assert strategies.milp(problem).bound == pytest.approx(best, rel=1e-9)
    assert strategies.exhaustive(problem).bound == pytest.approx(best, rel=1e-9)


def test_every_preset_is_a_point_of_the_space():
    """A preset read back as a solution is never below the bound of the search."""
    program, cluster = family("mlp"), Cluster.parse("dgx-h100:1")
    problem = Problem(program, cluster, cluster.device.memory)
    bound = strategies.milp(problem).bound
    for name in problem.preset_names():
        solution = solution_of(problem, problem.preset(name))
        assert solution is not None and solution.seconds >= bound * (1 - 1e-9), name


def test_no_time_gives_the_first_preset_and_says_what_was_left_out():
    choice = choose(family("mlp"), Cluster.parse("dgx-h100:1"), budget=1e-9)
    assert choice.plan.name == "dp"
    assert {c.reason for c in choice.candidates if c.plan is None} == {"the time for planning was up"}


def test_what_if():
    choice = choose(family("mlp"), Cluster.parse("dgx-h100:1"), search="presets-only")
    other = choice.what_if(choice.plan.replace(leaves={}))
    assert (
        other.predicted is not None and other.predicted.memory["parameter"] >= choice.plan.predicted.memory["parameter"]
    )


# ---- strategies ----------------------------------------------------------------------------------------------------


def only_data_parallel(problem: Problem) -> Proposal:
    """The example of docs/search.md: a strategy that looks at data parallelism alone, and says how good that can be."""
    found = []
    for shape in problem.shapes:
        if set(shape.pattern.roles) == {"data"}:
            found += [s for case in problem.cases(shape) for s in strategies.uniform(case) if s.bytes <= problem.memory]
    found.sort(key=lambda s: s.seconds)
    return Proposal([problem.plan(s) for s in found[:2]], bound=found[0].seconds if found else None)


def test_a_package_can_bring_a_strategy(monkeypatch):
    entry = types.SimpleNamespace(name="only-dp", load=lambda: only_data_parallel)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == strategies.GROUP else [])
    choice = choose(family("mlp"), Cluster.parse("dgx-h100:1"), search="only-dp")
    assert "only-dp" in strategies.names()
    assert not any("tp" in a.name for c in choice.candidates if c.plan for a in c.plan.mesh.axes)


def test_a_strategy_that_fails_is_shown_and_leaves_the_presets(monkeypatch):
    def broken(problem):
        raise ZeroDivisionError("no reason")

    monkeypatch.setitem(strategies.SHIPPED, "broken", broken)
    choice = choose(family("mlp"), Cluster.parse("cpu:4"), search="broken")
    assert choice.plan.name in Problem(family("mlp"), Cluster.parse("cpu:4"), 0).preset_names()
    (said,) = [c.reason for c in choice.candidates if "failed" in c.reason]
    assert said == "the search failed on this step: ZeroDivisionError: no reason"


def test_an_unknown_strategy_lists_those_there_are():
    with pytest.raises(PlanError, match="no search strategy 'magic'") as e:
        choose(family("mlp"), Cluster.parse("cpu:4"), search="magic")
    assert "milp" in e.value.hint and "presets-only" in e.value.hint


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["greedy", "exhaustive", "presets-only"])
def test_every_strategy_gives_a_plan(name):
    choice = choose(family("mlp"), Cluster.parse("cpu:4"), search=name)
    assert choice.plan.predicted is not None


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_a_kept_plan_is_replayed_and_priced_anew(tmp_path):
    program, cluster = family("mlp"), Cluster.parse("cpu:4")
    options = Options(cache=tmp_path, search="presets-only")
    first = make_plan(program, cluster, options)
    (file,) = tmp_path.glob("*.json")
    data = json.loads(file.read_text())
    data["predicted"]["step_s"] = 1e-30  # what another scorer may have thought
    file.write_text(json.dumps(data))
    again = make_plan(program, cluster, options)
    assert len(again.candidates) == 1, "not searched again"
    assert again.plan == first.plan, "the same plan, with the price of today"


def test_another_question_is_not_answered_from_the_cache(tmp_path):
    program = family("mlp")
    ask = lambda spec, **options: make_plan(program, Cluster.parse(spec), Options(cache=tmp_path, **options))
    ask("cpu:4", search="presets-only")
    ask("cpu:8", search="presets-only")
    ask("cpu:4", search="presets-only", memory=1e9)
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_damaged_cache_is_not_trusted(tmp_path):
    program, cluster = family("mlp"), Cluster.parse("cpu:4")
    options = Options(cache=tmp_path, search="presets-only")
    first = make_plan(program, cluster, options)
    (file,) = tmp_path.glob("*.json")
    file.write_text("{")
    again = make_plan(program, cluster, options)
    assert dataclasses.replace(again.plan, predicted=None) == dataclasses.replace(first.plan, predicted=None)
    assert Plan.load(file) == again.plan


@pytest.mark.parametrize("options", [{"search": 3}, {"search": "magic"}, {"budget": 0}, {"budget": "a"}, {"cache": 3}])
def test_options_that_cannot_be_meant(options):
    with pytest.raises(PlanError):
        Options(**options)


def test_where_nothing_fits_else_the_batch_goes_through_in_pieces():
    """Small weights, large activations, nothing to recompute: only fewer examples at a time hold less."""

    def step(params, batch):
        def loss(params):
            x = batch
            for w in params:
                x = jnp.sin(x @ w)
            return (x**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    program = analyze(step, ([shape(64, 64)] * 6, shape(4096, 64)))
    cluster = Cluster.parse("cpu:2")
    whole = choose(program, cluster)
    limit = min(c.plan.predicted.peak_bytes for c in whole.candidates if c.plan is not None) / 2
    plan = choose(program, cluster, memory=limit).plan
    assert plan.micro.count > 1 and plan.predicted.peak_bytes <= limit
    assert plan.name.endswith(f"in {plan.micro.count} micro-batches")
    with pytest.raises(DoesNotFit, match="micro-batches") as e:
        choose(program, cluster, memory=limit / 1000)
    assert "micro-batches were tried" in e.value.hint
