"""What is refused, each in the words of the caller: axes, codecs, leaves, specs, states, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lensjax import CodecError, comm

MESH = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
EVERY = P(("node", "gpu"))
X = np.random.default_rng(0).normal(size=(8, 16, 32)).astype("f")
SHAPE = jax.ShapeDtypeStruct((16, 32), jnp.float32)
TREE = {"a": SHAPE, "b": SHAPE}


def mapped(fn, outputs=EVERY):
    """A user's function in a shard_map over both axes, which is traced only."""
    return jax.eval_shape(jax.shard_map(fn, mesh=MESH, in_specs=EVERY, out_specs=outputs, check_vma=False), X)


def reduced(axis="node", inner="gpu", codec="int8", value=lambda x: x[0], **how):
    return lambda x: comm.all_reduce(value(x), axis, inner=inner, codec=codec, **how)[0]


def scattered(value=lambda x: x[0], **how):
    return lambda x: comm.reduce_scatter(value(x), **{"axis": "node", "codec": "int8", **how})[0]


def gathered(value=lambda x: x[0], axis="node", call=comm.gather_weight, **how):
    return lambda x: call(value(x), axis, **how)


@pytest.mark.parametrize(
    "fn, says",
    [
        (reduced(inner="node"), "inner names 'node', which is a slow axis"),
        (reduced(("node", "gpu"), "gpu"), "inner names 'gpu', which is a slow axis"),
        (reduced(("node", "node"), ()), "axis names 'node' twice"),
        (reduced("nodes"), "axis names 'nodes', and the shard_map here is over node, gpu"),
        (reduced(inner="gpus"), "inner names 'gpus'"),
        (reduced(0), "axis is 0"),
        (reduced(None), "axis is None"),
        (reduced(codec=None), "codec is None"),
        (reduced(codec=comm.Int8), "codec is the class Int8"),
        (reduced(codec={"a": "int8"}), "codec is {'a': 'int8'}"),
        (reduced(codec=lambda path, shape: None), "codec is None"),
        (reduced(value=lambda x: {"a": x, "k": jax.random.key(0)}), "k has the type key<fry>: PRNG keys"),
        (reduced(value=lambda x: {"a": x, "f": 2.0}), "f is 2.0, of the type float, and not an array"),
        (reduced(value=lambda x: {"f": np.zeros(3, jax.dtypes.float0)}), "f has the type float0"),
        (scattered(axis="nodes"), "axis names 'nodes'"),
        (scattered(dimension=2), r"dimension is 2, and x of the shape \(16, 32\) has dimensions 0 to 1"),
        (scattered(dimension=1.0), "dimension is 1.0"),
        (scattered(lambda x: x[0, 0, 0]), "it is a scalar"),
        (scattered(lambda x: x[0] > 0), "type bool, which cannot be summed"),
        (scattered(lambda x: x[0].astype(jnp.int4)), "type int4, which cannot be summed"),
        (scattered(lambda x: 2.0), "x is 2.0, of the type float"),
        (scattered(codec="int4"), "int4 remembers what it could not send, and no residual was given"),
        (scattered(codec="int8", residual=jnp.zeros(512, jnp.bfloat16)), "and type bfloat16"),
        (gathered(axis="nodes"), "axis names 'nodes'"),
        (gathered(lambda x: x[0, 0, 0]), "it is a scalar"),
        (gathered(lambda x: x[0] > 0), "type bool, which is not gathered"),
        (gathered(lambda x: x[0].astype(jnp.int4), codec="exact"), "type int4, which is not gathered"),
        (gathered(call=comm.all_gather, dimension=2), "dimension is 2"),
        (gathered(call=comm.secondary_copy, axis=1), "slow is 1"),
        (lambda x: comm.reduce_stacked(x[:2], mesh=MESH, spec=P(), axes="node")[0], "use lensjax.comm.all_reduce"),
        (lambda x: comm.scatter_stacked(x[:2], mesh=MESH, spec=P("node"), axes="node")[0], "comm.reduce_scatter"),
    ],
)  # fmt: skip
def test_inside_a_shard_map(fn, says):
    with pytest.raises(CodecError, match=says):
        mapped(fn)


