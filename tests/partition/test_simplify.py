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


SQUARE = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def moved(fn, spec_in, spec_out):
    """Collectives of a function of one 64 x 32 matrix."""
    put = lambda s: NamedSharding(SQUARE, s)
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    traced = jax.jit(fn, in_shardings=put(spec_in), out_shardings=put(spec_out)).trace(x)
    return [(c.op, c.axes, c.bytes) for c in partition(traced.lower(lowering_platforms=("cpu",))).collectives]


def test_a_gather_of_two_dimensions_is_two_the_last_first():
    whole = 64 * 32 * 4
    assert moved(lambda x: x * 2, P("a", "b"), P()) == [
        ("all_gather", ("b",), whole / 4),
        ("all_gather", ("a",), whole),
    ]


@pytest.mark.parametrize(("spec", "op"), [(P("a", "b"), "all_reduce"), (P(("a", "b"), None), "reduce_scatter")])
def test_a_sum_split_along_two_dimensions_is_an_all_reduce_of_the_whole(spec, op):
    found = moved(lambda x: x.T @ x, P(("a", "b"), None), spec)
    assert found == [(op, ("a", "b"), 32 * 32 * 4)]


def table_gradient(batch, rows, columns, axes):
    """Collectives of the gradient of a table whose rows are split over `axes`, by a batch split over "a"."""
    put = lambda *spec: NamedSharding(SQUARE, P(*spec))

    def step(index, updates):
        table = jnp.zeros((rows, columns)).at[index].add(updates)
        return jax.lax.with_sharding_constraint(table, put(axes))

    shapes = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((batch, columns), jnp.float32)
    lowered = jax.jit(step, in_shardings=(put("a"), put("a"))).trace(*shapes).lower(lowering_platforms=("cuda",))
    return [(c.op, c.axes, c.bytes) for c in partition(lowered).collectives]


def test_a_table_is_summed_whole_and_scattered_over_the_axes_of_its_updates():
    """Also where to gather the updates takes fewer bytes: XLA does not."""
    whole = ("reduce_scatter", ("a",), 512 * 32 * 4)
    assert table_gradient(256, 512, 32, ("a",)) == [whole]
    assert table_gradient(4096, 512, 32, ("a",)) == [whole]
    assert {op for op, _, _ in table_gradient(256, 512, 32, ("b", "a"))} == {"all_gather"}


def test_zeros_have_the_size_in_which_they_are_used():
    def step(index, updates):
        table = jnp.zeros((512, 32)).at[index].add(updates)
        return jax.lax.with_sharding_constraint(table, NamedSharding(SQUARE, P("a")))

    shapes = jax.ShapeDtypeStruct((4096,), jnp.int32), jax.ShapeDtypeStruct((4096, 32), jnp.float32)
    put = NamedSharding(SQUARE, P("a"))
    p = partition(jax.jit(step, in_shardings=(put, put)).trace(*shapes).lower(lowering_platforms=("cuda",)))
    scatter = next(n for n in p.body.nodes if n.name == "stablehlo.scatter")
    assert p.values[scatter.inputs[0]].local == p.values[scatter.outputs[0]].local == (512, 32)
