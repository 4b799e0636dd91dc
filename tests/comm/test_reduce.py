"""The reduction on eight devices: totals, bounds, replicas equal bit for bit, residuals, faults, three tiers."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax import CodecError, comm
from tests.comm.arrays import finite

MESH = jax.make_mesh((2, 2, 2), ("node", "gpu", "tp"), axis_types=(AxisType.Auto,) * 3)
FLAT = jax.make_mesh((4, 2), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
RACKS = jax.make_mesh((2, 2, 2), ("rack", "node", "gpu"), axis_types=(AxisType.Auto,) * 3)
SPECS = {"w": P("gpu", "tp"), "norm": P(), "odd": P(None, "tp"), "half": P(), "scalar": P(), "count": P(), "none": P()}
CODECS = ("exact", "bf16", "int8", "int4", "int4:32:hadamard", "int4:back=int8", "fp8", "powersgd:2")


def values(members, seed=0):
    r = np.random.default_rng(seed)
    return {
        "w": r.normal(size=(members, 32, 128)).astype("f"),
        "norm": r.normal(size=(members, 7)).astype("f") * 1e-3,
        "odd": r.normal(size=(members, 5, 6)).astype("f") * 1e4,
        "half": r.normal(size=(members, 40, 3)).astype(jnp.bfloat16),
        "scalar": r.normal(size=members).astype("f"),
        "count": r.integers(0, 1000, (members, 3)),
        "none": np.zeros((members, 0, 4), np.float32),
    }


def whole(x):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), x)


def made(x, *, mesh=MESH, spec=SPECS, axes="node", **how):
    """(the compiled reduction, its first state)"""
    how = dict(mesh=mesh, spec=spec, axes=axes, **how)
    return jax.jit(lambda x, s: comm.reduce_stacked(x, state=s, **how)), comm.init_state(whole(x), **how)


def run(x, *, state="init", **how):
    step, first = made(x, **how)
    return step(x, first if isinstance(state, str) else state)


def within_bound(codec, total, x):
    """Whether each shard of the total is within the codec's bound of the exact sum of the same shard."""
    bound_of, exact = comm.parse_codec(codec).reduction_error, x.astype(np.float64).sum(0)
    for shard in {str(s.index): s for s in total.addressable_shards}.values():
        given = jnp.asarray(x[(slice(None), *shard.index)], jnp.float32)
        bound = np.asarray(bound_of(given), np.float64)
        if total.dtype == jnp.bfloat16:
            bound = bound + 2.0**-8 * (np.abs(exact[shard.index]) + bound)
        if not (np.abs(np.asarray(shard.data, np.float64) - exact[shard.index]) <= bound).all():
            return False
    return True


def replicas_equal(total):
    assert not any(comm.differing(a) for a in jax.tree.leaves(total))


@pytest.mark.few(4)
@pytest.mark.parametrize("codec, inner", [("int8", ()), ("exact", ()), *((c, "gpu") for c in CODECS)])
def test_totals_are_within_the_codec_s_bound_on_every_replica(codec, inner):
    x = values(2)
    step, state = made(x, codec=codec, inner=inner)
    total, _ = step(x, state)
    replicas_equal(total)
    for name, a in x.items():
        assert (total[name].shape, total[name].dtype) == (a.shape[1:], jnp.asarray(a).dtype)
        assert total[name].sharding.is_equivalent_to(NamedSharding(MESH, SPECS[name]), a.ndim - 1)
        if name == "count":
            assert np.array_equal(total[name], a.sum(0))
        else:
            assert within_bound(codec, total[name], a)
    again, _ = step(x, state)
    assert jax.tree.all(jax.tree.map(np.array_equal, total, again))  # the same bits each time


@functools.cache
def _reducer(codec, members):
    mesh = FLAT if members == 4 else MESH
    how = dict(mesh=mesh, spec=P(), axes="node", inner="gpu", codec=codec)
    fn = jax.jit(lambda x: comm.reduce_stacked(x, **how)[0])
    return fn, jax.jit(lambda x: comm.parse_codec(codec).reduction_error(x))


