"""Levels in programs compiled for H100: against hand-written remat, against what was planned, and on the host."""

import functools

import pytest

from benchmarks.largest_batch import program
from benchmarks.planned_levels import row as planned_row
from benchmarks.remat_table import ROWS, row
from lensjax.topology.cluster import Cluster
from tests.gpu_compiler import needs_gpu_compiler

pytestmark = [pytest.mark.slow, needs_gpu_compiler]
CLUSTER = Cluster.parse("dgx-h100:1")


@functools.cache
def model(name):
    return program(name, {"gpt-scan": 32, "gpt-unrolled": 32, "vit": 256, "moe": 32}[name])


@pytest.mark.parametrize("name", [name for name, (_, devices, _) in ROWS.items() if devices == 1])
def test_no_more_than_hand_written_remat(name):
    found = row(name, CLUSTER)
    assert found["recompute"]["temporaries"] <= found["hand"]["temporaries"]


@pytest.mark.parametrize("name", ["dp", "dp-scan"])
def test_no_more_waiting_for_communication_than_with_hand_written_remat(name):
    found = row(name, CLUSTER)
    assert found["inputs"]["temporaries"] <= found["hand"]["temporaries"]
    assert found["inputs"]["exposed_s"] <= found["hand"]["exposed_s"]


@pytest.mark.parametrize("level", ["keep", "scores", "dots", "inputs", "recompute"])
@pytest.mark.parametrize("name, error", [("gpt-scan", 0.10), ("vit", 0.10), ("moe", 0.10), ("gpt-unrolled", 0.15)])
def test_planned_peak(name, error, level):
    found = planned_row(name, model(name), level, CLUSTER)
    assert found["planned"] == pytest.approx(found["compiled"], rel=error)


@pytest.mark.parametrize("name", ["gpt-scan", "gpt-unrolled"])
def test_offloaded_inputs_are_fetched_while_the_layer_before_is_computed(name):
    found = planned_row(name, model(name), "offload", CLUSTER)
    assert found["host_planned"] > 0 and found["host_compiled"] == pytest.approx(found["host_planned"])
    assert found["handed"]
    # What a scan's backward begins with is fetched right before it.
    assert found["fetches"] - found["hidden"] <= (name == "gpt-scan")
