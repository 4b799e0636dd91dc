"""Pipelines: the formula, what a stage is, and what the price of one must obey."""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensjax._errors import ClusterError, DoesNotFit
from lensjax.models.targets import target
from lensjax.program.program import analyze
from lensjax.search.choose import choose
from lensjax.search.cuts import partition
from lensjax.search.line import line_of
from lensjax.search.pipeline import Pricing, bubble, in_flight, step_seconds
from lensjax.search.pipelines import best_of, pipelines
from lensjax.search.problem import Problem
from lensjax.search.stage import cut, saved
from lensjax.search.stages import Run
from lensjax.search.strategies import milp
from lensjax.topology.cluster import Cluster
from lensjax.topology.parts import joints, part

# Layers that compute long enough for a cluster to matter, and little else.
SMALL = {"llama3-tiny": (64, 128, {"width": 512, "mlp": 2048, "layers": 8}), "wide-resnet-tiny": (64, None, {})}


@functools.cache
def program(name="llama3-tiny", **changes):
    batch, seq, own = SMALL.get(name, (64, 128, {}))
    step, *arguments = target(name, batch, seq, **{**own, **changes})
    return analyze(step, tuple(arguments))


@functools.cache
def problem(name="llama3-tiny", spec="dgx-h100:2", **changes):
    cluster = Cluster.parse(spec)
    return Problem(program(name, **changes), cluster, cluster.device.memory)


def slower(cluster, factor):
    """The cluster with a slower outermost tier."""
    *inner, outer = cluster.tiers
    return dataclasses.replace(
        cluster, tiers=(*inner, dataclasses.replace(outer, bandwidth=outer.bandwidth / factor, nic_sharing=1))
    )


# ---- the formula -------------------------------------------------------------------------------------------------


@given(st.integers(1, 16), st.integers(1, 64), st.floats(1e-3, 10))
def test_equal_stages_wait_as_long_as_narayanan_et_al_say(stages, count, t):
    total = step_seconds([t] * stages, [0.0] * (stages - 1), [0.0], count)
    assert total == pytest.approx((count + stages - 1) * t)
    assert bubble([t] * stages, [0.0] * (stages - 1), count) == pytest.approx((stages - 1) / (count + stages - 1))


def test_a_slow_link_is_the_bottleneck_when_it_takes_longer_than_a_stage():
    assert step_seconds([1.0, 1.0], [0.1], [0.5], 10) == pytest.approx(2 + 0.2 + 9 * 1.0 + 0.5)
    assert step_seconds([1.0, 1.0], [2.0], [0.0], 10) == pytest.approx(2 + 4.0 + 9 * 2.0)


def test_earlier_stages_hold_more_micro_batches():
    assert [in_flight(s, 4, 16) for s in range(4)] == [4, 3, 2, 1]
    assert [in_flight(s, 4, 2) for s in range(4)] == [2, 2, 2, 1]


@settings(deadline=None)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.data())
def test_the_partition_equals_brute_force(seconds, data):
    stages = data.draw(st.integers(1, len(seconds)))

    def sums(edges):
        at = [0, *edges, len(seconds)]
        return [sum(seconds[a:b]) for a, b in itertools.pairwise(at)]

    best = min(max(sums(edges)) for edges in itertools.combinations(range(1, len(seconds)), stages - 1))
    sizes = partition(seconds, stages)
    assert len(sizes) == stages and min(sizes) >= 1 and sum(sizes) == len(seconds)
    assert max(sums(np.cumsum(sizes)[:-1].tolist())) == pytest.approx(best)


def test_equal_units_make_even_stages():
    assert sorted(partition([1.0] * 10, 4)) == [2, 2, 3, 3]
    with pytest.raises(ValueError, match="2 units make no 3 stages"):
        partition([1.0, 1.0], 3)


# ---- parts of a cluster ------------------------------------------------------------------------------------------


def test_parts_are_whole_nodes_or_pieces_of_one():
    cluster = Cluster.parse("dgx-h100:4")
    nodes, halves = part(cluster, 4), part(cluster, 8)
    assert nodes.devices == 8 and nodes.tiers == cluster.tiers[:1]
    assert halves.devices == 4 and halves.tiers[0].bandwidth == cluster.tiers[0].bandwidth
    assert part(cluster, 2).devices == 16 and part(cluster, 1) is cluster
    inside, across = cluster.tiers[0].usable, cluster.tiers[-1].usable
    assert [b for _, b in joints(cluster, 8)] == [inside, across, inside, across, inside, across, inside]


def test_a_piece_of_a_mesh_has_the_links_among_its_own_devices():
    node = Cluster.parse("p3.16xlarge:1")
    assert node.tiers[0].kind == "mesh"
    link = node.tiers[0].bandwidth / 7
    assert part(node, 2).tiers[0].bandwidth == pytest.approx(3 * link)
    assert joints(node, 2)[0][1] == pytest.approx(link)


