"""A decorated step proves its plan without the devices that the plan is for."""

import jax
import jax.numpy as jnp
import pytest

import lensjax
from tests.gpu_compiler import needs_gpu_compiler


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))


def step(params, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}


def shapes(batch=64):
    on = jax.ShapeDtypeStruct
    params = {"a": on((128, 512), jnp.float32), "b": on((512, 32), jnp.float32)}
    return params, {"x": on((batch, 128), jnp.float32), "y": on((batch, 32), jnp.float32)}


def test_a_step_proves_its_plan_on_the_cpu_compiler():
    planned = lensjax.parallelize(step, cluster="dgx-h100:1", plan="fsdp")
    planned.plan_for(*shapes())
    proof = planned.verify(backend="cpu")
    assert proof.backend == "cpu" and proof.audit.artifact.devices == 8
    assert set(proof.tiers) == {"nvlink"} and not proof.audit.unknown
    assert not any(n.startswith("batch not followed") for n in proof.audit.notes)
    assert "peak memory" in str(proof) and "planned" in str(proof)


@pytest.mark.few(1)
@needs_gpu_compiler
@pytest.mark.parametrize("plan, rows", [("dp", 4096), ("fsdp", 4096), ("dp=2,fsdp=4", 4096), ("dp", 64), ("fsdp", 64)])
def test_what_is_planned_is_what_is_compiled(plan, rows):
    """With fewer rows than columns too, where the partitioner alone would move rows for the weights' gradients."""
    planned = lensjax.parallelize(step, cluster="dgx-h100:1", plan=plan)
    planned.plan_for(*shapes(batch=rows))
    proof = planned.verify()
    assert proof.holds, proof.findings
    sent = [(p, c) for p, c in proof.tiers.values()]
    assert sum(c for _, c in sent) == pytest.approx(sum(p for p, _ in sent), rel=0.02)


@pytest.mark.slow
@needs_gpu_compiler
def test_the_compiled_step_is_not_the_plan():
    """A plan whose figures are wrong is contradicted: traffic and memory beyond it are findings."""
    import dataclasses

    from lensjax.topology.cluster import Cluster
    from lensjax.verify.proof import differences, prove

    planned = lensjax.parallelize(step, cluster="dgx-h100:1", plan="fsdp")
    plan = planned.plan_for(*shapes())
    proof = prove(planned.program, plan, Cluster.parse("dgx-h100:1"))
    tight = dataclasses.replace(proof.predicted, peak_bytes=proof.audit.peak.bytes / 2)
    rows = tuple(dataclasses.replace(r, planned=0.0, compiled=r.compiled + 2**20) for r in proof.traffic if r.compiled)
    kinds = {f.kind for f in differences(tight, proof.audit, rows)}
    assert kinds == {"more_memory", "unplanned_traffic"}


def test_a_reduction_over_two_axes_may_come_apart():
    """Summed over both in the plan; scattered over one and summed over the other by the compiler, for fewer bytes."""
    from lensjax.verify.proof import Row, _rewritten

    both = ("dp", "fsdp")
    rows = Row("all-reduce", both, 600.0, 40.0), Row("reduce-scatter", ("fsdp",), 6.0, 300.0)
    assert _rewritten(rows[1], rows)
    assert not _rewritten(rows[1], (Row("all-reduce", both, 200.0, 40.0), rows[1]))
    gathers = Row("all-reduce", both, 600.0, 40.0), Row("all-gather", ("fsdp",), 6.0, 300.0)
    assert not _rewritten(gathers[1], gathers)


@pytest.mark.parametrize("shape, severity", [("f32[4,16,24]", "note"), ("f32[512,16,24]", "warning")])
def test_a_value_made_whole_is_a_fault_where_it_is_large(shape, severity):
    from types import SimpleNamespace

    from lensjax.verify.rules.memory import involuntary

    line = f'Involuntary full rematerialization: %a = {shape} add(x, y), source_file="m.py" source_line=7'
    case = SimpleNamespace(artifact=SimpleNamespace(log=line))
    assert [(f.severity, f.line) for f in involuntary(case)] == [(severity, "m.py:7")]
