"""On GPUs a step is compiled with the scheduler that hides communication, whatever the GPU."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from lensjax.cost.price import price
from lensjax.models import target
from lensjax.models.targets import CONFIGS
from lensjax.passes.emit import HIDING, abstract_mesh, emit
from lensjax.program.program import analyze
from lensjax.search.choose import tier_names
from lensjax.search.presets import preset
from lensjax.topology import Cluster
from lensjax.verify.proof import prove
from tests.gpu_compiler import needs_gpu_compiler

CLUSTER = Cluster.parse("p4d:2")


@functools.cache
def planned():
    config = dataclasses.replace(CONFIGS["llama3-tiny"], width=2048, kv_heads=8, mlp=8192, layers=6)
    made = target(config, 32, 2048)
    program = analyze(made.step, (made.state, made.batch))
    plan = preset("fsdp:again=16", program, 16, tier_of=tier_names(CLUSTER))
    return program, price(program, plan, CLUSTER)


@pytest.mark.parametrize("platform, on", [("cuda", True), ("gpu", True), ("tpu", False), ("cpu", False)])
def test_asked_for_on_gpus_only(platform, on):
    program, plan = planned()
    assert (HIDING in emit(program, plan, abstract_mesh(plan)).options(platform)) == on


def test_what_xla_flags_say_stands(monkeypatch):
    program, plan = planned()
    monkeypatch.setenv("XLA_FLAGS", f"--{HIDING}=false")
    assert emit(program, plan, abstract_mesh(plan)).options("cuda") == {}


@needs_gpu_compiler
def test_an_older_gpu_hides_what_it_gathers(monkeypatch, tmp_path):
    """XLA leaves the scheduler out before Hopper: there the collectives of a loop's body stand where they are read."""
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))
    program, plan = planned()
    made, without = (prove(program, dataclasses.replace(plan, flags=f), CLUSTER) for f in ({}, {HIDING: False}))
    assert dict(made.audit.artifact.options)[HIDING] is True
    exposed, alone = (sum(p.audit.timeline.exposed.values()) for p in (made, without))
    print(f"compute waits {exposed * 1e3:.2f} ms, {alone * 1e3:.2f} ms without")
    assert exposed < 0.9 * alone
    assert made.audit.traffic.tiers == pytest.approx(without.audit.traffic.tiers)
