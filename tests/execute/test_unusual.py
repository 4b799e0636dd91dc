"""Unusual but legal ways to write a step and its batch, each against the undecorated step."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lensjax
from lensjax import BatchError, TraceError
from lensjax.execute.step import Step
from lensjax.program.program import analyze

W = np.linspace(-1, 1, 32 * 64, dtype=np.float32).reshape(32, 64)
X = np.linspace(0, 1, 16 * 32, dtype=np.float32).reshape(16, 32)


def update(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def same(step, *args, plan="fsdp", **kwargs):
    expected = (step if hasattr(step, "lower") else jax.jit(step))(*args, **kwargs)
    mine = lensjax.parallelize(step, plan=plan, donate=False)(*args, **kwargs)
    assert jax.tree.structure(mine) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- keys as a batch ------------------------------------------------------------------------------------------------


def noisy(w, keys):
    x = jax.vmap(lambda k: jax.random.normal(k, (32,)))(keys)
    return update(w, x)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_a_batch_of_one_key_for_each_example(make):
    keys = jax.random.split(make(0), 16)
    program = analyze(noisy, (W, keys))
    assert [(a.role, a.batch_axis) for a in program.arguments] == [("parameter", None), ("batch", 0)]
    same(noisy, W, keys)


def test_keys_beside_the_examples():
    def step(w, batch):
        noise = jax.vmap(lambda k: jax.random.normal(k, (32,)))(batch["key"])
        return update(w, batch["x"] + noise)

    same(step, W, {"x": X, "key": jax.random.split(jax.random.key(1), 16)})


def test_several_keys_that_are_no_batch():
    def step(w, x, keys):
        return update(w, x + jax.random.normal(keys[0], (32,)) + jax.random.uniform(keys[1], (32,)))

    program = analyze(step, (W, X, jax.random.split(jax.random.key(1), 3)))
    assert [a.role for a in program.arguments] == ["parameter", "batch", "key"]


# ---- the batch ------------------------------------------------------------------------------------------------------


def test_a_batch_of_one():
    program = analyze(update, (W, X[:1]))
    assert program.batch.size == 1 and program.batch.axes == {1: 0}
    same(update, W, X[:1], plan="tp=8")
    with pytest.raises(BatchError, match="the batch of 1 does not divide into 8") as e:
        lensjax.parallelize(update, plan="dp")(W, X[:1])
    assert "8" in e.value.hint


def test_a_batch_committed_to_one_device_is_moved_without_a_detour(monkeypatch):
    step = lensjax.parallelize(update, plan="fsdp")
    state, expected = jnp.array(W), jnp.array(W)
    batch = jax.device_put(X, jax.devices()[3])
    state, _ = step(state, batch)
    monkeypatch.setattr(Step, "_again", lambda *a: pytest.fail("a detour at every call"))
    for _ in range(2):
        state, loss = step(state, jax.device_put(X, jax.devices()[3]))
    state, loss = step(state, X)  # and from the host again
    for _ in range(4):
        expected, wanted = jax.jit(update)(expected, X)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [({"a": 0},), ({"x": 0, "y": {"z": 0}},), ([0, 0],)])
def test_batch_axes_of_another_structure(axes):
    step = lambda w, b: update(w, b["x"] + b["y"])
    with pytest.raises(BatchError, match="batch_axes does not have the structure of argument 1") as e:
        analyze(step, (W, {"x": X, "y": X}), batch_argnums=1, batch_axes=axes)
    assert "an integer" in e.value.hint


def test_a_batch_by_keyword_only():
    def step(w, *, batch):
        return update(w, batch)

    train = lensjax.parallelize(step, plan="fsdp")
    state = train.init(lambda: jnp.array(W), batch=X)
    state, loss = train(state, batch=X)
    np.testing.assert_allclose(loss, update(W, X)[1], rtol=1e-5)


def test_several_arguments_by_keyword_only():
    def step(w, *, x, scale):
        return update(w, x * scale)

    train = lensjax.parallelize(step, plan="dp")
    train.init(lambda: jnp.array(W), batch={"x": X, "scale": np.float32(2.0)})
    assert [a.path for a in train.program.arguments if a.role == "batch"] == ["x"]
    with pytest.raises(TraceError, match="scale, x by keyword only") as e:
        lensjax.parallelize(step, plan="dp").init(lambda: jnp.array(W), batch=X)
    assert "'scale': ..." in e.value.hint


# ---- the function ---------------------------------------------------------------------------------------------------


class Callable:
    rate = 0.1

    def __call__(self, w, x):
        return update(w, x * self.rate)


class Pair(typing.NamedTuple):
    x: typing.Any
    scale: typing.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    w: typing.Any
    count: typing.Any
    nothing: None = None


def with_everything(state, batch):
    w, loss = update(state.w, batch.x * batch.scale)
    return {"loss": loss, "empty": ()}, State(w, state.count + 1)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "step, args",
    [
        (functools.partial(lambda rate, w, x: update(w, x * rate), 0.5), (W, X)),
        (Callable(), (W, X)),
        (lambda *args: update(*args), (W, X)),
        (lambda w, x, mask=None: update(w, x if mask is None else x * mask), (W, X)),
        (with_everything, (State(W, 0), Pair(X, np.ones((16, 1), np.float32)))),
        (lambda x, w: update(w, x)[::-1], (X, W)),
        (lambda w, xs: update(w, jnp.stack(xs, 1).mean(1)), (W, [X, X, X])),
        (jax.jit(lambda w, x, *, flip: update(w, -x if flip else x), static_argnames="flip"), (W, X)),
    ],
    ids=["partial", "object", "star", "default", "nested", "batch first", "list", "static keyword"],
)
def test_ways_to_write_a_step(step, args):
    kwargs = {"flip": True} if hasattr(step, "lower") else {}
    same(step, *args, **kwargs)
