"""Levels chosen for a program: what the groups hold, and plans that fit."""

import dataclasses

import jax.numpy as jnp
import pytest

from lensjax.cost.levels import groups, share_of, work_seconds
from lensjax.cost.price import price
from lensjax.passes.recompute import layers_at
from lensjax.passes.shardings import resolve
from lensjax.plan.levels import parse
from lensjax.program.program import analyze
from lensjax.search.levels import frontier, levels
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from tests.recompute.steps import LAYERS, STEPS, WIDTH

CLUSTER = Cluster.parse("dgx-h100:1")
ROWS = 2**13
ONE = 4 * ROWS * WIDTH / 8  # bytes of one activation of a layer's input, per device


def program(name):
    step, params, _ = STEPS[name]()
    p = analyze(step, (params, jnp.zeros((ROWS, WIDTH))))
    return p, preset("dp", p, 8)


@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_what_a_layer_holds(name):
    """Kept whole a layer holds its hidden values (twice its input) and a few more; at `inputs` its input alone."""
    p, plan = program(name)
    found = groups(p, plan, CLUSTER)
    assert sum(g.count for g in found) == LAYERS
    for g in found:
        options = {o.level: o for o in g.options}
        assert options["keep"].seconds == 0 < options["inputs"].seconds
        assert options["keep"].kept >= 3 * ONE and options["inputs"].kept <= ONE
        assert options["dots"].kept > options["inputs"].kept
        assert options["named"].kept > options["inputs"].kept


def test_a_step_that_recomputes_itself_leaves_nothing_to_choose():
    p, plan = program("checkpointed")
    assert groups(p, plan, CLUSTER) == ()
    assert levels(p, plan, CLUSTER, memory=1.0) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_a_plan_that_does_not_fit_gets_levels_under_which_it_does(name):
    p, plan = program(name)
    whole = price(p, plan, CLUSTER).predicted
    least = price(p, plan.replace(layers={"*": "inputs"}), CLUSTER).predicted
    assert least.peak_bytes < whole.peak_bytes
    memory = (least.peak_bytes + whole.peak_bytes) / 2
    made = levels(p, plan, CLUSTER, memory)
    assert made is not None and made.predicted.peak_bytes <= memory
    assert any(part.kind != "keep" for text in made.layers.values() for part in parse(text))
    assert levels(p, plan, CLUSTER, whole.peak_bytes).layers == {}
    assert levels(p, plan, CLUSTER, least.peak_bytes / 4) is None


def test_the_frontier_goes_from_everything_kept_to_the_least():
    p, plan = program("scanned")
    points = frontier(groups(p, plan, CLUSTER))
    assert set(points[0][2].values()) == {"keep"} and points[0][1] == 0
    assert "keep" not in points[-1][2].values()


def over(bandwidth):
    """The cluster with another host link. Bytes per second."""
    return dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, host_bandwidth=bandwidth))


@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_offload_is_offered_where_the_host_link_carries_an_input_during_its_layers_arithmetic(name):
    p, plan = program(name)
    offered = lambda cluster: any(o.level == "offload" for g in groups(p, plan, cluster) for o in g.options)
    forward = min(work_seconds(layer.work, share_of(p, plan), CLUSTER.device) for layer in offloaded(p, plan))
    assert offered(over(1.01 * ONE / forward))
    assert not offered(over(0.5 * ONE / forward))
    assert not offered(over(0.0))


def offloaded(p, plan):
    plan = plan.replace(layers={"*": "offload"})
    return [layer for layer in layers_at(p, plan, resolve(p, plan)) if layer.host]