@pytest.mark.parametrize("codec", ["int8", "int4:32:hadamard:feedback=0", "fp8"])
@settings(max_examples=15, deadline=None)
@given(rows=st.lists(finite, min_size=4, max_size=4))
def test_the_bound_holds_for_sums_of_any_vectors(codec, rows):
    x = np.stack(rows)
    fn, bound_of = _reducer(codec, 4)
    total, bound = fn(x), np.asarray(bound_of(x), np.float64)
    replicas_equal(total)
    exact = x.astype(np.float64).sum(0)
    fits = np.abs(exact) + bound < np.finfo(np.float32).max / 8  # a sum that overflows in float32 is infinite here too
    assert (np.abs(np.asarray(total, np.float64) - exact) <= bound)[fits].all()


@pytest.mark.few(2)
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "int4:hadamard", "fp8", "powersgd:2"])
def test_a_bad_number_in_one_replica_reaches_all_and_leaves_the_state_alone(codec):
    x = {name: values(2)[name] for name in ("w", "norm", "odd")}
    spec = {name: SPECS[name] for name in x}
    step, state = made(x, spec=spec, codec=codec, inner="gpu", bucket=1)  # a bucket for each leaf
    _, state = step(x, state)
    for bad in (np.nan, np.inf, -np.inf):
        broken = {**x, "w": x["w"].copy()}
        broken["w"][1, 3, 5] = bad
        total, after = step(broken, state)
        replicas_equal(total)
        assert not np.isfinite(np.asarray(total["w"])[3, 5])
        assert np.isfinite(total["norm"]).all() and np.isfinite(total["odd"]).all()
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(after))
        # The shard with the bad number (gpu 0, tp 0) keeps its state; others, which cannot know, go on.
        assert sorted(x)[2] == "w" and len(state) == 3
        for name, old in state[0].items():
            old, new = (np.asarray(a).reshape(2, 2, 2, -1) for a in (old, after[0][name]))
            assert np.array_equal(new[:, 0, 0], old[:, 0, 0])
            assert not np.array_equal(new[:, 1, 1], old[:, 1, 1])
    total, _ = step(x, after)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(total))


def test_powersgd_starts_again_after_a_gradient_of_zeros():
    x = {"w": values(2)["w"]}
    how = dict(spec=P(), codec="powersgd:2:feedback=off")
    step, state = made(x, **how)
    _, state = step(jax.tree.map(np.zeros_like, x), state)
    total, _ = step(x, state)
    assert np.abs(total["w"]).max() > 0.1


@pytest.mark.parametrize("codec", ["int8", "int4:hadamard", "powersgd:2"])
def test_a_leaf_of_zeros_and_denormal_leaves(codec):
    x = {"w": np.zeros((2, 32, 128), np.float32), "tiny": np.full((2, 300), 1e-44, np.float32)}
    total, state = run(x, spec=P(), codec=codec, inner="gpu")
    assert not np.asarray(total["w"]).any()
    assert np.abs(total["tiny"]).max() < 1e-35
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(state))


@pytest.mark.parametrize("codec", ["int8:feedback=1", "int4:back=int8", "powersgd:2"])
def test_what_is_sent_is_what_was_given_less_the_residual(codec):
    """Error feedback telescopes: sum(sent) = sum(given) - residuals / feedback, over both hops and all replicas."""
    feedback = comm.parse_codec(codec).feedback
    how = dict(mesh=FLAT, spec=P(), axes="node", codec=codec)
    shape = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    step = jax.jit(lambda x, s: comm.reduce_stacked(x, state=s, **how))
    state, sent, given_sum = comm.init_state(shape, **how), 0.0, 0.0
    for i in range(12):
        x = np.random.default_rng(i).normal(size=(4, 32, 64)).astype("f")
        total, state = step(x, state)
        sent, given_sum = sent + np.asarray(total, np.float64), given_sum + x.astype(np.float64).sum(0)
    (row,) = jax.tree.map(lambda a: np.asarray(a, np.float64)[::2], state)  # one device of each node
    if "residual" in row:
        left = row["residual"].sum(0)
    else:
        left = (row["sent"].sum(0) + row["owned"].reshape(-1)) / feedback
    assert np.abs(sent - (given_sum - left.reshape(32, 64))).max() < 1e-4 * np.abs(given_sum).max()
    assert np.abs(left).max() > 1e-3 * np.abs(given_sum).max()  # there was something to carry


