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
@pytest.mark.parametrize("plan", ["dp", "fsdp", "dp=2,fsdp=4"])
def test_what_is_planned_is_what_is_compiled(plan):
    planned = lensjax.parallelize(step, cluster="dgx-h100:1", plan=plan)
    planned.plan_for(*shapes(batch=4096))  # with fewer rows than columns the partitioner moves rows, and XLA does not
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
