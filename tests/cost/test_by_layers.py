"""What is priced by its layers takes the time of the whole step, and the search's model is that of the whole step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lensjax.cost.by_layers import LayerPricer, expanded, pricer_of, restricted
from lensjax.cost.price import price
from lensjax.models.targets import target
from lensjax.plan.pins import normalize
from lensjax.program.folded import folded
from lensjax.program.program import analyze
from lensjax.program.shorten import shorten, stack_of
from lensjax.search.candidates import Candidate, preferred
from lensjax.search.presets import preset
from lensjax.search.problem import Problem
from lensjax.search.reading import solution_of
from lensjax.search.settle import settled
from lensjax.topology.cluster import Cluster

# By how much a price by layers may be off, of seconds and of bytes.
CLOSE = 1e-3
FEW = 8  # layers, enough to fold in these tests


def written_out(layers: int, name: str = "llama3-tiny", batch: int = 32, seq: int = 64):
    step, *arguments = target(name, batch, seq, layers=layers, scan=False)
    return analyze(step, tuple(arguments))


@pytest.fixture(scope="module")
def many():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lensjax.program.folded.LAYERS", FEW)
        program = written_out(FEW)
        assert folded(program) is not None  # kept with the program
        yield program


def test_a_shortened_step_is_the_step_with_fewer_layers(many):
    few = written_out(4)
    short = shorten(many, stack_of(many), 4)
    assert short.count == FEW - 4
    assert sorted(a.shape for a in short.program.arguments) == sorted(a.shape for a in few.arguments)
    cluster = Cluster.parse("dgx-h100:1")
    for name in ("dp", "fsdp:again"):
        a, b = (price(p, preset(name, p, 8), cluster).predicted for p in (short.program, few))
        assert (a.step_s, a.peak_bytes) == pytest.approx((b.step_s, b.peak_bytes), rel=1e-12)
        assert a.tiers == pytest.approx(b.tiers, rel=1e-12)


def test_steps_with_few_layers_and_scanned_ones_are_not_folded():
    assert folded(written_out(2)) is None
    step, *arguments = target("llama3-tiny", 32, 64)
    program = analyze(step, tuple(arguments))
    assert folded(program) is None
    assert not isinstance(pricer_of(program, Cluster.parse("dgx-h100:1")), LayerPricer)


@pytest.mark.parametrize("frozen, taken_out", [(jnp.float32, True), (jnp.int8, False)])
def test_layers_with_frozen_weights(frozen, taken_out):
    """Those that may be trained are stored like parameters; of others, no plan of fewer layers says how they are."""

    def step(params, frozen, x):
        def loss(params):
            h = x
            for w, f in zip(params, frozen):
                h = h + jnp.tanh(h @ w["up"] @ f.astype(jnp.float32)) @ w["down"]
            return (h**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    weights = [{"up": jnp.ones((8, 8)), "down": jnp.ones((8, 8))}] * 6
    program = analyze(step, (weights, [jnp.ones((8, 8), frozen)] * 6, jnp.ones((4, 8))))
    stack = stack_of(program)
    assert stack.count == 5  # nothing needs the gradient of the first one's input
    short = shorten(program, stack, 3)
    assert (short is not None) == taken_out
    if taken_out:
        assert short.count == 2 and len(short.program.arguments) == len(program.arguments) - 6


def test_plans_of_the_shorter_step_and_of_the_whole_one_say_the_same(many):
    fold = folded(many)
    for name in ("fsdp:again=4,tp=2", "zero1", "dp"):
        whole, short = preset(name, many, 8), preset(name, fold.longer.program, 8)
        made = expanded(short, fold)
        assert made.leaves == whole.leaves and made.gather == whole.gather
        assert {k: set(v.items()) for k, v in vars(made.rules).items()} == {
            k: set(v.items()) for k, v in vars(whole.rules).items()
        }
        back = restricted(whole, fold.longer, many)
        assert back.leaves == short.leaves and back.rules == short.rules


def test_a_plan_that_says_something_of_one_layer_is_priced_whole(many):
    cluster = Cluster.parse("dgx-h100:1")
    pins = normalize({"params/layer_3/mlp/up/kernel": (("fsdp",), ())})
    plan = preset("fsdp", many, 8, pins=pins)
    assert restricted(plan, folded(many).longer, many) is None
    assert pricer_of(many, cluster)(plan) == price(many, plan, cluster)
    assert Problem(many, cluster, cluster.device.memory, tuple(pins)).fold is None


@pytest.mark.parametrize("name", ["fsdp:again", "zero1", "dp"])
def test_a_price_by_layers_is_that_of_the_whole_step(many, name):
    cluster = Cluster.parse("dgx-h100:1")
    plan = preset(name, many, 8)
    pricer = pricer_of(many, cluster)
    quick, whole = pricer(plan).predicted, pricer.exactly(plan).predicted
    assert quick.step_s == pytest.approx(whole.step_s, rel=CLOSE)
    assert quick.peak_bytes == pytest.approx(whole.peak_bytes, rel=5 * CLOSE)  # no tensor is large beside the gaps
    assert quick.tiers == pytest.approx(whole.tiers, rel=CLOSE)
    assert pricer(plan).predicted == whole  # what is known is not estimated


def test_the_search_models_the_whole_step(many):
    cluster = Cluster.parse("dgx-h100:1")
    problem = Problem(many, cluster, cluster.device.memory)
    assert problem.fold is not None and problem.written_out.fold is None
    for name in ("fsdp:again", "dp", "fsdp:again=4,tp=2"):
        plan = preset(name, many, 8)
        quick, whole = solution_of(problem, plan), solution_of(problem.written_out, plan)
        assert quick.seconds == pytest.approx(whole.seconds, rel=1e-6)
        assert quick.bytes == pytest.approx(whole.bytes, rel=1e-6)


@pytest.mark.parametrize("seems, asked", [(1.02, True), (2.0, False)])
def test_what_is_chosen_is_priced_whole_and_what_hardly_seems_too_large_is_asked_for(many, seems, asked):
    cluster = Cluster.parse("dgx-h100:1")
    limit = cluster.device.memory
    pricer = pricer_of(many, cluster)
    quick = {n: pricer(preset(n, many, 8)) for n in ("dp", "fsdp:again")}
    first, second = sorted(quick, key=lambda n: quick[n].predicted.step_s)
    predicted = dataclasses.replace(quick[first].predicted, peak_bytes=seems * limit)
    quick[first] = dataclasses.replace(quick[first], predicted=predicted)
    found = settled([Candidate(n, plan) for n, plan in quick.items()], pricer_of(many, cluster), limit)
    chosen = preferred(found, limit)
    assert chosen.name == (first if asked else second)
    assert chosen.plan.predicted == price(many, preset(chosen.name, many, 8), cluster).predicted


@pytest.mark.slow
def test_a_real_network_by_its_layers():
    """Tensor parallelism combines more calls into one where there are more layers, which two shorter steps do not
    show; everything else takes what the whole step takes."""
    program = written_out(24, "llama3-8b", 512, 8192)
    cluster = Cluster.parse("dgx-h100:32")
    pricer, problem = pricer_of(program, cluster), Problem(program, cluster, cluster.device.memory)
    for name, close in (("fsdp:again", CLOSE), ("dp=32,zero1=8", CLOSE), ("fsdp:again=32,tp_sp=8", 5 * CLOSE)):
        plan = problem.preset(name)
        quick, whole = pricer(plan).predicted, pricer.exactly(plan).predicted
        assert quick.step_s == pytest.approx(whole.step_s, rel=close)
        assert sum(quick.tiers.values()) == pytest.approx(sum(whole.tiers.values()), rel=close)
        assert whole.peak_bytes * (1 - close) < quick.peak_bytes < whole.peak_bytes * 1.05
        seen, full = solution_of(problem, plan), solution_of(problem.written_out, plan)
        assert seen.seconds == pytest.approx(full.seconds, rel=1e-6)
        assert seen.bytes == pytest.approx(full.bytes, rel=1e-6)
