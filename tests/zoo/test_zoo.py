"""Every family of the zoo is what it says: it runs, learns, keeps the structure of its state, and is deterministic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.zoo import FAMILIES, widen

# Other fast tests run every family under a preset; here one of each kind is enough, the rest is slow.
FAST = ("mlp", "gpt_scan_remat_dropout", "dlrm", "lora", "float16_dynamic_scale", "nnx_mlp_split", "nnx_two_tower")


def _named(names):
    return [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in names]


def _shapes(tree):
    return [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", _named(FAMILIES))
def test_family_trains(name):
    family = FAMILIES[name]
    step, init, batch = family.make(with_grads=True)
    state, data = init(jax.random.key(0)), batch(jax.random.key(1))
    shapes, structure = _shapes(state), jax.tree.structure(state)
    jitted = family.jit(step)
    state, metrics = family.call(jitted, state, data)
    assert jax.tree.structure(state) == structure
    assert _shapes(state) == shapes
    grads = [np.asarray(g, np.float32) for g in jax.tree.leaves(metrics["grads"])]
    assert all(np.isfinite(g).all() for g in grads)
    assert sum(np.abs(g).max() > 0 for g in grads) >= 0.5 * len(grads)
    losses = [float(metrics["loss"])]
    for _ in range(11):
        state, metrics = family.call(jitted, state, data)
        losses.append(float(metrics["loss"]))
    # The same batch over and over: even a poor optimizer must get better at it.
    assert min(losses[-3:]) < losses[0]
    assert len(jax.tree.leaves(data)[0]) % 8 == 0


@pytest.mark.parametrize("name", _named(n for n, f in FAMILIES.items() if f.dtype == "float32"))
def test_family_widens_to_float64(name):
    family = FAMILIES[name]

    def run():
        plain, init, batch = family.make()
        instrumented = family.make(with_grads=True).step
        state, data = init(jax.random.key(0)), batch(jax.random.key(1))
        state, data = widen(nnx.split(state) if family.form == "modules" else state), widen(data)
        before = _shapes(state)
        one, other = [nnx.merge(*state) if family.form == "modules" else state for _ in range(2)]
        _, metrics = family.call(plain, one, data)
        after, more = family.call(instrumented, other, data)
        after = nnx.split(after) if family.form == "modules" else after
        assert _shapes(after) == before
        assert set(more) - set(metrics) == {"grads"}
        return more

    with jax.enable_x64(True):
        metrics = jax.eval_shape(run)
        assert metrics["loss"].dtype == jnp.float64
        assert {g.dtype for g in jax.tree.leaves(metrics["grads"])} == {jnp.dtype("float64")}
