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


@pytest.mark.few(1)
@pytest.mark.parametrize("remat", [False, True])
def test_a_callback_inside_a_loop_is_called_once_for_each_layer(remat):
    seen = []

    def layer(h, w):
        h = jnp.tanh(h @ w)
        jax.debug.callback(lambda v: seen.append((v.shape, round(float(v.sum()), 3))), h)
        return h, None

    def loss(p, x):
        return (jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, p)[0] ** 2).mean()

    step, weights = sgd(loss), jnp.stack([jnp.eye(16) * (1 + i) for i in range(3)])
    train = lensjax.parallelize(step, plan="fsdp")
    found, losses = [], []
    for run in (train, jax.jit(step)):
        losses.append(run(weights, data())[1])
        jax.effects_barrier()
        found.append(sorted(seen))
        seen.clear()
    close(*losses)
    assert found[0] == found[1] and len(found[0]) == (6 if remat else 3) and found[0][0][0] == (16, 16)


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


@pytest.mark.few(1)
@pytest.mark.parametrize(("donate", "ran"), [(True, True), (True, False), (False, True)])
def test_what_is_not_finite_is_found_at_the_users_line(donate, ran):
    """Also where JAX was asked to look only after the first call; the state that led there stays."""
    step = sgd(lambda p, x: jnp.log(x @ p).mean())  # the line
    train = lensjax.parallelize(step, plan="fsdp", donate=donate)
    state, bad = train.init(weight, batch=data()), -abs(data())
    if ran:
        state, _ = train(state, abs(data()))
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="in log") as e:
            train(state, bad)
        state, loss = train(state, abs(data()))
    lines = [entry.statement for entry in e.traceback if "test_ordinary" in str(entry.path)]
    assert "# the line" in str(lines[-1]) and np.isfinite(float(loss))
    assert len(train._ready) == 1  # nothing was compiled again


def test_what_is_infinite_only_under_the_plan_is_said_so():
    def other(p, x):  # finite when it runs operation by operation, as another order of sums may be
        value, grad = jax.value_and_grad(squared)(p, x)
        return p - grad, jnp.where(isinstance(x, jax.core.Tracer), jnp.inf, value)

    train = lensjax.parallelize(other, plan="fsdp")
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="result 1 is not finite under the plan"):
        train(weight(), data())


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


# ---- arrays and meshes from outside ---------------------------------------------------------------------------------


def test_a_batch_that_is_gone_is_called_batch():
    train = lensjax.parallelize(sgd(squared), plan="fsdp")
    state, x = train.init(weight, batch=data()), jnp.asarray(data())
    for _ in range(2):  # before the first call of an executable, and between calls
        x.delete()
        with pytest.raises(StateError, match=r"x is gone: batch that was deleted") as e:
            train(state, x)
        assert e.value.hint.startswith("bring a batch")
        state, _ = train(state, data())


def test_an_array_that_the_step_closes_over_may_be_given_up_afterwards():
    """As under `jax.jit`: a step fixes it at its value. (Its buffer on the first device is not shared.)"""
    scale = jnp.full((16, 64), 2.0)
    step = sgd(lambda p, x: squared(p * scale, x))
    train = lensjax.parallelize(step, plan="fsdp")
    expected = step(weight(), data())
    state, _ = train(weight(), data())
    scale.delete()
    close((state, train(weight(), data())[1]), expected)
    with pytest.raises(StateError, match=r"closes over scale \(float32\[16, 64\]\), which was donated or deleted"):
        train(state, data(32))  # which is traced anew


def test_an_array_of_the_mesh_that_the_step_closes_over_and_another_gives_up_is_named():
    frozen = lensjax.parallelize(sgd(squared), plan="dp").init(weight, batch=data())
    train = lensjax.parallelize(sgd(lambda p, x: squared(p * frozen, x)), plan="dp")
    state, _ = train(weight(), data())
    frozen.delete()
    with pytest.raises(StateError, match=r"closes over \(float32\[16, 64\]\) was donated or deleted after"):
        train(state, data())
    assert not state.is_deleted()


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"a": 2, "b": 4}])
def test_a_mesh_with_explicit_axes_around_the_step_is_refused_and_auto_axes_are_not(shape):
    made = lambda kind: jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(kind,) * len(shape))
    train = lensjax.parallelize(sgd(squared), plan="fsdp")
    explicit = made(jax.sharding.AxisType.Explicit)
    for call in (lambda: train(weight(), data()), lambda: train.init(weight, batch=data())):
        with jax.set_mesh(explicit), pytest.raises(PlanError, match="axes are Explicit") as e:
            call()
        assert "AxisType.Auto" in e.value.hint
    with jax.set_mesh(made(jax.sharding.AxisType.Auto)):
        state, _ = train(train.init(weight, batch=data()), data())
    with jax.set_mesh(explicit), pytest.raises(PlanError, match="axes are Explicit"):
        train(state, data())
    assert not state.is_deleted() and np.isfinite(float(train(state, data())[1]))


# ---- functions that cannot be taken ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_static_or_class_method_is_decorated_inside(kind):
    with pytest.raises(PlanError, match=f"got a {kind.__name__}") as e:
        lensjax.parallelize(plan="fsdp")(kind(sgd(squared)))
    assert f"@{kind.__name__} above @parallelize" in e.value.hint
    with pytest.raises(PlanError, match="got 3 where the step is expected"):
        lensjax.parallelize(plan="fsdp")(3)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: {"w": weight(), "name": "run 1"}, "makes 'run 1' at name, which is not an array"),
        (lambda: jax.eval_shape(weight), r"makes ShapeDtypeStruct\(.* at the top, which is not an array"),
        (lambda: np.asarray(weight()), r"cannot be traced at .*test_ordinary\.py:\d+"),
    ],
    ids=["text", "shape", "numpy"],
)
def test_a_state_that_init_cannot_make_is_told_by_the_users_names(made, said):
    train = lensjax.parallelize(lambda s, x: (jax.tree.map(lambda w: w - 0.1, s), x.sum()), plan="fsdp")
    with pytest.raises(TraceError, match=said) as e:
        train.init(made, batch=data())
    assert "step.py" not in str(e.value) and "create" not in str(e.value)
