"""Convolutions, pooling, pads and slices under random shardings: in the splits that the pass allows, XLA computes what
it computes on one device. Without the pass about one case in ten is wrong, and some end the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lensjax
from lensjax.passes.windows import safe_splits
from lensjax.plan.plan import Micro, Reduce
from tests.passes.descent import descent, same

AXES = ("a", "b", "c")
NUMBERS = ("NWC", "WIO", "NWC"), ("CWN", "IWO", "WNC")


def _split(rng, shape):
    """A random sharding of a shape over the three mesh axes, of two devices each."""
    entries = [()] * len(shape)
    for axis in AXES:
        d = rng.integers(len(shape))
        if rng.random() < 0.6 and shape[d] % 2 ** (len(entries[d]) + 1) == 0:
            entries[d] += (axis,)
    return PartitionSpec(*(e or None for e in entries))


def _convolution(rng):
    rows, channels, features = (int(rng.choice(n)) for n in ((4, 8), (4, 8), (4, 8, 16)))
    groups, batches = [(1, 1), (1, 1), (2, 1), (channels, 1), (1, 2), (1, 4)][rng.integers(6)]
    features = max(features, groups)
    size, kernel, stride, spread, dilation = (
        int(rng.choice(n)) for n in ((4, 5, 8), (1, 3, 8), (1, 2), (1, 2), (1, 2))
    )
    low, high = rng.integers((kernel - 1) * dilation + 1, size=2)
    numbers = NUMBERS[rng.integers(2)]
    reach = (size - 1) * spread + low + high - (kernel - 1) * dilation
    if reach < 1:
        return None

    def order(shape, names, like):
        return tuple(shape[like.index(n)] for n in names)

    x = order((rows, size, channels), numbers[0], "NWC")
    k = order((kernel, channels // groups, features), numbers[1], "WIO")
    options = {"feature_group_count": groups, "batch_group_count": batches, "dimension_numbers": numbers}
    apply = lambda x, k: lax.conv_general_dilated(
        x, k, (stride,), [(low, high)], lhs_dilation=(spread,), rhs_dilation=(dilation,), **options
    )
    return apply, (x, k)


def _pool(kind, gradient):
    def case(rng):
        n, m = rng.choice([4, 6, 8], size=2)
        window, stride, padding = (
            int(rng.choice([2, 3])),
            int(rng.choice([1, 2, 3])),
            str(rng.choice(["SAME", "VALID"])),
        )
        sizes = (1, window, window), (1, stride, stride), padding
        pool = lambda x: lax.reduce_window(x, *kind, *sizes)
        shape = (4, int(n), int(m))
        if not gradient:
            return pool, (shape,)
        made = jax.eval_shape(pool, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
        return lambda x, ct: jax.vjp(pool, x)[1](ct)[0], (shape, made)

    return case


def _pad(rng):
    config = [(int(rng.integers(-1, 3)), int(rng.integers(-1, 3)), int(rng.integers(3))) for _ in range(2)]
    return lambda x: lax.pad(x, 0.0, config), (tuple(map(int, rng.choice([4, 6, 8], size=2))),)


def _strided(rng):
    shape = tuple(map(int, rng.choice([4, 6, 8], size=2)))
    start = [int(rng.integers(n)) for n in shape]
    stop = [int(rng.integers(s + 1, n + 1)) for s, n in zip(start, shape)]
    steps = [int(n) for n in rng.choice([1, 2, 3], size=2)]
    return lambda x: lax.slice(x, start, stop, steps), (shape,)


def _dynamic(rng):
    shape = tuple(map(int, rng.choice([4, 6, 8], size=3)))
    sizes = [int(rng.choice([n, n // 2])) for n in shape]
    at = tuple(rng.integers(4, size=3).astype(np.int32))
    if rng.random() < 0.5:
        return lambda x: lax.dynamic_slice(x, at, sizes), (shape,)
    return lambda x, y: lax.dynamic_update_slice(x, y, at), (shape, tuple(sizes))


CASES = {
    "convolution": _convolution,
    "max": _pool((-jnp.inf, lax.max), False),
    "max gradient": _pool((-jnp.inf, lax.max), True),
    "mean gradient": _pool((0.0, lax.add), True),
    "pad": _pad,
    "strided": _strided,
    "dynamic": _dynamic,
}


def _run(jaxpr, arguments, split):
    """Evaluates a jaxpr with each operation in the splits that are safe; `split(x, spec)` constrains."""
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts)) | dict(zip(jaxpr.jaxpr.invars, arguments))
    for eqn in jaxpr.jaxpr.eqns:
        ins = [a.val if hasattr(a, "val") else env[a] for a in eqn.invars]
        operands, result = safe_splits(eqn, AXES, 8) or ([None] * len(ins), None)
        ins = [x if s is None else split(x, s) for x, s in zip(ins, operands)]
        outs = eqn.primitive.bind(*ins, **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs if result is None else [split(outs[0], result)]))
    return env[jaxpr.jaxpr.outvars[0]]


@pytest.mark.few(14)
@pytest.mark.parametrize("kind, seed", [(kind, seed) for kind in CASES for seed in range(40)])
def test_safe_splits_compute_what_one_device_does(kind, seed):
    rng = np.random.default_rng(seed)
    made = CASES[kind](rng)
    if made is None:
        return  # the window is longer than what it slides over
    apply, shapes = made
    arguments = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    expected = jax.jit(apply)(*arguments)
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    split = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    jaxpr = jax.make_jaxpr(apply)(*arguments)
    ins, out = [_split(rng, shape) for shape in shapes], _split(rng, expected.shape)

    def whole(*arguments):
        return split(_run(jaxpr, [split(x, s) for x, s in zip(arguments, ins)], split), out)

    np.testing.assert_allclose(jax.jit(whole)(*arguments), expected, rtol=1e-4, atol=1e-4)


def _draw(rng, *shape):
    return (rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)


def _convolve(x, kernel, stride=1, groups=1):
    return lax.conv_general_dilated(
        x, kernel, (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
    )


def test_channels_that_become_windows():
    rng = np.random.default_rng(0)
    params = {"first": _draw(rng, 3, 8, 24), "out": _draw(rng, 64, 32), "second": _draw(rng, 3, 4, 64)}

    def loss(params, x):
        h = jnp.tanh(_convolve(x.reshape(len(x), 4, 8), params["first"]).mean(1))
        h = jnp.tanh(_convolve(h.reshape(len(x), 6, 4), params["second"], 2).mean(1))
        return ((h @ params["out"]) ** 2).sum()

    same(descent(loss), params, rng.normal(size=(16, 32)).astype(np.float32), "tp_sp=2")


def _block(groups):
    """(loss, parameters, batch) of a ConvNeXt-like block: grouped convolution, max pooling, every other position."""
    rng = np.random.default_rng(0)
    params = {"in": _draw(rng, 3, 4, 16), "groups": _draw(rng, 3, 16 // groups, 16), "out": _draw(rng, 16, 8)}

    def loss(params, x):
        h = jax.nn.gelu(_convolve(_convolve(x, params["in"]), params["groups"], groups=groups))
        h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")[:, ::2]
        return ((h.mean(1) @ params["out"]) ** 2).mean()

    return loss, params, rng.normal(size=(16, 8, 4)).astype(np.float32)


@pytest.mark.few(3)
@pytest.mark.parametrize("groups", [2, 16])
@pytest.mark.parametrize("plan", ["dp", "tp=8", "fsdp=2,tp=4", "dp=2,tp_sp=4", "dp=2,fsdp=2,tp=2"])
def test_grouped_kernels(plan, groups):
    loss, params, x = _block(groups)
    same(descent(loss), params, x, plan)


@pytest.mark.few(2)
@pytest.mark.parametrize("field", [{"reduce": {"host": Reduce(split=True)}}, {"micro": Micro(count=2)}])
@pytest.mark.parametrize("plan", ["dp=2,fsdp=2,tp=2", "dp=2,fsdp=4", "dp=2,tp=4", "fsdp=2,tp_sp=4", "hsdp=4"])
def test_in_shares_of_the_batch(plan, field):
    loss, params, x = _block(2)
    plan = lensjax.parallelize(descent(loss), plan=plan, cluster="cpu:2x4").plan_for(params, x)
    same(descent(loss), params, x, plan.replace(**field), "cpu:2x4")


@pytest.mark.parametrize("plan", ["dp", "dp=2,fsdp=2,tp=2"])
def test_every_other_example(plan):
    """Pairs of neighbours in the batch: a slice with a stride along the dimension that is split."""
    rng = np.random.default_rng(0)

    def loss(params, x):
        h = jnp.tanh(x @ params["in"])
        return ((h[::2] - h[1::2]) ** 2).mean() + (h * h[::-1]).mean()

    same(descent(loss), {"in": _draw(rng, 16, 32)}, rng.normal(size=(16, 16)).astype(np.float32), plan)
