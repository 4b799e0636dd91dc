"""Reductions by functions of the user's and by bits, and Fourier transforms, in a step under presets that split what
they mix: as on one device. Without the pass they are wrong, do not compile, or fail while they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lensjax
from lensjax.plan.plan import Micro, Reduce
from tests.passes.descent import descent, same

RNG = np.random.default_rng(0)
PARAMS = {
    "in": (RNG.normal(size=(32, 64)) / 6).astype(np.float32),
    "square": (RNG.normal(size=(64, 64)) / 8).astype(np.float32),
    "out": (RNG.normal(size=(64, 32)) / 8).astype(np.float32),
}
X = RNG.normal(size=(16, 32)).astype(np.float32)


def _pick(h):
    """The first largest value of each row, and its index."""
    better = lambda a, b: (jnp.where(a[0] >= b[0], a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1]))
    index = lax.broadcasted_iota(jnp.int32, h.shape, 1)
    value, at = lax.reduce((h, index), (np.float32(-9), np.int32(0)), better, (1,))
    return (value + at)[:, None]


def _bits(h):
    return (h * 100).astype(jnp.int32)


REDUCTIONS = {
    "sum from one": lambda h: lax.reduce(h, np.float32(1), lax.add, (0, 1)),
    "sum of examples from one": lambda h: lax.reduce(h, np.float32(1), lax.add, (0,)),
    "sum of features from one": lambda h: lax.reduce(h, np.float32(1), lax.add, (1,))[:, None],
    "function": lambda h: lax.reduce(h, np.float32(0), lambda a, b: jnp.logaddexp(a, b), (1,))[:, None],
    "function of two": _pick,
    "exclusive or": lambda h: lax.reduce_xor(_bits(h), (0, 1)),
    "or of integers": lambda h: lax.reduce_or(_bits(h), (0,)),
    "and of integers": lambda h: lax.reduce_and(_bits(h), (1,))[:, None],
}
TRANSFORMS = {
    "of a weight": lambda h, w: h @ jnp.fft.fft(w).real,
    "of both axes": lambda h, w: h @ jnp.fft.fft2(w).real / 8,
    "of the activations": lambda h, w: jnp.fft.irfft(jnp.fft.rfft(h, n=128) * jnp.fft.rfft(w[0], n=128), n=128)[:, :64],
    "of the examples": lambda h, w: jnp.fft.fft(h, axis=0).real,
}


def _step(mix):
    def loss(params, x):
        h = mix(jnp.tanh(x @ params["in"]), params["square"])
        return ((h @ params["out"]) ** 2).mean()

    return descent(loss)


@pytest.mark.few(4)
@pytest.mark.parametrize("plan", ["fsdp=2,tp=4", "tp=8", "dp=2,fsdp=2,tp=2", "zero1=2,tp_sp=4"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, plan):
    same(_step(lambda h, w: h * (1 + 0.01 * REDUCTIONS[name](lax.stop_gradient(h)))), PARAMS, X, plan)


@pytest.mark.few(3)
@pytest.mark.parametrize("plan", ["fsdp=2,tp=4", "dp=2,fsdp=2,tp=2", "zero1=2,tp_sp=4"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, plan):
    same(_step(TRANSFORMS[name]), PARAMS, X, plan)


@pytest.mark.few(1)
@pytest.mark.parametrize("field", [{"reduce": {"host": Reduce(split=True)}}, {"micro": Micro(count=2)}])
@pytest.mark.parametrize("plan", ["dp=2,fsdp=2,tp=2", "dp=2,tp=4"])
@pytest.mark.parametrize("name", ["of a weight", "of the activations"])
def test_transforms_in_shares_of_the_batch(name, plan, field):
    step = _step(TRANSFORMS[name])
    made = lensjax.parallelize(step, plan=plan, cluster="cpu:2x4").plan_for(PARAMS, X)
    same(step, PARAMS, X, made.replace(**field), "cpu:2x4")


ROWS = np.array([0, 5, 7, 9, 2, 60, 7, 33, 1, 1], np.int32)
SCATTERS = {
    "products": lambda w, u: w.at[ROWS[:5]].multiply(u[:5], unique_indices=True),
    "maxima": lambda w, u: w.at[ROWS].max(u[:10]),
    "minima of columns": lambda w, u: w.at[:, ROWS].min(u.T[:, :10]),
    "ones": lambda w, u: w * jnp.zeros(64).at[ROWS].add(1.0),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", ["fsdp=2,tp=4", "zero1=2,tp_sp=4", "dp=2,fsdp=2,tp=2"])
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_of_a_number_that_the_devices_do_not_divide(name, plan):
    scatter = SCATTERS[name]

    def loss(params, x):
        h = jnp.tanh(x @ params["in"])
        return ((h @ scatter(params["square"], params["out"].T) @ params["out"]) ** 2).mean()

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, grads)

    same(step, PARAMS, X, plan)
