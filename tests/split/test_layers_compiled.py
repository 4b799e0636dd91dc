"""Scanned layers reduced in their loop: compiled for H100s, and families of the zoo."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from lensjax.cost.price import price
from lensjax.execute.place import device_mesh
from lensjax.models import target
from lensjax.models.targets import CONFIGS
from lensjax.passes.emit import emit
from lensjax.plan.plan import Micro, Reduce
from lensjax.program.program import analyze
from lensjax.search.choose import tier_names
from lensjax.search.presets import preset
from lensjax.topology import Cluster
from lensjax.verify.hlo import parse_hlo
from lensjax.verify.proof import prove
from tests.gpu_compiler import needs_gpu_compiler
from tests.split.harness import QUICK, between_nodes, numbers
from tests.split.test_end_to_end import traced
from tests.zoo import FAMILIES


def during(hlo: str, kind: str, dtype: str) -> list[list[str]]:
    """For each collective of a kind that is started and waited for outside of the main computation and carries a type,
    the names of the matmuls that stand between the two."""
    found = []
    for computation in parse_hlo(hlo).computations.values():
        all_ = computation.instructions
        for at, i in enumerate(all_):
            if i.opcode != f"{kind}-start" or computation.name.startswith("main") or dtype not in i.shape_text:
                continue
            done = next(n for n, k in enumerate(all_) if k.opcode == f"{kind}-done" and i.name in k.operands)
            found.append([x.name for x in all_[at + 1 : done] if "cublas" in x.tail])
    return found


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("micro", [Micro(), Micro(2)], ids=["whole", "micro"])
@pytest.mark.parametrize("inside", ["fsdp:once=8", "fsdp=8", "fsdp:once=4,tp=2"])
def test_compiled_for_two_nodes_of_h100(inside, micro, tmp_path, monkeypatch):
    """In the backward loop an all-to-all and an all-gather of codes, under way while layers' matmuls run, without any
    flag."""
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))
    layers = 6
    config = dataclasses.replace(CONFIGS["llama3-tiny"], width=512, kv_heads=8, mlp=2048, layers=layers)
    made = target(config, 32, 256)
    program, cluster = analyze(made.step, (made.state, made.batch)), Cluster.parse("dgx-h100:2")
    plain = preset(f"dp=2,{inside}", program, cluster.devices, tier_of=tier_names(cluster))
    plan = price(program, plain.replace(reduce={"rail": Reduce("int8", inside=True)}, micro=micro), cluster)
    proof = prove(program, plan, cluster)
    across, wide = between_nodes(proof)
    assert sum(c.payload for c in wide) <= 64, wide
    coded = [c.kind for c in across if "u8" in c.dtypes and c.trips == layers]
    assert coded.count("all-to-all") == coded.count("all-gather") == 1
    for tier, (predicted, compiled) in proof.tiers.items():
        assert compiled == pytest.approx(predicted, rel=0.02), tier
    beside = {}
    for kind in ("all-to-all", "all-gather"):
        (beside[kind],) = during(proof.audit.artifact.hlo, kind, "u8")
    said = " and ".join(f"{len(names)} beside its {kind}" for kind, names in beside.items())
    print(f"{inside}, {micro.count}: matmuls while a layer's codes are under way: {said}")
    assert any(beside.values())


def compiled(p, plan):
    """The flat results of a step under a plan that is run as the family's own tests do."""
    emitted = emit(p, plan, device_mesh(plan.mesh, jax.devices()[: plan.mesh.size]))
    shardings = {"in_shardings": list(emitted.arguments), "out_shardings": list(emitted.results)}
    made = jax.jit(emitted.run, compiler_options=QUICK, **shardings)(*p.call.leaves, *p.captured)
    return numbers(made), emitted.notes


# Families that scan over layers, and those that scan over time: their weights' gradients are carried sums.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, moves",
    [
        ("gpt_scan_remat_dropout", True),
        ("nnx_gpt_scan", True),
        ("gqa_rope_swiglu", True),
        ("bf16_masters", True),
        ("lstm_scan", False),
        ("moe_dense", False),
    ],
)
def test_families_with_scans(name, moves):
    p, whole = traced(name)
    base = preset("dp=2,fsdp=4", p, 8, tier_of=tier_names(Cluster.parse("cpu:2x4")))
    expected = whole()
    where = [i for i, path in enumerate(p.result_paths) if "grads" in path.split("/")]
    largest = max(np.abs(expected[i]).max() for i in where)
    exact = 2e-6 if FAMILIES[name].dtype == "float32" else 2e-2
    cases = [(Reduce(split=True, inside=True), exact), (Reduce("int8", inside=True), exact + 4 / 252)]
    for micro, (reduce, most) in itertools.product((Micro(), Micro(2)), cases):
        mine, notes = compiled(p, base.replace(reduce={"host": reduce}, micro=micro))
        far = max(np.abs(mine[i] - expected[i]).max() for i in where) / largest
        print(f"{name} {reduce.codec} {micro.count}: {far:.1e}; {notes}")
        assert far <= most
        assert moves == any("inside the backward loop" in n for n in notes)
