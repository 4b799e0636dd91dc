"""A convolution is split over its windows or over its kernel's input channels, never both: XLA sums wrongly then.

By plain shardings, on jax 0.10.2 and 0.12.0.1 alike: an input [16, 8, 4] split as P("d", "t") and a kernel [3, 4, 64]
split as P(None, "t") give a result that is wrong by several times its size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lensjax


def _convolve(x, kernel, stride):
    numbers = ("NWC", "WIO", "NWC")
    return jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (stride,), "SAME", dimension_numbers=numbers).mean(1))


def _loss(params, x):
    """Channels made by one convolution become the windows of the next."""
    h = _convolve(x.reshape(len(x), 4, 8), params["first"], 1)
    h = _convolve(h.reshape(len(x), 6, 4), params["second"], 2)
    return ((h @ params["out"]) ** 2).sum()


def test_channels_that_become_windows():
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)
    params = {"first": draw(3, 8, 24), "out": draw(64, 32), "second": draw(3, 4, 64)}
    x = rng.normal(size=(16, 32)).astype(np.float32)

    def step(params, x):
        loss, grads = jax.value_and_grad(_loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (loss, grads)

    _, (loss, grads) = jax.jit(step)(params, x)
    _, (mine, found) = lensjax.parallelize(step, plan="tp_sp=2", cluster="cpu:8", donate=False)(params, x)
    assert float(mine) == pytest.approx(float(loss), rel=1e-5)
    scale = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(found), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * scale