@pytest.mark.parametrize("cluster, why", [
    (dataclasses.replace(Cluster.parse("dgx-h100:2"), missing=(3,)), "not alike"),
    (Cluster.parse("tpu-v5p:4x4x4"), "torus"),
    (Cluster.parse("dgx-h100:3"), "no even piece"),
])  # fmt: skip
def test_parts_that_are_not_alike_are_refused(cluster, why):
    with pytest.raises(ClusterError, match=why):
        part(cluster, 3 if cluster.missing else 2)


# ---- stages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, changes", [
    ("llama3-tiny", ()), ("llama3-tiny", (("scan", False), ("layers", 3))), ("wide-resnet-tiny", ()), ("t5-tiny", ()),
    ("deepseek-tiny", ()), ("vit-tiny", ()),
])  # fmt: skip
def test_stages_share_out_the_step(name, changes):
    """Every parameter, all that the optimizer moves and all that is multiplied is in exactly one stage; a table that is
    read in several is in all of these."""
    p = problem(name, "dgx-h100:1", **dict(changes)) if name in SMALL else problem_of(name)
    line = line_of(p.program, p.unsplit, p.tables)
    units, seconds = line.units()
    sizes = partition(list(seconds), min(3, len(units)))
    assert len(sizes) > 1
    edges = [0, *np.cumsum(sizes)]
    spans = [(units[a][0], units[b - 1][1]) for a, b in itertools.pairwise(edges)]
    stages = [cut(p.program, p.unsplit, line, span) for span in spans]
    tables = [p.tables_of(s.program, s.unsplit) for s in stages]
    total = lambda t: (t.kernel_seconds * np.array(t.regions)[t.kernel_region]).sum()
    held = collections.Counter()
    for s in stages:
        held.update({s.program.arguments[i].path: s.program.arguments[i].nbytes for i in s.program.parameters})
    whole = {p.program.arguments[i].path: p.program.arguments[i].nbytes for i in p.program.parameters}
    assert {path for path in whole if held[path] != whole[path]} <= {"state/params/embed/embedding"}
    assert all(held[path] >= whole[path] for path in whole)
    assert sum(map(total, tables)) == pytest.approx(total(p.tables), rel=1e-6)
    assert sum(t.stored_bytes.sum() for t in tables) == pytest.approx(p.tables.stored_bytes.sum(), rel=0.05)


@functools.cache
def problem_of(name):
    step, *arguments = target(name, 16, None if name.startswith("vit") else 64)
    cluster = Cluster.parse("dgx-h100:1")
    return Problem(analyze(step, tuple(arguments)), cluster, cluster.device.memory)


def test_a_stage_keeps_what_its_layers_were_given():
    """Each layer is recomputed from its input: that, for each layer of the stage, is what a micro-batch in flight
    holds. A tied table is on the first and on the last stage."""
    p = problem(tied=True)
    line = line_of(p.program, p.unsplit, p.tables)
    (start, stop), *_ = {line.spans[i] for i in line.loops}
    stage = cut(p.program, p.unsplit, line, (start + 2, start + 5))
    assert stage.layers == (3,)
    kept = saved(stage, p.tables_of(stage.program, stage.unsplit)).sum()
    batch, seq, own = SMALL["llama3-tiny"]
    assert kept == 3 * batch * seq * own["width"] * 2
    table = next(
        i for i, a in enumerate(p.program.arguments) if a.path.endswith("embed/embedding") and a.role == "parameter"
    )
    ends = cut(p.program, p.unsplit, line, (0, start + 1)), cut(p.program, p.unsplit, line, (stop - 1, line.length))
    assert [s.program.arguments[table].role for s in (*ends, stage)] == ["parameter", "parameter", "absent"]


# ---- prices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3-tiny", "wide-resnet-tiny"])
def test_one_stage_and_one_micro_batch_are_the_price_without_stages(name):
    p = problem(name)
    made = Pricing(p).price(1, 1, p.memory)
    found = milp(p).searched
    assert made is not None and found is not None
    assert made.step_s == pytest.approx(found.bound, rel=1e-12)
    assert made.bubble == 0.0 and made.sends == ()


def test_more_bandwidth_between_parts_is_never_slower():
    known = problem()

    def pricing(factor):
        p = Problem(program(), slower(known.cluster, factor), 80e9)
        p.__dict__.update(unsplit=known.unsplit, tables=known.tables, axes=known.axes)
        return Pricing(p)

    pricings = [pricing(factor) for factor in (4000, 400, 1)]
    for count, micro in ((2, 4), (4, 8)):
        prices = [p.price(count, micro).step_s for p in pricings]
        assert prices == sorted(prices, reverse=True)
        assert prices[0] > prices[-1]