def test_powersgd_reproduces_a_gradient_of_its_rank():
    r = np.random.default_rng(0)
    x = np.stack([r.normal(size=(48, 3)) @ r.normal(size=(3, 40)) for _ in range(1)] * 2).astype("f")
    x[1] *= 0.5  # the total has rank 3
    how = dict(mesh=MESH, spec=P(), axes="node", codec="powersgd:4")
    state, step = comm.init_state(whole(x), **how), jax.jit(lambda x, s: comm.reduce_stacked(x, state=s, **how))
    total, _ = step(x, state)
    exact = x.sum(0)
    assert np.linalg.norm(total - exact) < 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("codec", ["int4", "powersgd:2"])
def test_replicas_stay_equal_and_a_saved_state_goes_on_bit_for_bit(codec):
    """200 compressed steps of SGD; saved with numpy at step 150 and continued from the file."""
    how = dict(mesh=FLAT, spec=P(), axes="node", inner="gpu", codec=codec)
    shape = jax.ShapeDtypeStruct((24, 40), jnp.float32)
    place = lambda a, spec: jax.device_put(a, NamedSharding(FLAT, spec))

    @jax.jit
    def step(w, state, i):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (4, 24, 40))
        noise = jax.lax.with_sharding_constraint(noise, NamedSharding(FLAT, P("node")))
        total, state = comm.reduce_stacked(w[None] * 0.1 + noise, state=state, **how)
        return w - 0.01 * total, state

    w, state = place(np.ones((24, 40), np.float32), P()), comm.init_state(shape, **how)
    file = io.BytesIO()
    for i in range(200):
        if i == 150:
            flat, _ = jax.tree.flatten((w, state))
            np.savez(file, *map(np.asarray, flat))
        w, state = jax.block_until_ready(step(w, state, i))  # XLA:CPU aborts when many such programs are in flight
        if i % 50 == 49:
            replicas_equal(w)
    file.seek(0)
    saved = list(np.load(file).values())
    shapes = (jax.ShapeDtypeStruct((24, 40), np.float32, sharding=NamedSharding(FLAT, P())),)
    shapes += (comm.state_shapes(shape, **how),)
    leaves, treedef = jax.tree.flatten(shapes)
    w2, state2 = jax.tree.unflatten(treedef, [jax.device_put(a, s.sharding) for a, s in zip(saved, leaves)])
    for i in range(150, 200):
        w2, state2 = jax.block_until_ready(step(w2, state2, i))
    assert jax.tree.all(jax.tree.map(np.array_equal, (w, state), (w2, state2)))


@pytest.mark.parametrize(
    "codec, inner", [("exact", "gpu"), ("int8", "gpu"), ("int4:feedback=0", ()), ("powersgd:2", "gpu")]
)
def test_two_slow_tiers_as_one_group(codec, inner):
    x = np.random.default_rng(0).normal(size=(4, 32, 64)).astype("f")
    total, _ = run(x, mesh=RACKS, spec=P(), axes=("rack", "node"), inner=inner, codec=codec)
    replicas_equal(total)
    assert within_bound(codec, total, x)


