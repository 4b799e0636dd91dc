"""A NaN or an infinity in any place, of vectors long enough that the compiler reduces them in another way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lensjax
from lensjax import comm
from lensjax.comm.low_rank import orthonormal
from tests.comm.arrays import VECTORS

MESH = jax.make_mesh((2, 2), ("node", "gpu"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
SIZES = (4096, 16384, 65536)
BAD = (np.nan, -np.nan, np.inf, -np.inf)


def places(size):
    """First, last, inside of a block, and at both ends of one."""
    return (0, 37, size // 2 - 1, size // 2 + 64, size - 1)


@functools.cache
def round_trip(name):
    made = comm.parse_codec(name)
    return jax.jit(lambda x: made.decode(made.encode(x)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", VECTORS)
def test_of_a_message(name, size):
    x = np.ones(size, np.float32)
    for place in places(size):
        for bad in BAD:
            broken = x.copy()
            broken[place] = bad
            got = np.asarray(round_trip(name)(broken))
            assert not np.isfinite(got[place]), (place, bad)
            assert np.isfinite(np.delete(got, np.s_[place // 256 * 256 : place // 256 * 256 + 256])).all()


@pytest.mark.parametrize("rows", [8, 512])
def test_of_orthonormal_factors(rows):
    for place in ((0, 0), (rows // 2, 1), (rows - 1, 7)):
        for bad in BAD:
            p = np.random.default_rng(0).normal(size=(1, rows, 8)).astype("f")
            p[(0, *place)] = bad
            assert not np.isfinite(jax.jit(orthonormal)(p)).all()


@functools.cache
def reduction(codec, shape, stacked):
    how = dict(mesh=MESH, spec=P(), axes="node", inner="gpu", codec=codec)
    state = comm.init_state(jax.ShapeDtypeStruct(shape, jnp.float32), **how)
    if stacked:
        return jax.jit(lambda x, s: comm.reduce_stacked(x, state=s, **how)), state
    body = lambda x, s: comm.all_reduce(x[0], "node", inner="gpu", codec=codec, state=s)
    every = P(("node", "gpu"))
    return jax.jit(
        jax.shard_map(body, mesh=MESH, in_specs=(P("node"), every), out_specs=(P(), every), check_vma=False)
    ), state


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("codec", ["exact", "bf16", "fp8", "int8", "int4", "int4:hadamard", "powersgd:4"])
def test_of_a_reduction_and_the_state_stays(codec, stacked):
    shape = (256, 256)  # 16384 values a device and hop
    step, state = reduction(codec, shape, stacked)
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("f")
    _, state = step(x, state)
    for place in ((0, 0), (100, 37), (255, 255)):
        for bad in BAD:
            broken = x.copy()
            broken[(1, *place)] = bad
            total, after = step(broken, state)
            assert not np.isfinite(np.asarray(total)[place]), (place, bad)
            assert all(np.isfinite(a).all() for a in jax.tree.leaves(after))
            # The device whose part holds the bad number keeps its state; the other, which cannot know, goes on.
            gpu = int(place[0] >= 128)
            for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
                assert np.array_equal(*(np.asarray(a).reshape(2, 2, -1)[:, gpu] for a in (old, new)))


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_of_a_scatter_and_of_gathered_weights(codec):
    scatter = jax.jit(jax.shard_map(
        lambda x, r: comm.reduce_scatter(x[0], "node", codec=codec, residual=r),
        mesh=MESH, in_specs=(P("node"), P("node")), out_specs=(P("node"), P("node")), check_vma=False,
    ))  # fmt: skip
    gather = jax.jit(jax.shard_map(
        lambda w: comm.gather_weight(w, "node", codec=codec), mesh=MESH, in_specs=P("node"), out_specs=P(),
        check_vma=False,
    ))  # fmt: skip
    stacked = jax.jit(lambda x, s: comm.scatter_stacked(
        x, mesh=MESH, spec=P(("gpu", "node")), axes="node", codec=codec, state=s
    ))  # fmt: skip
    x = np.random.default_rng(0).normal(size=(2, 256, 128)).astype("f")
    how = dict(mesh=MESH, spec=P(("gpu", "node")), axes="node", codec=codec)
    zeros = lambda s: jnp.zeros(s.shape, s.dtype)
    state = jax.tree.map(zeros, comm.scatter_state(jax.ShapeDtypeStruct((256, 128), jnp.float32), **how))
    left = np.zeros(2 * comm.residual_size((256, 128), 2, codec), np.float32)
    for place in ((0, 0), (100, 37), (255, 127)):
        broken = x.copy()
        broken[(1, *place)] = np.nan
        total, after = scatter(broken, left)
        assert not np.isfinite(np.asarray(total)[place]) and not np.asarray(after).any()
        assert not np.isfinite(np.asarray(gather(broken[1]))[place])
        total, rows = stacked(broken, state)
        assert not np.isfinite(np.asarray(total)[place])
        assert not any(np.asarray(a).any() for a in jax.tree.leaves(rows))


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_of_a_gradient_in_a_plan(codec):
    def step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: (batch * w).sum() / len(batch))(state["w"])
        return {"w": state["w"] - grad, "grad": grad}, loss

    state = {"w": jnp.zeros((256, 128)), "grad": jnp.zeros((256, 128))}
    run = lensjax.parallelize(step, cluster="cpu:2x4", plan="dp", compress=codec, donate=False)
    batch = np.random.default_rng(0).normal(size=(8, 256, 128)).astype("f")
    for place in ((0, 0, 0), (5, 3, 7), (7, 255, 127)):
        broken = batch.copy()
        broken[place] = np.nan
        new, _ = run(state, broken)
        assert not np.isfinite(np.asarray(new["grad"])[place[1:]])
        assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(run.extra))
