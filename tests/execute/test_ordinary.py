"""Ordinary life of a training step: what surrounds it in a real script keeps working, or says why not."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.experimental import io_callback

import lensjax
from lensjax import PlanError, StateError, TraceError
from tests.execute.edges import close, data, sgd, weight


def squared(p, x):
    return ((x @ p) ** 2).mean()


# ---- effects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "effect",
    [
        lambda v: jax.debug.print("{}", v, ordered=True),
        lambda v: io_callback(lambda x: None, None, v, ordered=True),
    ],
    ids=["print", "callback"],
)
def test_ordered_effects_are_refused_by_their_line(effect):
    def step(p, x):
        effect(x.sum())
        return sgd(squared)(p, x)

    p = weight()
    with pytest.raises(TraceError, match=r"effects that must keep their order at .*test_ordinary\.py:\d+"):
        lensjax.parallelize(step, plan="fsdp")(p, data())
    assert not p.is_deleted()


# ---- precision and averages ----------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["fsdp", "dp=2,zero1=4"])
def test_float16_with_dynamic_scale(plan):
    """The scale halves on the overflow, the step is skipped, and it goes on: as on one device."""
    model = nn.Dense(64, dtype=jnp.float16)

    def create():
        params = model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]
        return {"params": params, "scale": DynamicScale(growth_interval=2, scale=jnp.float32(2.0**15))}

    def step(state, x, big):
        def loss(p):
            return (model.apply({"params": p}, x.astype(jnp.float16)).astype(jnp.float32) ** 2).mean() * big

        scale, finite, value, grads = state["scale"].value_and_grad(loss)(state["params"])
        new = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), state["params"], grads)
        return {"params": new, "scale": scale}, (value, finite)

    train = lensjax.parallelize(step, plan=plan)
    mine, theirs, plain = train.init(create, batch=(data(), np.float32(1))), create(), jax.jit(step)
    seen = []
    for big in (1.0, 1.0, 1e9, 1.0):
        mine, (value, finite) = train(mine, data(), np.float32(big))
        theirs, expected = plain(theirs, data(), np.float32(big))
        seen.append(bool(finite))
        assert bool(finite) == bool(expected[1]) and float(mine["scale"].scale) == float(theirs["scale"].scale)
        assert float(value) == pytest.approx(float(expected[0]), rel=2e-2)
    assert seen == [True, True, False, True]


def test_an_average_of_the_parameters_is_split_like_them():
    def create():
        params = {"w": weight()}
        return {"params": params, "ema": jax.tree.map(jnp.copy, params), "ema_step": 0}

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: squared(p["w"], x))(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        decay = jnp.minimum(0.99, (1 + state["ema_step"]) / (10 + state["ema_step"]))
        ema = optax.incremental_update(params, state["ema"], 1 - decay)
        return {"params": params, "ema": ema, "ema_step": state["ema_step"] + 1}, loss

    train = lensjax.parallelize(step, plan="dp=2,fsdp=4")
    state, expected = train.init(create, batch=data()), create()
    for _ in range(3):
        state, _ = train(state, data())
        expected, _ = step(expected, data())
    close(state["ema"], expected["ema"])
    assert state["ema"]["w"].sharding == state["params"]["w"].sharding and "fsdp" in str(
        state["ema"]["w"].sharding.spec
    )


# ---- looking at what runs -------------------------------------------------------------------------------------------


def test_profiler_names_and_source_lines_survive():
    def step(p, x):
        def loss(p):
            with jax.named_scope("encoder"):
                h = jnp.tanh(x @ p["in"])
            with jax.named_scope("decoder"):
                return ((h @ p["out"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(p)
        with jax.named_scope("optimizer"):
            return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    train = lensjax.parallelize(step, plan="fsdp")
    train.plan_for({"in": weight(), "out": jnp.full((64, 16), 0.1)}, data())
    text = train.compiled.as_text()
    names = set(re.findall(r'op_name="([^"]*)"', text))
    for scope in ("encoder", "decoder", "optimizer", "transpose(jvp"):
        assert any(scope in n for n in names), (scope, sorted(names))
    assert re.search(r"jit\(step\)", text) and "test_ordinary.py" in text


# ---- where JAX is there already ------------------------------------------------------------------------------------


def test_in_a_notebook_more_devices_than_there_are_can_be_planned_for_and_the_error_says_how_to_get_them():
    jax.devices()  # as any cell before would have done
    train = lensjax.parallelize(sgd(squared), cluster="cpu:16")
    plan = train.plan_for(weight(), data())
    assert plan.mesh.size == 16
    p = weight()
    with pytest.raises(PlanError, match="JAX sees 8") as e:
        train(p, data())
    assert "--xla_force_host_platform_device_count=16" in e.value.hint and not p.is_deleted()


def test_a_cell_that_is_run_again_plans_again():
    for plan in ("dp", "fsdp"):  # the decorator stands in the cell, and starts anew with it

        @lensjax.parallelize(plan=plan)
        def step(p, x):
            return sgd(squared)(p, x)

        close(step(weight(), data()), sgd(squared)(weight(), data()))
        assert step.plan.name == plan


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [True, False])
def test_a_state_that_was_lost_to_a_failed_step_is_never_used_in_silence(donate):
    """The call gave the old state up, and what came after it failed before the new one had a name."""
    train = lensjax.parallelize(sgd(squared), plan="fsdp", donate=donate)
    state, _ = train(train.init(weight, batch=data()), data())

    def logged(state):
        state, loss = train(state, data())
        raise OSError(f"the log is full at {float(loss):.3f}")

    with pytest.raises(OSError, match="the log is full"):
        state = logged(state)
    if donate:
        with pytest.raises(StateError, match="donated to an earlier call") as e:
            train(state, data())
        assert "donate=False" in e.value.hint
    else:
        assert np.isfinite(float(train(state, data())[1]))
