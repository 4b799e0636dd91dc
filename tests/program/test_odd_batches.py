"""Batches that the step cuts to pieces of its own, that the state has a size for, or that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lensjax
from lensjax._errors import BatchError
from lensjax.program.program import analyze
from tests.passes.descent import descent, same

RNG = np.random.default_rng(0)
PARAMS = {
    "in": (RNG.normal(size=(32, 64)) / 6).astype(np.float32),
    "bias": np.zeros(64, np.float32),
    "out": (RNG.normal(size=(64, 32)) / 8).astype(np.float32),
}
X = RNG.normal(size=(16, 32)).astype(np.float32)


def _net(p, x):
    return jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"]


def _pieces(p, x):
    """Four examples at a time."""
    piece = lambda k, total: total + (_net(p, lax.dynamic_slice_in_dim(x, 4 * k, 4)) ** 2).mean() / 4
    return lax.fori_loop(0, 4, piece, 0.0)


def test_weights_are_found_where_the_batch_is_cut_to_pieces():
    def step(state, x):
        grads = jax.grad(_pieces)(state["params"], x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ({"params": PARAMS, "moments": PARAMS}, X))
    roles = {a.path: a.role for a in analyze(step, shapes).arguments}
    assert {p for p, r in roles.items() if r == "parameter"} == {f"state/params/{n}" for n in PARAMS}
    assert {p for p, r in roles.items() if r == "optimizer"} == {f"state/moments/{n}" for n in PARAMS}


def test_pieces_as_on_one_device():
    same(descent(_pieces), PARAMS, X, "fsdp=2,tp=4")


def _recurrent(state, xs):
    def loss(p):
        def cell(h, x):
            h = jnp.tanh(x @ p["in"] + h)
            return h, h

        h, hs = lax.scan(cell, state["h"], jnp.swapaxes(xs, 0, 1))
        return ((hs @ p["out"]) ** 2).mean(), h

    grads, h = jax.grad(loss, has_aux=True)(state["p"])
    return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads), "h": h}


def test_a_second_dimension_taken_for_the_batch_is_said():
    state, xs = {"p": PARAMS, "h": np.zeros((16, 64), np.float32)}, np.zeros((16, 10, 32), np.float32)
    step = lensjax.parallelize(_recurrent, plan="dp=2", cluster="cpu:2")
    step.plan_for(state, xs)
    (note,) = step.notices
    assert "dimension 1 of xs is taken for the batch (10)" in note and "axis 0, size 16 (xs)" in note
    named = lensjax.parallelize(_recurrent, plan="dp=2", cluster="cpu:2", batch_argnums=1)
    named.plan_for(state, xs)
    assert named.notices == [] and named.program.batch.size == 16


def test_an_empty_array_is_no_batch():
    loss = lambda p, x, none: (_net(p, x) ** 2).mean() + none.sum()
    assert analyze(lambda p, x, none: jax.grad(loss)(p, x, none), (PARAMS, X, X[:0])).batch.size == 16


def test_a_step_without_batch_arguments():
    with pytest.raises(BatchError) as e:
        analyze(
            lambda p: jax.tree.map(lambda a, g: a - g, p, jax.grad(lambda p: (_net(p, X) ** 2).mean())(p)), (PARAMS,)
        )
    assert "an argument with its batch" in str(e.value) + str(e.value.hint)
