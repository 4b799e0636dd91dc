"""State, gradients and reconstructions are told apart by how a result is made, not by where it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lensjax
from lensjax.program.program import analyze

W = jnp.ones((16, 32))
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def update(p, x, lr=0.1):
    loss, g = jax.value_and_grad(lambda p: (jnp.tanh(x @ p["w"]) ** 2).mean())(p)
    return jax.tree.map(lambda p, g: p - lr * g, p, g), loss


def results(program):
    return {a.path: program.result_paths[a.result] for a in program.arguments if a.result is not None}


def test_a_reconstruction_of_the_batch_is_not_its_next_state():
    def step(p, x):
        def loss(p):
            out = jnp.tanh(x @ p["w"]) @ p["w"].T
            return ((out - x) ** 2).mean(), out

        (value, out), g = jax.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - g, p, g), value, out

    for told in ({}, {"batch_argnums": (1,)}):
        program = analyze(step, ({"w": W}, X), **told)
        assert program.batch.axes == {1: 0} and results(program) == {"p/w": "0/w"} and not program.gradients
        *_, out = lensjax.parallelize(step, plan="dp", **told)({"w": W}, X)
        np.testing.assert_allclose(out, step({"w": W}, X)[2], rtol=1e-5)


def test_the_gradient_of_the_batch_is_a_result_along_it():
    def step(p, x):
        _, (g, gx) = jax.value_and_grad(lambda p, x: (jnp.tanh(x @ p["w"]) ** 2).mean(), argnums=(0, 1))(p, x)
        return jax.tree.map(lambda p, g: p - g, p, g), gx

    program = analyze(step, ({"w": W}, X))
    assert program.batch.axes == {1: 0} and results(program) == {"p/w": "0/w"}


def test_the_state_to_fall_back_to_is_not_given_up():
    def step(best, params, x):
        new, loss = update(params, x)
        return jax.tree.map(lambda b, n: jnp.where(jnp.isnan(loss), b, n), best, new), loss

    assert results(analyze(step, ({"w": W}, {"w": W + 1}, X))) == {"params/w": "0/w"}
    best = {"w": W + 0}
    lensjax.parallelize(step, plan="dp")(best, {"w": W + 1}, X)
    assert not best["w"].is_deleted()


def test_a_teacher_is_not_the_student():
    def step(teacher, student, x):
        target = x @ teacher["w"]
        g = jax.grad(lambda s: ((x @ s["w"] - target) ** 2).mean())(student)
        return jax.tree.map(lambda s, g: s - g, student, g)

    program = analyze(step, ({"w": W}, {"w": W * 2}, X))
    assert results(program) == {"student/w": "w"} and not program.gradients and program.donate


def test_results_in_another_order_than_the_arguments():
    def step(params, ema, x):
        new, _ = update(params, x)
        return jax.tree.map(lambda e, n: 0.9 * e + 0.1 * n, ema, new), new

    assert results(analyze(step, ({"w": W}, {"w": W}, X))) == {"params/w": "1/w", "ema/w": "0/w"}


@pytest.mark.parametrize("steps", [4, 8])
def test_a_loop_over_steps_is_not_the_batch(steps):
    def many(p, xs):
        def body(p, x):
            return update(p, x)

        return jax.lax.scan(body, p, xs)

    program = analyze(many, ({"w": W}, np.stack([X] * steps)))
    assert program.batch.axes == {1: 1} and program.batch.size == 8
    assert [a.role for a in program.arguments] == ["parameter", "batch"]


def test_the_error_of_a_batch_that_does_not_divide_says_which_it_was():
    with pytest.raises(lensjax.BatchError, match="12 does not divide") as e:
        lensjax.parallelize(update, plan="dp")({"w": W}, np.ones((12, 16), np.float32))
    assert "dimension 0 of x" in e.value.hint and "batch_axes" in e.value.hint
