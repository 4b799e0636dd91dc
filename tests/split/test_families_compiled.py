"""Every family of the zoo, compiled for two nodes of H100 with codes between them: only codes cross, and few totals.

A few operations have batching rules that mix the shares (see `lensjax.passes.islands`): XLA would then gather or sum
whole operands over the slow tier, which is what this looks for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import lensjax
from lensjax.topology import Cluster
from lensjax.verify.proof import prove
from tests.gpu_compiler import needs_gpu_compiler
from tests.split.harness import between_nodes
from tests.zoo import FAMILIES

# Whose examples cannot be told apart, and the word of the reason.
WHOLE = {
    "graph_segment_sum": "a lookup of particular examples",
    "two_tower_contrastive": "a product of every example with every example",
    "nnx_two_tower": "a product of every example with every example",
    "moe_ragged": "a sort over the batch",
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_but_codes_and_early_totals_crosses(name, tmp_path, monkeypatch):
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))
    family, cluster = FAMILIES[name], Cluster.parse("dgx-h100:2")
    made = family.make(with_grads=False)
    state, batch = made.init(jax.random.key(0)), made.batch(jax.random.key(1))
    if name == "sum_loss":  # 24 examples for 16 devices
        batch = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    step = lensjax.parallelize(made.step, plan="dp=2,fsdp:once=8", cluster=cluster, compress="int8", **family.options)
    plan = step.plan_for(*((state,) if family.form == "state" else state), batch)
    if name in WHOLE:
        assert not plan.reduce and any(WHOLE[name] in f for f in plan.predicted.findings)
        return
    assert plan.reduce["rail"].codec == "int8"
    proof = prove(step.program, plan, cluster)
    _, wide = between_nodes(proof)
    # Exact are: what is no gradient (the loss, metrics), and the totals that a share needs while it is at work (a
    # batch norm's), once for the share and once where a result shows them.
    early = sum(c.bytes for c in step.program.split.cuts if c.early)
    assert {c.kind for c in wide} <= {"all-reduce"}, wide
    assert sum(c.payload * c.trips for c in wide) <= 2 * early + 64, wide
    predicted, compiled = proof.tiers["rail"]
    assert compiled <= 1.02 * predicted