@pytest.mark.parametrize(
    "fn",
    [
        reduced(), scattered(), gathered(), lambda x: comm.all_gather(x, "node"),
        lambda x: comm.replicas_agree(x, "node"),
    ],
)  # fmt: skip
def test_outside_of_one(fn):
    with pytest.raises(CodecError, match="axis names 'node', and no shard_map is around this call"):
        fn(X)


@pytest.mark.parametrize("call", [comm.init_state, comm.state_shapes, comm.reduction, comm.wire_bytes])
def test_what_describes_a_reduction_takes_its_arguments(call):
    """The axes by either name, and Python's own words, about the function that was called, for what is missing."""
    how = dict(mesh=MESH, spec=P(), inner="gpu", codec="int4")
    same = lambda a, b: jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(a, b) if hasattr(a, "nbytes") else a == b, a, b)
    )
    assert same(call(SHAPE, axis="node", **how), call(SHAPE, axes="node", **how))
    with pytest.raises(CodecError, match="neither axes nor axis is given"):
        call(SHAPE, **how)
    with pytest.raises(CodecError, match="axes is 'node' and axis is 'gpu'"):
        call(SHAPE, axes="node", axis="gpu", **how)
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) missing .* 'spec'"):
        call(SHAPE, mesh=MESH, axes="node")
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got an unexpected .* 'sepc'"):
        call(SHAPE, mesh=MESH, axes="node", sepc=P())


@pytest.mark.parametrize(
    "x, how, says",
    [
        (SHAPE, dict(axes="nodes"), "the mesh has no axis 'nodes'"),
        (SHAPE, dict(axes=0), "axes is 0"),
        (SHAPE, dict(inner="gpus"), "the mesh has no axis 'gpus'"),
        (SHAPE, dict(inner="node"), "inner names 'node', which is a slow axis"),
        (SHAPE, dict(spec=P("tp")), "the mesh has no axis 'tp'"),
        (SHAPE, dict(spec=P(None, None, "gpu")), "has 2 dimensions, and its spec .* has 3"),
        (TREE, dict(spec={"a": P()}), "spec does not fit x"),
        (TREE, dict(spec={"a": P(), "b": 3}), "spec does not fit x"),
        ({"a": SHAPE, "f": 2.0}, {}, "f is 2.0, of the type float"),
    ],
)
def test_of_a_reduction_s_description(x, how, says):
    with pytest.raises(CodecError, match=says):
        comm.init_state(x, **{"mesh": MESH, "spec": P(), "axes": "node", "codec": "int4", **how})


@pytest.mark.parametrize(
    "x, how, says",
    [
        (X[:2], dict(axes="nodes"), "the mesh has no axis 'nodes'"),
        (X[:2], dict(spec=P("tp", "node")), "the mesh has no axis 'tp'"),
        (X[:2], dict(spec=P(None, None, "node")), "has 2 dimensions, and its spec .* has 3"),
        (X[:2, :, :3], dict(spec=P(None, "node")), "2 shards do not divide dimension 1"),
        (X[:3], {}, "one for each of 2 replicas"),
        (X[:2], dict(codec="int4"), "int4 remembers what it could not send"),
        (X[:2], dict(codec="int4", state=({"sent": jnp.zeros((8, 512), jnp.bfloat16)},)), "not this reduction's"),
    ],
)
def test_of_stacked_values_that_stay_split(x, how, says):
    with pytest.raises(CodecError, match=says):
        comm.scatter_stacked(x, **{"mesh": MESH, "spec": P("node"), "axes": "node", "codec": "int8", **how})


