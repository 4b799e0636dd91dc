"""Compiled steps as the judge of plans: after a search, and where the partitioner cannot be driven."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import lensjax
from lensjax import _jax
from lensjax._errors import CompileError, UnsupportedJax
from lensjax.execute.planning import Options, make_plan
from lensjax.plan.plan import Plan, Predicted
from lensjax.program.program import analyze
from lensjax.report.explain import explain
from lensjax.search.candidates import Candidate
from lensjax.search.choose import Choice
from lensjax.search.judged import disagreement, judged
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from lensjax.verify.judge import judge
from tests.verify.test_proof import shapes, step


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def program():
    return analyze(step, shapes())


def candidates(program, times, peak=1.0):
    """One candidate for each of these step times, as the planner would predict them."""
    plan = preset("dp", program, 8)
    named = [(f"plan {k}", Predicted(t, peak, {"nvlink": 0.0})) for k, t in enumerate(times)]
    return tuple(Candidate(n, plan.replace(name=n, predicted=p)) for n, p in named)


def choice(program, times, **kwargs):
    found = candidates(program, times, **kwargs)
    return Choice(found[0].plan, found, 10.0)


def verdicts(times, peaks=None):
    """A judge that gives each plan, by its name, a step time and a peak; None: it cannot compile the plan."""

    def of(plan: Plan) -> Plan:
        k = int(plan.name.split()[1])
        if times[k] is None:
            raise CompileError("no result of the compiler after 600 s")
        return dataclasses.replace(plan, predicted=Predicted(times[k], (peaks or {}).get(k, 1.0), {"nvlink": 0.0}))

    return of


def test_the_judge_decides_among_the_last_few_and_both_estimates_stay(program):
    made = judged(choice(program, [1.0, 1.1, 1.2, 1.3]), verdicts([1.5, 1.2, 1.4, 0.1]))
    assert made.plan.name == "plan 1"
    assert made.plan.predicted.step_s == 1.1  # what was planned is not overwritten
    assert [c.judged.step_s if c.judged else None for c in made.candidates] == [1.5, 1.2, 1.4, None]
    assert disagreement(made.candidates[0]) == pytest.approx(0.5)
    assert disagreement(made.candidates[3]) is None
    text = explain(program, made)
    assert "compiled, plan 1 takes" in text and "+50%" in text


def test_a_plan_that_does_not_fit_when_compiled_is_not_chosen(program):
    made = judged(choice(program, [1.0, 1.1]), verdicts([1.0, 1.3], peaks={0: 11.0}))
    assert made.plan.name == "plan 1"


def test_what_cannot_be_compiled_keeps_its_reason(program):
    made = judged(choice(program, [1.0, 1.1]), verdicts([None, 2.0]))
    assert made.plan.name == "plan 1" and "no result of the compiler" in made.candidates[0].reason
    nothing = judged(choice(program, [1.0, 1.1]), verdicts([None, None]))
    assert nothing.plan.name == "plan 0" and all(c.judged is None for c in nothing.candidates)


def without_partitioner(monkeypatch):
    def broken():
        raise UnsupportedJax("XLA's partitioner (Shardy) cannot be driven from this jaxlib: a pass is missing")

    monkeypatch.setattr(_jax, "mlir", broken)


def test_without_the_partitioner_a_plan_is_priced_by_compiling_it(program, monkeypatch):
    """Against the planner's own figures for the same plan: bytes agree, and the prediction says how it was made."""
    cluster = Cluster.parse("cpu:2")
    planned = make_plan(program, cluster, Options(plan="fsdp")).plan.predicted
    without_partitioner(monkeypatch)
    plan = make_plan(program, cluster, Options(plan="fsdp")).plan
    assert plan.predicted.findings[0].startswith("priced by compiling it, since XLA's partitioner")
    assert plan.predicted.peak_bytes > 0 and plan.predicted.step_s > 0
    assert plan.mesh.size == 2 and plan.provenance.program == program.fingerprint
    # XLA:CPU all-reduces gradients where the plan counts a reduce-scatter: between one and two times the bytes.
    sent, expected = (sum(p.tiers.values()) for p in (plan.predicted, planned))
    assert expected <= sent <= 2 * expected


def test_without_the_partitioner_compression_is_compiled_too_or_says_why_not(program, monkeypatch):
    without_partitioner(monkeypatch)
    far = make_plan(program, Cluster.parse("cpu:2x1"), Options(plan="dp", compress="int8")).plan
    assert [r.codec for r in far.reduce.values()] == ["int8"]
    assert any("compress='int8'" in f for f in far.predicted.findings)
    near = make_plan(program, Cluster.parse("cpu:2"), Options(plan="dp", compress="int8")).plan
    assert not near.reduce and "no gradient crosses a slow tier" in near.predicted.findings[-1]


@pytest.mark.slow
def test_without_the_partitioner_a_step_is_planned_run_and_right(monkeypatch):
    params, batch = shapes()
    keys = iter(jax.random.split(jax.random.key(0), 4))
    values = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype) * 0.1, (params, batch))
    expected, metrics = step(*values)
    without_partitioner(monkeypatch)
    run = lensjax.parallelize(step, cluster="cpu:8", donate=False)
    got, found = run(*values)
    assert jnp.allclose(metrics["loss"], found["loss"], rtol=1e-5)
    assert all(
        jnp.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got))
    )
    text = run.explain()
    assert "priced by compiling it" in text


@pytest.mark.slow
def test_the_judge_compiles_and_says_what_the_cpu_does_not_prove(program):
    cluster = Cluster.parse("dgx-h100:1")
    made = judged(make_plan(program, cluster, Options()), judge(program, cluster, backend="cpu"), count=2)
    seen = [c.judged for c in made.candidates if c.judged is not None]
    assert len(seen) == 2 and all("emulated" in p.findings[0] for p in seen)
    assert made.plan.name in {c.name for c in made.candidates if c.judged is not None}