def test_more_micro_batches_leave_a_smaller_bubble():
    made = [Pricing(problem()).price(4, m) for m in (4, 8, 16)]
    assert [m.bubble for m in made] == sorted((m.bubble for m in made), reverse=True)


def test_memory_grows_with_what_is_in_flight():
    p = problem()
    stages = Pricing(p).stages
    span = next(stages.line.spans[i] for i in stages.line.loops)
    span = (span[0] + 1, span[0] + 3)
    one, four = (stages.best(span, Run(4, 8, flying), np.inf) for flying in (1, 4))
    batch, seq, own = SMALL["llama3-tiny"]
    each = 2 * (batch / 8) * seq * own["width"] * 2 / one.ways  # two layers, bfloat16
    assert one.mesh == four.mesh and four.micro_s == one.micro_s
    assert four.bytes - one.bytes == pytest.approx(3 * each)


def test_a_limit_is_kept_or_there_is_no_pipeline():
    pricing = Pricing(problem())
    free = pricing.price(2, 2)
    tight = pricing.price(2, 2, free.peak_bytes * 0.9)
    assert tight is None or (tight.peak_bytes <= free.peak_bytes * 0.9 and tight.step_s >= free.step_s)
    assert pricing.price(2, 2, 1e6) is None


@pytest.mark.slow
def test_scanned_and_unrolled_layers_cost_alike():
    scanned, unrolled = (Pricing(problem(scan=scan, layers=4)).price(2, 4) for scan in (True, False))
    assert unrolled.step_s == pytest.approx(scanned.step_s, rel=0.15)


def test_stages_may_have_different_numbers_of_layers():
    made = Pricing(problem(layers=7)).price(2, 4)
    assert sorted(sum(s.layers) for s in made.stages) == [3, 4]


# ---- what is shown -----------------------------------------------------------------------------------------------


@functools.cache
def pair(factor):
    """Two devices; where they are joined by next to nothing, plans without stages send activations of every layer over
    it, or every gradient."""
    cluster = slower(Cluster.parse("dgx-h100:2"), factor)
    return dataclasses.replace(cluster, tiers=(dataclasses.replace(cluster.tiers[-1], size=2),))


def test_stages_that_would_gain_are_shown_and_not_chosen():
    from lensjax.report.explain import explain

    choice = choose(program(), pair(4000))
    best = choice.pipelines[0]
    assert best.step_s < choice.plan.predicted.step_s / 1.01
    assert choice.plan.pipeline is None and all(c.plan is None or c.plan.pipeline is None for c in choice.candidates)
    said = explain(program(), choice)
    assert f"with pipeline stages (not executable yet): {best.pipeline.stages} stages x" in said
    assert "1f1b" in said and "% faster" in said


def test_stages_that_gain_nothing_are_not_mentioned():
    from lensjax.report.explain import explain

    choice = choose(program("gpt3-tiny"), pair(1))
    assert choice.pipelines == () and "pipeline" not in explain(program("gpt3-tiny"), choice)


def test_where_nothing_fits_a_pipeline_that_would_is_named(monkeypatch):
    small, cluster = program("gpt3-tiny"), pair(1)
    assert pipelines(Problem(small, cluster, 1e5), np.inf) == ()
    found = pipelines(Problem(small, cluster, 1e12), np.inf)
    monkeypatch.setattr("lensjax.search.choose.pipelines", lambda *_: found)
    monkeypatch.setattr("lensjax.search.joint.MICRO_BATCHES", ())
    with pytest.raises(
        DoesNotFit, match=r"with pipeline stages .not executable yet. it would fit: 2 stages x 1 device"
    ):
        choose(small, cluster, memory=1e5)


@pytest.mark.slow
def test_a_large_model_on_slow_links_needs_stages():
    """Alpa's GPT-39B on 64 V100s, 25 Gb/s between nodes (OSDI '22, figure 7a): without stages 2.1 TFLOPS per GPU, with
    16 stages of four GPUs 57: splitting every operation over slow links collapses."""
    import jax.numpy as jnp

    from lensjax.models.decoder import Config

    config = Config(
        vocab=51_200, width=8192, layers=48, heads=64, kv_heads=64, mlp=4 * 8192, norm="layer", gated=False, bias=True,
        positions="learned", tied=True, max_seq=1024, dtype=jnp.bfloat16,
    )  # fmt: skip
    step, *arguments = target(config, 1024, 1024)
    cluster = Cluster.parse("p3.16xlarge:8")
    peak = {**cluster.device.peak, "bfloat16": cluster.device.peak["float16"]}
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, peak=peak))
    p = Problem(analyze(step, tuple(arguments)), cluster, cluster.device.memory)
    pricing = Pricing(p)
    without, staged = best_of(pricing, 1), best_of(pricing, 8)
    assert staged is not None and staged.peak_bytes <= p.memory
    assert without is None or without.step_s > 10 * staged.step_s
