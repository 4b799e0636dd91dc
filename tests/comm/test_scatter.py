"""Totals of which every replica keeps its own part: one hop, half the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lensjax import CodecError, comm
from tests.comm.wire import along, sent

MESH = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
# Splits of totals: behind the fast axis, in another dimension than it, and over the slow axis alone.
SPECS = {"a": P(("gpu", "node")), "b": P("gpu", "node"), "c": P(None, "node"), "d": P(None, "node", "gpu")}
SHAPES = {"a": (64, 24), "b": (8, 320), "c": (5, 6), "d": (3, 2, 132)}


def stack(dtype="f", seed=0):
    r = np.random.default_rng(seed)
    return {n: r.normal(size=(2, *s)).astype(dtype) for n, s in SHAPES.items()}


def run(x, codec, state=None, bucket=comm.BUCKET):
    fn = lambda x, s: comm.scatter_stacked(x, mesh=MESH, spec=SPECS, axes="node", codec=codec, state=s, bucket=bucket)
    return jax.jit(fn)(x, state)


@pytest.mark.few(3)
@pytest.mark.parametrize("bucket", [comm.BUCKET, 4096])
@pytest.mark.parametrize("codec, most", [("exact", 1e-6), ("bf16", 0.004), ("int8", 0.01), ("int4:feedback=0", 0.15)])
def test_the_total_is_the_sum_and_stays_split(codec, most, bucket):
    x = stack()
    total, _ = run(x, codec, bucket=bucket)
    for name, t in total.items():
        wanted = x[name].astype(np.float64).sum(0)
        assert t.sharding.is_equivalent_to(jax.sharding.NamedSharding(MESH, SPECS[name]), t.ndim)
        apart = np.sqrt(np.mean((np.asarray(t) - wanted) ** 2) / np.mean(wanted**2))
        assert apart <= most and (codec == "exact" or apart > 0), name


def test_integers_and_narrow_floats_keep_their_types():
    x = {"a": np.arange(2 * 64 * 24, dtype="i4").reshape(2, 64, 24), "b": stack()["b"].astype(jnp.bfloat16)}
    fn = lambda x: comm.scatter_stacked(x, mesh=MESH, spec={n: SPECS[n] for n in x}, axes="node", codec="int8")[0]
    total = jax.jit(fn)(x)
    np.testing.assert_array_equal(total["a"], x["a"].sum(0))
    assert total["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize("codec", ["exact", "int8", "int4"])
def test_what_is_sent_is_what_was_said_and_nothing_else(codec):
    how = dict(mesh=MESH, spec=SPECS, axes="node", codec=codec)
    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    state = comm.scatter_state(shapes, **how)
    spread = {n: P("node", *[None if e == "node" else "gpu" if e else None for e in s]) for n, s in SPECS.items()}
    x = {
        n: jax.ShapeDtypeStruct((2, *s), jnp.float32, sharding=jax.sharding.NamedSharding(MESH, spread[n]))
        for n, s in SHAPES.items()
    }
    fn = lambda x, s: comm.scatter_stacked(x, state=s, **how)
    found = sent(jax.jit(fn).trace(x, state if any(state) else None).lower().compile().as_text(), MESH)
    assert {s.axes for s in found if s.bytes > 8} == {("node",)}
    big = [s for s in along(found, "node") if s.bytes > 8]
    assert sum(s.bytes for s in big) == sum(s.wire_bytes for s in comm.scatter(shapes, **how))
    assert len(big) == 1 and (codec == "exact") == (big[0].dtypes == ("f32",))


def test_what_was_not_sent_is_sent_later_and_a_nan_leaves_no_trace():
    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    rows = comm.scatter_state(shapes, mesh=MESH, spec=SPECS, axes="node", codec="int4")
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), rows)
    totals, x = 0.0, stack()
    for _ in range(20):
        total, state = run(x, "int4", state)
        totals = totals + np.asarray(total["b"], np.float64)
    assert np.abs(totals / 20 - x["b"].astype(np.float64).sum(0)).max() < 0.06
    bad = {**x, "a": x["a"].copy()}
    bad["a"][1, 3, 5] = np.nan  # one replica, in the part of one owner
    total, after = run(bad, "int4", state)
    assert np.isnan(np.asarray(total["a"])).any()
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", [P("gpu"), P(("node", "gpu")), P()])
def test_a_total_that_cannot_be_cut_so_is_refused(spec):
    with pytest.raises(CodecError, match="innermost"):
        comm.scatter_stacked({"w": jnp.ones((2, 64))}, mesh=MESH, spec={"w": spec}, axes="node")
