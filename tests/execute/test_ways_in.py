"""Every shape that a step and its arguments come in: trees, static leaves, keys, captured arrays, an existing jit."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.training.train_state import TrainState

import lensjax


def close(a, b, tolerance=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def data(n=16, width=16):
    x = jax.random.normal(jax.random.key(9), (n, width))
    return np.asarray(x), np.asarray(x.sum(1))


def sgd(params, x, y):
    loss, grads = jax.value_and_grad(lambda p: ((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def params():
    return {"w": jnp.full((16, 64), 0.05), "v": jnp.full((64,), 0.1), "nothing": None}


@pytest.mark.parametrize("plan", ["dp", "fsdp"])
def test_a_plain_dict_of_parameters_with_none_in_it(plan):
    x, y = data()
    expected = sgd(params(), x, y)
    new, loss = lensjax.parallelize(sgd, plan=plan)(params(), x, y)
    assert new["nothing"] is None
    close((new, loss), expected)


def test_a_step_that_returns_gradients_only_keeps_its_parameters():
    x, y = data()
    grad = jax.grad(lambda p, x, y: ((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2).mean())
    step = lensjax.parallelize(grad, plan="fsdp")
    p = params()
    close(step(p, x, y), grad(params(), x, y))
    close(step(p, x, y), grad(params(), x, y))  # nothing was donated
    assert step(p, x, y)["w"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")


def test_a_regularised_gradient_is_not_taken_for_the_next_state():
    x, y = data()
    grad = jax.grad(lambda p, x, y: ((x @ p["w"]).sum(1) - y).mean() + (p["w"] ** 2).sum())
    step = lensjax.parallelize(grad, plan="dp")
    p = {"w": jnp.ones((16, 64))}
    step(p, x, y)
    assert not p["w"].is_deleted()


def test_a_step_already_under_jit_with_static_and_donated_arguments():
    @functools.partial(jax.jit, static_argnums=3, static_argnames="mode", donate_argnums=0)
    def step(p, x, y, power, mode="mean"):
        reduce = jnp.mean if mode == "mean" else jnp.sum
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(lambda p: reduce((x @ p["w"]) ** power))(p))

    x, y = data()
    train = lensjax.parallelize(step, plan="dp")
    close(train(params(), x, y, 2), step.__wrapped__(params(), x, y, 2))
    close(train(params(), x, y, 3), step.__wrapped__(params(), x, y, 3))
    close(train(params(), x, y, 2, mode="sum"), step.__wrapped__(params(), x, y, 2, mode="sum"), 1e-4)


def test_keywords_static_leaves_and_python_scalars():
    def step(p, batch, *, lr, kind):
        assert kind == {"name": "sgd"}
        loss, grads = jax.value_and_grad(lambda p: ((batch["x"] @ p["w"]).sum(1) - batch["y"]).mean() ** 2)(p)
        return jax.tree.map(lambda a, g: a - lr * g, p, grads), loss

    x, y = data()
    train = lensjax.parallelize(step, plan="fsdp")
    p = {"w": jnp.full((16, 64), 0.05)}
    expected = step(p, {"x": x, "y": y}, lr=0.5, kind={"name": "sgd"})
    got = train({"w": jnp.full((16, 64), 0.05)}, {"x": x, "y": y}, lr=0.5, kind={"name": "sgd"})
    close(got, expected)
    close(
        train(got[0], {"x": x, "y": y}, lr=0.25, kind={"name": "sgd"}),
        step(expected[0], {"x": x, "y": y}, lr=0.25, kind={"name": "sgd"}),
    )
    with pytest.raises(AssertionError):
        train(p, {"x": x, "y": y}, lr=0.25, kind={"name": "adam"})


@pytest.mark.few(1)
@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["typed", "raw"])
def test_keys_in_the_state_and_in_the_arguments(key):
    def step(state, x, key):
        noise = jax.random.normal(key, x.shape)
        new_key, sub = jax.random.split(state["key"])
        grads = jax.grad(lambda w: ((x + 0.1 * noise) @ w * jax.random.uniform(sub, (x.shape[0], 64))).mean())(
            state["w"]
        )
        return {"key": new_key, "w": state["w"] - grads}

    x, _ = data()
    state = {"key": key, "w": jnp.ones((16, 64))}
    expected = step(state, x, key)
    got = lensjax.parallelize(step, plan="fsdp")({"key": jnp.copy(key), "w": jnp.ones((16, 64))}, x, key)
    np.testing.assert_array_equal(jax.random.key_data(got["key"]), jax.random.key_data(expected["key"]))
    close(got["w"], expected["w"])


def test_static_fields_and_captured_arrays():
    @struct.dataclass
    class State:
        w: jax.Array
        name: str = struct.field(pytree_node=False)
        scale: float = struct.field(pytree_node=False)

    table = jnp.linspace(0, 1, 64 * 64).reshape(64, 64)  # closed over: an argument of the program

    def step(state, x):
        grads = jax.grad(lambda w: ((x @ w @ table) * state.scale).mean())(state.w)
        return state.replace(w=state.w - grads)

    x, _ = data()
    make = lambda: State(jnp.ones((16, 64)), "a", 2.0)
    train = lensjax.parallelize(step, plan="fsdp")
    close(train(make(), x), step(make(), x))
    assert "64.0 KiB" not in train.explain_trace() and "16.00 KiB) that the step closes over" in train.explain_trace()
    assert [a.role for a in train.program.arguments] == ["parameter", "batch", "constant"]


def test_a_linen_train_state_whose_step_counter_is_a_python_int():
    model = nn.Dense(64)

    def create():
        return TrainState.create(
            apply_fn=model.apply, params=model.init(jax.random.key(0), jnp.ones((1, 16))), tx=optax.adam(1e-2)
        )

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: (state.apply_fn(p, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    x, _ = data()
    train = lensjax.parallelize(step, plan="fsdp")
    state, losses = create(), []
    for _ in range(3):
        state, loss = train(state, x)
        losses.append(float(loss))
    plain, expected = create(), []
    for _ in range(3):
        plain, loss = jax.jit(step)(plain, x)
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert int(state.step) == 3 and len(train._ready) == 1


def test_a_state_that_holds_one_array_twice_can_be_donated():
    def step(state, x):
        grads = jax.grad(lambda w: (x @ w).mean())(state["w"])
        new = state["w"] - grads
        return {"w": new, "average": 0.9 * state["average"] + 0.1 * new}

    x, _ = data()
    w = jnp.ones((16, 64))
    train = lensjax.parallelize(step, plan="dp")
    close(
        train({"w": w, "average": w}, x),
        step({"w": np.ones((16, 64), np.float32), "average": np.ones((16, 64), np.float32)}, x),
    )


def test_another_batch_size_uses_the_plan_again_and_says_so():
    train = lensjax.parallelize(sgd, plan="fsdp")
    p, _ = train(params(), *data(16))
    close(train(jax.tree.map(jnp.copy, p), *data(32)), sgd(jax.device_get(p), *data(32)), 1e-5)
    assert any("the batch is 32" in n for n in train.notices)
    assert "the batch is 32" in train.explain()
    train(params(), *data(16))
    assert len(train._ready) == 2  # the first executable was found again


def test_arguments_on_another_device_or_sharding_are_placed():
    train = lensjax.parallelize(sgd, plan="fsdp")
    x, y = data()
    first = train(params(), x, y)
    committed = jax.tree.map(lambda a: jax.device_put(np.asarray(a), jax.devices()[3]), (params(), x, y))
    close(train(*committed), first)


def test_off(monkeypatch):
    x, y = data()
    off = lensjax.parallelize(sgd, plan="off")
    close(off(params(), x, y), sgd(params(), x, y))
    assert off.init(params, batch=(x, y))["nothing"] is None
    monkeypatch.setenv("LENSJAX_OFF", "1")
    assert lensjax.parallelize(sgd).plan is None


def test_init_reads_several_state_and_batch_arguments():
    tx = optax.adam(1e-2)

    def step(params, opt_state, x, y):
        grads = jax.grad(lambda p: ((x @ p["w"]).sum(1) - y).mean() ** 2)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    def create(scale):
        p = {"w": jnp.full((16, 64), 0.05) * scale}
        return p, tx.init(p)

    train = lensjax.parallelize(step, plan="fsdp")
    p, opt = train.init(create, 1.0, batch=data())
    assert p["w"].sharding.spec == opt[0].mu["w"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")
    close(train(p, opt, *data()), step(*create(1.0), *data()), 1e-5)
    shapes = train.abstract_state
    assert shapes[0]["w"].sharding == p["w"].sharding and shapes[1][0].mu["w"].sharding == p["w"].sharding


@jax.tree_util.register_pytree_with_keys_class
class Strict:
    """Weights whose class looks at what it is given, as people's own classes do."""

    def __init__(self, w, v):
        assert w.shape[0] == 16 and v.dtype == jnp.float32, "weights must be arrays"
        self.w, self.v = w, v

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(k), getattr(self, k)) for k in ("w", "v")], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.mark.parametrize("plan", ["fsdp", "dp"])
def test_a_class_of_the_users_that_takes_arrays_only(plan):
    def step(params, x, y):
        return sgd({"w": params.w, "v": params.v}, x, y)

    def keep(params, x, y):
        new, loss = step(params, x, y)
        return Strict(new["w"], new["v"]), loss

    create = lambda: Strict(params()["w"], params()["v"])
    run = lensjax.parallelize(keep, plan=plan, cluster="cpu:8")
    state = run.init(create, batch=data())
    expected = create()
    for _ in range(2):
        state, loss = run(state, *data())
        expected, wanted = jax.jit(keep)(expected, *data())
    close((state, loss), (expected, wanted))
    assert type(state) is Strict
    assert run.export("python")