@pytest.mark.few(2)
@pytest.mark.parametrize("codec, check_vma", [("exact", True), ("int8", True), ("int4", False), ("powersgd:2", True)])
def test_by_hand_in_three_tiers(codec, check_vma):
    """A user's own shard_map: partial sums on every device, two fast tiers summed exactly, codes between racks."""
    r = np.random.default_rng(0)
    x = {"w": r.normal(size=(8, 32, 64)).astype("f"), "b": r.normal(size=(8, 3)).astype("f")}
    shapes = whole(x)
    how = dict(mesh=RACKS, spec=P(), axes="rack", inner=("gpu", "node"), codec=codec)
    state, every = comm.init_state(shapes, **how), P(("rack", "node", "gpu"))

    def body(x, state):
        return comm.all_reduce(jax.tree.map(lambda a: a[0], x), "rack", inner=("gpu", "node"), codec=codec, state=state)

    fn = jax.shard_map(body, mesh=RACKS, in_specs=(every, every), out_specs=(P(), every), check_vma=check_vma)
    total, new = jax.jit(fn)(x, state)
    replicas_equal(total)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
    for name, a in x.items():
        racks = a.reshape(2, 4, *a.shape[1:]).sum(1)
        bound = comm.parse_codec(codec).reduction_error(jnp.asarray(racks))
        assert (np.abs(total[name] - a.sum(0)) <= bound + 1e-5).all()


def test_one_replica_compresses_nothing():
    mesh = jax.make_mesh((1, 8), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(0).normal(size=(1, 64, 64)).astype("f")
    for codec in ("int4", "powersgd:2"):
        total, state = run(x, mesh=mesh, spec=P(), inner="gpu", codec=codec)
        assert np.array_equal(total, x[0]) and not jax.tree.leaves(state)
        assert comm.wire_bytes(whole(x), mesh=mesh, spec=P(), axes="node", inner="gpu", codec=codec) == 0


def test_errors_name_the_leaf_and_say_what_to_do():
    x = values(2)
    with pytest.raises(CodecError, match="remembers what it could not send"):
        run(x, codec="int4", state=None)
    state = comm.init_state(whole(x), mesh=MESH, spec=SPECS, axes="node", codec="int4")
    with pytest.raises(CodecError, match="not this reduction's"):
        run(x, codec="int4:32", inner="gpu", state=state)
    with pytest.raises(CodecError, match=r"w has the shape \(3,"):
        run({"w": np.zeros((3, 8), "f")}, spec=P())
    with pytest.raises(CodecError, match=r"w is split by .* names node"):
        run({"w": np.zeros((2, 8), "f")}, spec=P("node"))
    with pytest.raises(CodecError, match="no axis 'pod'"):
        comm.reduction(whole(x), mesh=MESH, spec=P(), axes="pod")
    with pytest.raises(CodecError, match="2 shards do not divide dimension 0"):
        run({"w": np.zeros((2, 7), "f")}, spec=P("gpu"))
    for dtype in (jnp.int2, jnp.uint2, jnp.int4, jnp.bool_, jnp.float8_e4m3fn):
        with pytest.raises(CodecError, match="cannot be summed between devices"):
            run({"w": jnp.zeros((2, 8), dtype)}, spec=P())


def test_float64_stays_float64_when_exact():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(2, 9))
        total, _ = run(x, spec=P(), codec=comm.Policy("int8"), state=None)
        assert total.dtype == np.float64 and np.abs(total - x.sum(0)).max() < 1e-15


def test_checksums_find_a_replica_that_differs():
    def body(x):
        return comm.replicas_agree({"a": x}, "node")[None]

    fn = jax.jit(jax.shard_map(body, mesh=FLAT, in_specs=P("node"), out_specs=P(("node", "gpu")), check_vma=False))
    same = np.broadcast_to(np.arange(6, dtype=np.float32), (4, 6)).copy()
    assert np.asarray(fn(same)).all()
    same[2, 3] = np.nextafter(same[2, 3], np.float32(np.inf))
    assert not np.asarray(fn(same)).any()
    a = jnp.arange(8.0)
    assert comm.checksum(a) != comm.checksum(a[::-1]) and comm.checksum(a) == comm.checksum(a + 0)
    assert comm.keep_if(jnp.array(False), {"e": a}, {"e": a + 1})["e"][0] == 1
