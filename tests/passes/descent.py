"""A step of gradient descent on a loss, and whether a plan leaves its numbers what one device's are."""

import jax
import numpy as np
import pytest

import lensjax


def descent(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, grads)

    return step


def same(step, params, batch, plan, cluster="cpu:8"):
    _, (value, grads) = jax.jit(step)(params, batch)
    _, (mine, found) = lensjax.parallelize(step, plan=plan, cluster=cluster, donate=False)(params, batch)
    assert float(mine) == pytest.approx(float(value), rel=1e-5)
    scale = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(found), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * scale
