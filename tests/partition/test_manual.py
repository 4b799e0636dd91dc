"""Collectives that a user wrote in a `shard_map`, and branches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax._errors import PartitionError
from lensjax.partition import partition
from lensjax.partition.data import Collective, Operation, Region
from lensjax.partition.groups import axes_of_groups
from tests.partition.decoder import abstract_mesh

MESH = abstract_mesh(a=4, b=2)
LARGE = abstract_mesh(a=64, b=8)
BYTES = 64 * 16 * 4


def manual(fn, *specs, out):
    return functools.partial(jax.shard_map, mesh=MESH, in_specs=specs, out_specs=out, check_vma=False)(fn)


def facts(fn, *shapes, specs):
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    jitted = jax.jit(fn, in_shardings=tuple(NamedSharding(MESH, s) for s in specs))
    return partition(jitted.trace(*args).lower(lowering_platforms=("cpu",)))


def one(fn, spec, out):
    p = facts(manual(fn, spec, out=out), (64, 16), specs=(spec,))
    return [(c.op, c.axes, c.bytes) for c in p.collectives]


def test_hand_written_collectives_are_read_with_their_axes():
    assert one(lambda x: jax.lax.psum(x, "b"), P("a"), P("a")) == [("all_reduce", ("b",), BYTES / 4)]
    assert one(lambda x: jax.lax.psum(x, ("a", "b")), P(), P()) == [("all_reduce", ("a", "b"), BYTES)]
    assert one(lambda x: jax.lax.all_gather(x, "a", tiled=True), P("a"), P()) == [("all_gather", ("a",), BYTES)]
    assert one(lambda x: jax.lax.psum_scatter(x, "a", tiled=True), P(), P("a")) == [("reduce_scatter", ("a",), BYTES)]
    swap = functools.partial(jax.lax.ppermute, axis_name="b", perm=[(0, 1), (1, 0)])
    assert one(swap, P("a"), P("a")) == [("collective_permute", ("b",), BYTES / 4)]
    move = functools.partial(jax.lax.all_to_all, axis_name="a", split_axis=1, concat_axis=0, tiled=True)
    assert one(move, P("a"), P(None, "a")) == [("all_to_all", ("a",), BYTES / 4)]


@pytest.mark.parametrize("axes", ["a", "b", ("a", "b")])
def test_groups_of_hundreds_of_devices_are_read(axes):
    """Above a hundred members, groups are printed as bytes."""
    reduce = jax.shard_map(
        lambda x: jax.lax.psum(x, axes), mesh=LARGE, in_specs=P(), out_specs=P(), axis_names={"a", "b"}, check_vma=False
    )
    jitted = jax.jit(reduce, in_shardings=NamedSharding(LARGE, P()))
    p = partition(jitted.trace(jax.ShapeDtypeStruct((64, 16), jnp.float32)).lower(lowering_platforms=("cpu",)))
    assert [(c.op, c.axes, c.bytes) for c in p.collectives] == [("all_reduce", tuple(axes), BYTES)]


def test_matmuls_inside_a_shard_map_count_their_local_sizes():
    inside = manual(lambda x, w: jax.lax.psum(x @ w, "b"), P("a", "b"), P("b"), out=P("a"))
    p = facts(inside, (64, 32), (32, 16), specs=(P("a", "b"), P("b")))
    assert [o.flops for o in p.operations if o.name == "dot_general"] == [2 * 64 * 32 * 16 / 8]


def test_the_dearer_branch_counts():
    def step(x):
        return jax.lax.cond(x.sum() > 0, lambda v: v, lambda v: jnp.sin(v @ v.T) @ v, x)

    p = facts(step, (64, 16), specs=(P(),))
    assert sum(o.flops for o in p.operations if o.name == "dot_general") == 2 * 2 * 64 * 64 * 16


def test_groups_that_are_no_mesh_axes_are_refused():
    with pytest.raises(PartitionError, match="not along axes"):
        axes_of_groups("replica_groups", "dense<[[0, 3], [1, 2]]> : tensor<2x2xi64>", {"a": 2, "b": 2})
    with pytest.raises(PartitionError, match="unknown form"):
        axes_of_groups("replica_groups", "[4,2]<=[8]", {"a": 4, "b": 2})


def test_work_inside_a_shard_map_waits_for_what_it_reads_alone():
    """The compiler inlines the region: its collective hides behind work outside that it has nothing to do with."""
    inside = manual(lambda x: jax.lax.psum(jnp.sin(x), "b") * 2, P("a"), out=P("a"))
    step = lambda x, w: (inside(jnp.cumsum(x, 1)).sum(1), w @ w)
    items = facts(step, (64, 16), (32, 32), specs=(P("a"), P())).schedule.items
    assert not any(isinstance(i, Region) for i in items)
    (sent,) = [i for i in items if isinstance(i, Collective)]
    makers = {v: i for i in items for v in i.writes}
    before, after = (
        {makers[v].name for v in sent.reads if v in makers},
        [i for i in items if set(i.reads) & set(sent.writes)],
    )
    assert before and after
    (product,) = [i for i in items if isinstance(i, Operation) and i.name == "dot_general"]
    assert not set(product.writes) & set(sent.reads)
    first = next(i for i in items if set(i.writes) & {v for m in [makers[v] for v in sent.reads] for v in m.reads})
    assert first.name != "dot_general", "what goes into the region is linked to the work outside that makes it"
