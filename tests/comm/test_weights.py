"""Weights split over slow links: gathered as codes, gradients scattered back, a copy inside the node."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax import CodecError, comm
from tests.comm.wire import along, sent

MESH = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
ROWS = 8 * 128  # a block for each device and column


def mapped(fn, in_specs, out_specs):
    return jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@pytest.mark.few(3)
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("codec", ["exact", "bf16", "int8", "int4", "fp8"])
def test_a_gathered_weight_is_within_the_bound_and_the_same_everywhere(codec, dimension):
    w = np.random.default_rng(0).normal(size=(16, 40)).astype("f")
    spec = P(*[None] * dimension, "node")
    gather = mapped(lambda w: comm.all_gather(w, "node", dimension=dimension, codec=codec), spec, P())
    whole = gather(w)
    assert not comm.differing(whole) and whole.shape == w.shape
    if codec == "exact":
        assert np.array_equal(whole, w)
        return
    made = comm.parse_codec(codec)
    for part in range(2):
        shard = np.split(w, 2, dimension)[part]
        flat = np.moveaxis(shard, dimension, 0).reshape(-1)
        bound = made.error_bound(jnp.pad(jnp.asarray(flat), (0, -flat.size % made.block)))[: flat.size]
        error = np.abs(np.moveaxis(np.split(np.asarray(whole), 2, dimension)[part], dimension, 0).reshape(-1) - flat)
        assert (error <= bound).all() and error.max() > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("codec", ["exact", "bf16", "int8", "int4:feedback=0", "fp8"])
def test_a_reduce_scatter_is_one_hop_of_the_reduction(codec):
    x = np.random.default_rng(0).normal(size=(2, 6, 256)).astype("f")
    scatter = mapped(lambda x: comm.reduce_scatter(x[0], "node", codec=codec)[0], P("node"), P("node"))
    total = np.asarray(scatter(x))
    if codec == "exact":
        bound = np.full((6, 256), 1e-6)
    else:
        hop = comm.parse_codec(codec).error_bound
        bound = sum(np.asarray(hop(jnp.asarray(a).reshape(2, -1))).reshape(6, 256) for a in x) + 1e-5
    assert (np.abs(total - x.sum(0)) <= bound).all()


def test_a_reduce_scatter_carries_its_residual():
    size = comm.residual_size((4, 128), 2, "int4")
    step = mapped(
        lambda x, r: (lambda a, b: (a, b[None]))(*comm.reduce_scatter(x[0], "node", codec="int4", residual=r[0])),
        (P("node"), P(("node", "gpu"))), (P("node"), P(("node", "gpu"))),
    )  # fmt: skip
    x, left = np.random.default_rng(0).normal(size=(2, 4, 128)).astype("f"), np.zeros((8, size), np.float32)
    sent_sum = 0.0
    for _ in range(10):
        total, left = step(x, left)
        sent_sum = sent_sum + np.asarray(total, np.float64)
    carried = np.asarray(left)[::4].sum(0).reshape(4, 128) / 0.5
    assert np.abs(sent_sum + carried - 10 * x.astype(np.float64).sum(0)).max() < 1e-4
    with pytest.raises(CodecError, match="residual of shape"):
        step(x, np.zeros((8, 3), np.float32))


def train(codec, gradient, secondary, kept=True):
    """A layer of fully sharded training by hand: the weight is split over (gpu, node), the batch over all."""

    def loss(w, x):
        if secondary:
            half = comm.secondary_copy(w, "node", codec=codec, gradient=gradient)
            return jnp.sin(x @ comm.gather_weight(half, "gpu", codec="exact")).sum()
        return jnp.sin(x @ comm.gather_weight(w, ("gpu", "node"), codec=codec, gradient=gradient)).sum()

    policy = jax.checkpoint_policies.save_only_these_names(comm.SECONDARY if kept else "nothing")
    step = lambda w, x: jax.grad(jax.checkpoint(loss, policy=policy))(w, x)
    return mapped(step, (P(("gpu", "node")), P(("node", "gpu"))), P(("gpu", "node")))


@pytest.mark.parametrize("secondary", [False, True])
def test_the_gradient_of_a_gather_is_the_exact_reduce_scatter(secondary):
    r = np.random.default_rng(0)
    w, x = r.normal(size=(64, 16)).astype("f") * 0.1, r.normal(size=(16, 64)).astype("f")
    exact = jax.grad(lambda w: jnp.sin(x @ w).sum())(w)
    got = train("exact", "exact", secondary)(w, x)
    assert np.abs(got - exact).max() < 1e-5 * np.abs(exact).max()
    coded = train("int8", "exact", secondary)(w, x)
    assert 0 < np.abs(coded - exact).max() < 0.05 * np.abs(exact).max()


def test_no_weight_crosses_the_slow_tier_again_and_bytes_are_a_quarter():
    """Node-tier bytes of fully sharded training against bf16 ZeRO-3 (two gathers, one reduce-scatter)."""
    w = jax.ShapeDtypeStruct((ROWS, 64), jnp.float32, sharding=NamedSharding(MESH, P(("gpu", "node"))))
    x = jax.ShapeDtypeStruct((16, ROWS), jnp.float32, sharding=NamedSharding(MESH, P(("node", "gpu"))))
    found = sent(train("int8", "int4", True).trace(w, x).lower().compile().as_text(), MESH)
    slow = along(found, "node")
    assert sorted((s.kind, s.dtypes) for s in slow) == [("all-gather", ("u8",)), ("all-to-all", ("u8",))]
    shard = ROWS * 64 // 8
    expected = comm.gather_bytes(shard, 2, "int8") + comm.scatter_bytes(2 * shard, 2, "int4")
    assert sum(s.bytes for s in slow) == expected
    zero3 = 2 * comm.gather_bytes(shard, 2, "bf16") + comm.scatter_bytes(2 * shard, 2, "bf16")
    assert expected <= 0.27 * zero3
    # As traced (XLA:CPU merges what a backward pass computes again): one gather over nodes, two inside the node.
    # Without the kept copy the weight crosses twice.
    assert count_gathers(train("int8", "int4", True), w, x) == {"node": 1, "gpu": 2}
    assert count_gathers(train("int8", "int4", True, kept=False), w, x) == {"node": 2, "gpu": 2}


def count_gathers(fn, *shapes):
    text = str(fn.trace(*shapes).jaxpr)
    return {axis: len(re.findall(rf"all_gather\[[^\]]*axis_name=\('{axis}',\)", text)) for axis in ("node", "gpu")}


def test_only_codes_of_one_message_can_carry_weights():
    with pytest.raises(CodecError, match="powersgd is not a code of one message"):
        comm.gather_bytes(100, 2, "powersgd:4")
