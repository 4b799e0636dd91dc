"""What XLA does to collectives before it emits them, in the partitioner's program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax.partition import partition

MESH = AbstractMesh((4,), ("t",), axis_types=(AxisType.Auto,))
ROWS, WIDTH, DEEP = 64, 32, 1024  # deep: cheaper to sum the results than to move the operands


def sums(terms, spec, extra=0):
    """Collectives of a sum of `terms` row-parallel matmuls, each split as `spec`; the first `extra` are results too."""

    def step(xs, ws):
        put = [jax.lax.with_sharding_constraint(x @ w, NamedSharding(MESH, spec)) for x, w in zip(xs, ws)]
        total = put[0]
        for y in put[1:]:
            total = total + y
        return total, put[:extra]

    xs = [jax.ShapeDtypeStruct((ROWS, DEEP), jnp.float32)] * terms
    ws = [jax.ShapeDtypeStruct((DEEP, WIDTH), jnp.float32)] * terms
    ins = ([NamedSharding(MESH, P(None, "t"))] * terms, [NamedSharding(MESH, P("t", None))] * terms)
    lowered = jax.jit(step, in_shardings=ins).trace(xs, ws).lower(lowering_platforms=("cpu",))
    return [(c.op, c.bytes) for c in partition(lowered).collectives]


@pytest.mark.parametrize("terms", [2, 3, 4])
@pytest.mark.parametrize(("spec", "op"), [(P("t", None), "reduce_scatter"), (P(), "all_reduce")])
def test_a_sum_of_totals_is_one_total(terms, spec, op):
    assert sums(terms, spec) == [(op, ROWS * WIDTH * 4)]


@pytest.mark.parametrize(("spec", "op"), [(P("t", None), "reduce_scatter"), (P(), "all_reduce")])
def test_a_total_that_somebody_else_reads_stays(spec, op):
    assert sums(2, spec, extra=1) == [(op, ROWS * WIDTH * 4)] * 2
