"""What happens around a call: arrays that stand twice, methods, steps inside other programs, orders of arguments."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lensjax
from lensjax import StateError, TraceError
from lensjax.execute.ahead import CALLS, ahead

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def step(state, x):
    loss, g = jax.value_and_grad(lambda p: (jnp.tanh(x @ p) ** 2).mean())(state["p"])
    p = state["p"] - 0.1 * g
    return {"p": p, "ema": 0.9 * state["ema"] + 0.1 * p}, loss


def create():
    return {"p": jnp.full((16, 64), 0.1), "ema": jnp.full((16, 64), 0.1)}


@pytest.mark.parametrize("plan", ["dp", "fsdp"])
def test_a_donated_array_that_stands_twice_in_a_later_call(plan):
    """XLA ends the process when one buffer is given up twice."""
    train, plain = lensjax.parallelize(step, plan=plan), create()
    state = train.init(create, batch=X)
    for _ in range(3):
        state, loss = train({"p": state["p"], "ema": state["p"]}, X)
        plain, expected = step({"p": plain["p"], "ema": plain["p"]}, X)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(state["ema"], plain["ema"], rtol=1e-5)


def test_a_donated_array_that_is_also_another_argument():
    def beside(p, frozen, x):
        return p - jax.grad(lambda p: ((x @ p - x @ frozen["w"]) ** 2).mean())(p)

    train = lensjax.parallelize(beside, plan="dp")
    p = jnp.ones((16, 64))
    for _ in range(3):
        expected = beside(p, {"w": p}, X)
        p = train(p, {"w": p}, X)
        np.testing.assert_allclose(p, expected, rtol=1e-5)


def test_a_decorated_method():
    class Trainer:
        def __init__(self, rate):
            self.rate = rate

        @lensjax.parallelize(plan="dp")
        def step(self, p, x):
            return p - self.rate * jax.grad(lambda p: (jnp.tanh(x @ p)).mean())(p)

    p = np.full((16, 64), 0.1, np.float32)
    for trainer in (Trainer(0.1), Trainer(0.5)):
        got = trainer.step(p, X)
        np.testing.assert_allclose(got, p - trainer.rate * jax.grad(lambda p: (jnp.tanh(X @ p)).mean())(p), rtol=1e-5)
        assert trainer.step is trainer.step and trainer.step.plan.name == "dp"


def test_a_step_inside_the_users_own_jit_is_part_of_that_program():
    train = lensjax.parallelize(step, plan="fsdp")
    outer = jax.jit(lambda s, x: train(s, x)[1] * 2)
    expected = 2 * step(create(), X)[1]
    np.testing.assert_allclose(outer(create(), X), expected, rtol=1e-6)
    train(create(), X)
    np.testing.assert_allclose(jax.jit(lambda s, x: train(s, x)[1] * 2)(create(), X), expected, rtol=1e-6)


def test_init_for_a_step_that_takes_the_batch_first():
    def first(batch, state):
        return step(state, batch["x"])

    train = lensjax.parallelize(first, plan="fsdp")
    state = train.init(create, batch={"x": X})
    state, loss = train({"x": X}, state)
    np.testing.assert_allclose(loss, step(create(), X)[1], rtol=1e-6)


def test_init_for_an_optional_last_argument():
    tx = optax.sgd(0.1)

    def optional(params, opt_state, x, y=None):
        g = jax.grad(lambda p: ((x @ p).sum(1) - y).mean() ** 2)(params)
        updates, opt_state = tx.update(g, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = jnp.ones((16, 64))
    train = lensjax.parallelize(optional, plan="dp")
    made = train.init(lambda: (params, tx.init(params)), batch=(X, X[:, 0]))
    train(*made, X, X[:, 0])


def test_a_batch_that_lacks_a_leaf_names_it():
    def two(p, batch):
        return p - jax.grad(lambda p: ((batch["x"] @ p).sum(1) - batch["y"]).mean() ** 2)(p)

    train = lensjax.parallelize(two, plan="dp")
    p = train(jnp.ones((16, 64)), {"x": X, "y": X[:, 0]})
    with pytest.raises(StateError, match="batch/y is missing"):
        train(p, {"x": X})


def test_a_call_that_failed_leaves_no_notice():
    train = lensjax.parallelize(step, plan="dp")
    state, _ = train(create(), X)
    with pytest.raises(lensjax.BatchError):
        train(state, np.ones((12, 16), np.float32))
    assert not train.notices


def test_two_leaves_of_one_path():
    with pytest.raises(TraceError, match="same path 'p/a/b'"):
        lensjax.parallelize(lambda p, x: p, plan="dp")({"a": {"b": jnp.ones(4)}, "a/b": jnp.ones(4)}, X)


def test_lines_are_named_in_a_folder_called_lensjax(tmp_path):
    folder = tmp_path / "lensjax"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "import numpy as np, jax.numpy as jnp, lensjax\n"
        "def step(p, x):\n"
        "    return p if x.sum() > 0 else -p\n"
        "lensjax.parallelize(step, plan='dp')(jnp.ones((4, 4)), np.ones((8, 4), np.float32))\n"
    )
    root = os.path.dirname(os.path.dirname(lensjax.__file__))
    env = {**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, str(folder / "mine.py")], capture_output=True, text=True, env=env)
    assert "mine.py:3 (return p if x.sum() > 0 else -p)" in done.stderr


def test_off_has_the_face_of_a_step():
    off = lensjax.parallelize(step, plan="off")
    public = {n for n in dir(lensjax.parallelize(step)) if not n.startswith("_")}
    missing = public - set(dir(off)) - {"verify"}
    assert not missing, missing
    assert off.plan is None and off.lower() is None and "off" in off.explain_trace()


def test_complex_constants_and_fft():
    c = np.ones((16, 16), np.complex64) * (1 + 2j)

    def spectral(p, x):
        return p - jax.grad(lambda p: jnp.abs(jnp.fft.fft(x @ p) @ c * (1 + 2j)).mean())(p)

    p = jnp.linspace(0, 1, 256).reshape(16, 16)
    np.testing.assert_allclose(lensjax.parallelize(spectral, plan="fsdp")(p + 0, X), spectral(p, X), rtol=1e-5)


class Slots:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate

    @lensjax.parallelize(plan="dp")
    def step(self, w, x):
        return w - self.rate * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


@dataclasses.dataclass
class Unhashable:
    rate: float

    step = Slots.step


@pytest.mark.parametrize("kind", [Slots, Unhashable])
def test_a_decorated_method_of_an_instance_that_is_no_key(kind):
    x = np.ones((8, 4), np.float32)
    for owner in (kind(0.5), kind(0.25)):
        np.testing.assert_allclose(owner.step(jnp.ones((4, 2)), x), 1 - owner.rate * 4 * np.ones((4, 2)), rtol=1e-5)


def loss_of(p, x):
    return (jnp.tanh(x @ p) ** 2).mean()


@lensjax.parallelize(plan="fsdp")
def module_step(p, x):
    return p - 0.1 * jax.grad(loss_of)(p, x)


def test_a_copy_of_a_step_goes_on_under_its_plan_and_a_name_is_pickled():
    state = module_step(jnp.full((16, 64), 0.1), X)
    held, expected = np.asarray(state), module_step.__wrapped__(np.asarray(state), X)
    deep = copy.deepcopy({"step": module_step, "score": module_step.companion(loss_of), "state": state})
    for other in (copy.copy(module_step), deep["step"]):
        assert other.plan == module_step.plan and other is not module_step
        np.testing.assert_allclose(other(jnp.copy(state), X), expected, rtol=1e-6)
    assert deep["score"]._parent is deep["step"]
    np.testing.assert_allclose(deep["score"](deep["state"], X), loss_of(held, X), rtol=1e-6)
    assert pickle.loads(pickle.dumps(module_step)) is module_step
    assert pickle.loads(pickle.dumps(module_step.plan)) == module_step.plan
    with pytest.raises(pickle.PicklingError, match=r"pickle the undecorated function and step.plan"):
        pickle.dumps(lensjax.parallelize(step, plan="dp"))


def test_a_copy_has_hidden_state_of_its_own():
    first = lensjax.parallelize(step, plan="dp")
    first.extra["residual"] = jnp.ones(3)
    other = copy.deepcopy(first)
    first.extra["residual"].delete()
    assert other.extra["residual"].sum() == 3


def test_calls_do_not_run_far_ahead_of_emulated_devices():
    """XLA:CPU waits for ever where they do; a single device waits for nobody."""

    def slow(p, x):
        h = jax.lax.fori_loop(0, 100, lambda _, h: jnp.tanh(h @ p), x)
        return p - 1e-3 * h.mean(), h.sum()

    x = np.ones((64, 256), np.float32)
    train = lensjax.parallelize(slow, plan="dp=2,fsdp=4")
    state, ready = train.init(lambda: jnp.full((256, 256), 0.01, jnp.float32), batch=x), []
    for _ in range(3 * CALLS):
        state, out = train(state, x)
        ready.append(out.is_ready())
    assert all(ready[CALLS - 1 :: CALLS]) and not all(ready)  # the others return before they have run
    alone = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("dp",))
    assert not ahead(alone).bounded


def test_a_process_that_was_launched_and_does_not_connect_is_told(monkeypatch):
    """Each would train by itself, on its own devices, and nobody would see it."""
    monkeypatch.setenv("LENSJAX_PROCESSES", "2")
    monkeypatch.setenv("LENSJAX_PROCESS", "1")
    made = lensjax.parallelize(lambda w, x: w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w), cluster="cpu:8")
    with pytest.warns(RuntimeWarning, match=r"process 1 of 2 .*lensjax.connect"):
        made(jnp.ones((4, 2)), jnp.ones((8, 4)))
    assert any("runs alone" in note for note in made.notices)
