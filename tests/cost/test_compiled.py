"""Planned against compiled, for H100s that are not there: bytes by mesh axes and peak memory of the decoder's plans."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from lensjax.cost.memory import Habits, memory
from lensjax.partition import partition
from lensjax.topology.cluster import Cluster
from lensjax.verify import compile_for, missing
from lensjax.verify.collectives import collectives
from lensjax.verify.hlo.parse import parse_hlo
from lensjax.verify.traffic import traffic
from tests.partition.decoder import Config, Rules, abstract_mesh, fsdp, lowered, tensor
from tests.partition.test_partition import wire

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing("cuda")), reason="needs the extra gpu-aot"),
]

C = Config()
BOTH = P(("r", "d"))
PLANS = {
    "dp": (Rules(abstract_mesh(d=8), {}, P("d")), P("d")),
    "fsdp": (Rules(abstract_mesh(d=8), fsdp("d"), P("d"), gather=True), P("d")),
    "hsdp": (Rules(abstract_mesh(r=2, d=4), fsdp("d"), BOTH, gather=True), BOTH),
    "tp": (Rules(abstract_mesh(d=2, t=4), tensor("t"), P("d")), P("d")),
}


@pytest.mark.parametrize("name", PLANS)
def test_bytes_by_axes_and_peak_are_the_compiled_ones(name):
    rules, batch = PLANS[name]
    p = partition(lowered(C, rules, batch, "cuda"))
    made = compile_for(lowered(C, rules, batch, "cuda"), Cluster.parse("dgx-h100:1"), fallback=False)
    compiled = traffic(collectives(parse_hlo(made.hlo)).collectives, dict(rules.mesh.shape))
    assert wire(p) == pytest.approx(compiled.total, rel=0.02)
    for axes, sent in compiled.axes.items():
        if sent > 0.01 * compiled.total:
            assert wire(p, axes) == pytest.approx(sent, rel=0.02)
    assert memory(p, Habits(2**25)).peak == pytest.approx(made.memory.peak, rel=0.10)
