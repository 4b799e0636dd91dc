"""The parts of the examples: text the same everywhere, devices left alone where asked, a check that can fail."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def example_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_text_is_deterministic_and_the_targets_are_the_next_bytes():
    text = load("text")
    train, valid = text.standard_library(limit=1_000_000)
    again, _ = text.standard_library(limit=1_000_000)
    assert np.array_equal(train, again) and 0.02 < len(valid) / len(train) < 0.5
    a, b = text.windows(train, 4, 32, (0, 7)), text.windows(train, 4, 32, (0, 7))
    assert np.array_equal(a["inputs"], b["inputs"])
    assert np.array_equal(a["inputs"][:, 1:], a["targets"][:, :-1])
    assert not np.array_equal(a["inputs"], text.windows(train, 4, 32, (0, 8))["inputs"])


def test_devices_that_the_environment_names_are_left_alone(monkeypatch):
    machine = load("machine")
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert machine.emulate() is None
    monkeypatch.delenv("JAX_PLATFORMS")
    assert machine.emulate(2, 4) == "cpu:2x4"
    import os

    assert os.environ["JAX_PLATFORMS"] == "cpu" and "device_count=8" in os.environ["XLA_FLAGS"]
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("EXAMPLE_PROCESSES", "2")
    assert machine.emulate(2, 4) == "cpu:2x4"
    assert "device_count=4" in os.environ["XLA_FLAGS"]


def _regression():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def step(state, batch):
        params, opt = state

        def loss_fn(w):
            return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    params = jnp.ones((6, 3))
    kx, ky = jax.random.split(jax.random.key(0))
    batch = {"x": jax.random.normal(kx, (16, 6)), "y": jax.random.normal(ky, (16, 3))}
    return step, (params, tx.init(params)), batch


# One row dropped from the batch; a gradient scaled; nothing wrong.
@pytest.mark.parametrize("fault, passes", [("none", True), ("rows", False), ("scaled", False), ("nan", False)])
def test_the_replay_tells_right_from_wrong(fault, passes):
    replay_class = load("check").Replay
    step, state, batch = _regression()
    replay = replay_class(step)
    for _ in range(3):
        used = jax.tree.map(lambda x: x[:15], batch) if fault == "rows" else batch
        after, metrics = jax.jit(step)(state, used)
        if fault == "scaled":
            mu = optax.tree_utils.tree_get(after[1], "mu")
            after = (after[0], optax.tree_utils.tree_set(after[1], mu=mu * 1.001))
        loss = float("nan") if fault == "nan" else float(metrics["loss"])
        replay.compare(jax.device_get(state), batch, jax.device_get(after), loss)
        state = after
    assert replay.passed is passes
    assert ("NOT equal" in replay.report()) is not passes


def test_the_replay_needs_first_moments():
    replay_class = load("check").Replay

    def step(state, batch):
        return state, {"loss": jnp.sum(batch)}

    with pytest.raises(ValueError, match="first moments"):
        replay_class(step).compare({"w": np.ones(3)}, np.ones(2), {"w": np.ones(3)}, 2.0)


def test_bytes_are_decimal():
    show = load("show")
    assert [show.bytes_text(n) for n in (0, 999, 12_300_000, 4e12)] == ["0 B", "999 B", "12.3 MB", "4 TB"]


def test_a_picture_is_written(tmp_path):
    show = load("show")
    show.picture(tmp_path / "deep" / "loss.png", [3.0, 2.0, 1.5], "title", "nats", 1.7)
    assert (tmp_path / "deep" / "loss.png").read_bytes()[:4] == b"\x89PNG"
