"""What the tests of edges share: a tiny step, its data, and the comparison with the undecorated step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import lensjax


def weight():
    return jnp.full((16, 64), 0.05, jnp.float32)


def data(n=16):
    return np.asarray(jax.random.normal(jax.random.key(9), (n, 16)), np.float32)


def sgd(loss):
    """A training step of one weight: `step(weight, x) -> (weight, loss)`."""

    def step(p, x):
        value, grad = jax.value_and_grad(loss)(p, x)
        return p - 0.1 * grad, value

    return step


def close(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def same(step, plan="fsdp", *more, reference=None, **options):
    """Runs the step under a plan, compares it with `reference` (or itself, undecorated) and returns it."""
    train = lensjax.parallelize(step, plan=plan, **options)
    close(train(weight(), data(), *more), (reference or step)(weight(), data(), *more))
    return train


def mesh(**axes):
    """A mesh of the user's own over all devices."""
    return Mesh(
        np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
