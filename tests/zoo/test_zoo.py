"""Every family of the zoo is what it says: it runs, learns, keeps the structure of its state, and is deterministic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo import FAMILIES, widen


def _shapes(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_trains(name):
    step, init, batch = FAMILIES[name].make(with_grads=True)
    state, data = jax.jit(init)(jax.random.key(0)), batch(jax.random.key(1))
    jitted = jax.jit(step)
    first, metrics = jitted(state, data)
    assert jax.tree.structure(first) == jax.tree.structure(state)
    assert _shapes(first) == _shapes(state)
    grads = [np.asarray(g, np.float32) for g in jax.tree.leaves(metrics["grads"])]
    assert all(np.isfinite(g).all() for g in grads)
    assert sum(np.abs(g).max() > 0 for g in grads) >= 0.5 * len(grads)
    losses = [float(metrics["loss"])]
    for _ in range(11):
        first, metrics = jitted(first, data)
        losses.append(float(metrics["loss"]))
    # The same batch over and over: even a poor optimizer must get better at it.
    assert min(losses[-3:]) < losses[0]
    assert len(jax.tree.leaves(data)[0]) % 8 == 0


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.dtype == "float32"])
def test_family_widens_to_float64(name):
    with jax.enable_x64(True):
        step, init, batch = FAMILIES[name].make(with_grads=True)
        state, data = jax.eval_shape(lambda: widen((init(jax.random.key(0)), batch(jax.random.key(1)))))
        after, metrics = jax.eval_shape(step, state, data)
        assert metrics["loss"].dtype == jnp.float64
        assert {g.dtype for g in jax.tree.leaves(metrics["grads"])} == {jnp.dtype("float64")}
        assert _shapes(after) == _shapes(state)


def test_gradients_are_an_addition_to_the_same_step():
    for family in FAMILIES.values():
        plain, init, batch = family.make()
        instrumented = family.make(with_grads=True).step
        state, data = jax.eval_shape(lambda f=init, b=batch: (f(jax.random.key(0)), b(jax.random.key(1))))
        _, metrics = jax.eval_shape(plain, state, data)
        _, more = jax.eval_shape(instrumented, state, data)
        assert set(more) - set(metrics) == {"grads"}