def test_a_state_of_another_type_or_kind():
    how = dict(mesh=MESH, spec=P(), axes="node", codec="int4")
    state = comm.init_state(SHAPE, **how)
    fn = lambda x, s: comm.all_reduce(x[0], "node", codec="int4", state=s)
    run = jax.shard_map(fn, mesh=MESH, in_specs=(P("node"), EVERY), out_specs=(P(), EVERY), check_vma=False)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), state)
    for wrong in (half, list(state), state[0], ()):
        for call in (run, lambda x, s: comm.reduce_stacked(x, state=s, **how)):
            with pytest.raises(CodecError, match=r"not this reduction's.*expected.*float32"):
                jax.eval_shape(call, X[:2], wrong)


def test_integers_and_complex_numbers_are_neither_rounded_nor_cut():
    many = np.arange(16, dtype=np.int32) * (1 << 20) + 1
    wave = (X[:2] + 1j * X[2:4]).astype(np.complex64)
    run = lambda fn, x, i, o: jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=i, out_specs=o, check_vma=False))(x)
    whole = lambda x: comm.reduce_scatter(x, "node", codec="int8")[0]
    assert np.array_equal(run(whole, many, P(), P("node")), 2 * many)
    total = run(lambda x: comm.reduce_scatter(x[0], "node", codec="int4")[0], wave, P("node"), P("node"))
    assert np.abs(total - wave.sum(0)).max() < 1e-5
    for call in (comm.gather_weight, comm.all_gather, comm.secondary_copy):
        for value in (many, wave[0]):
            assert np.array_equal(run(lambda x, call=call: call(x, "node", codec="int8"), value, P("node"), P()), value)


@pytest.mark.parametrize(
    "fn",
    [
        reduced(), reduced(inner=()), reduced(codec="bf16"), reduced(codec="int4:feedback=0"),
        reduced(codec="powersgd:2", state=({"right": jnp.zeros((1, 64)), "residual": jnp.zeros((1, 512))},)),
        scattered(), lambda x: comm.all_gather(x[0], "node"),
        lambda x: jax.grad(lambda x: (comm.gather_weight(x[0], "node") ** 3).sum())(x),  # of a gradient: second order
    ],
)  # fmt: skip
def test_no_derivative_is_taken_of_what_is_rounded(fn):
    value = lambda x: (fn(x) ** 2).sum()
    for derive in (jax.grad(value), lambda x: jax.jvp(value, (x,), (x,))[1], jax.grad(jax.checkpoint(value))):
        with pytest.raises(CodecError, match="which has none"):
            mapped(derive)
    with pytest.raises(CodecError, match="which has none"):
        stacked = lambda x: comm.reduce_stacked(x, mesh=MESH, spec=P(), axes="node", codec="int8")[0].sum()
        jax.eval_shape(jax.grad(stacked), X[:2])
    # What is only looked at is kept out.
    mapped(jax.grad(lambda x: x.sum() + fn(jax.lax.stop_gradient(x)).sum()))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("inner", ["gpu", ()])
def test_an_exact_sum_has_the_derivative_of_psum(inner, check_vma):
    axes = ("node", inner) if inner else ("node",)

    def gradient(total):
        fn = jax.grad(lambda x: (total(x[0]) ** 2).sum())
        return jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=EVERY, out_specs=EVERY, check_vma=check_vma))(X)

    ours = gradient(lambda x: comm.all_reduce(x, "node", inner=inner, codec="exact")[0])
    assert np.allclose(ours, gradient(lambda x: jax.lax.psum(x, axes)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inner", ["gpu", ()])
def test_an_exact_sum_of_stacked_values_has_the_derivative_of_a_sum(inner):
    total = lambda x: comm.reduce_stacked(x, mesh=MESH, spec=P(), axes="node", inner=inner, codec="exact")[0]
    ours = jax.jit(jax.grad(lambda x: (total(x) ** 2).sum()))(X[:2])
    assert np.allclose(ours, jax.grad(lambda x: (x.sum(0) ** 2).sum())(jnp.asarray(X[:2])), rtol=1e-5, atol=1e-5)
