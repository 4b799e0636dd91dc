"""More of anything never makes it worse: of the whole search, on real programs. (Of one case alone: `test_solve`.)"""

import dataclasses
import itertools

import pytest

from lensjax import Cluster, DoesNotFit
from lensjax.search import strategies
from lensjax.search.candidates import TIE
from lensjax.search.choose import choose
from lensjax.search.problem import Problem
from tests.search.families import family


def faster(cluster: Cluster, tier: int, factor: float) -> Cluster:
    """A cluster with one tier's links so many times as fast. Measured tables are for the machine as it is: neither of
    the two that are compared may have one, hence the name."""
    tiers = [
        dataclasses.replace(t, bandwidth=t.bandwidth * (factor if i == tier else 1))
        for i, t in enumerate(cluster.tiers)
    ]
    return dataclasses.replace(cluster, tiers=tuple(tiers), name="made up")


def bound(program, cluster, memory=None):
    return strategies.milp(Problem(program, cluster, memory or cluster.device.memory)).bound


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gqa_rope_swiglu", "dlrm"])
@pytest.mark.parametrize("tier", [0, 1])
def test_a_faster_link_never_gives_a_slower_bound(name, tier):
    program, cluster = family(name), Cluster.parse("p3.16xlarge:2")
    seconds = [bound(program, faster(cluster, tier, f)) for f in (1, 1.5, 4, 30)]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(seconds)), seconds


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mlp", "gqa_rope_swiglu", "moe_dense", "dlrm", "encoder_decoder"])
def test_more_memory_never_gives_a_slower_bound(name):
    program, cluster = family(name), Cluster.parse("dgx-h100:1")
    whole = min(s.bytes for s in strategies.milp(Problem(program, cluster, 1e15)).searched.solutions)
    seconds = [bound(program, cluster, whole * f) for f in (0.3, 0.5, 0.7, 0.9, 1.0, 2.0)]
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(seconds)), seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa_rope_swiglu", "moe_dense", "dlrm"])
def test_more_memory_never_gives_a_slower_plan(name):
    program, cluster = family(name), Cluster.parse("dgx-h100:1")
    whole = choose(program, cluster).plan.predicted.peak_bytes
    seconds = []
    for part in (0.6, 0.8, 0.95, 1.0, 1.5):
        try:
            seconds.append(choose(program, cluster, memory=whole * part).plan.predicted.step_s)
        except DoesNotFit:
            assert not seconds, "fits in less, and not in more"
    assert all(b <= a * (1 + TIE) for a, b in itertools.pairwise(seconds)), seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gqa_rope_swiglu", "moe_dense"])
def test_more_choices_never_give_a_slower_plan(name):
    program, cluster = family(name), Cluster.parse("p3.16xlarge:2")
    few, more = (choose(program, cluster, search=how).plan.predicted.step_s for how in ("presets-only", "milp"))
    assert more <= few * (1 + TIE)
