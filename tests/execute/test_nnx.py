"""Flax NNX: steps that update their modules in place, split steps, and what a step may not do to a module."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lensjax
from lensjax import StateError, TraceError
from tests.same_numbers import compare
from tests.zoo import FAMILIES

NNX = [name for name in FAMILIES if name.startswith("nnx_")]
PLANS = ["dp", "fsdp", "dp=2,zero1=4", "zero1=2,fsdp:once=4", "dp=2,fsdp=4", "fsdp:once", "dp=4,fsdp=2", "zero1"]
FAST = ("nnx_mlp_split", "nnx_two_tower", "nnx_lora", "nnx_cnn_batchnorm")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NNX])
def test_each_family_with_one_preset(name):
    compare(name, PLANS[NNX.index(name) % len(PLANS)])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,fsdp=4", "zero1", "fsdp:once"])
@pytest.mark.parametrize("name", NNX)
def test_every_family_under_several_presets(name, plan):
    compare(name, plan, steps=1)


class Net(nnx.Module):
    def __init__(self, rngs, width=64):
        self.hidden = nnx.Linear(16, width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(width, 16, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.hidden(x))))


def create(seed=0, make=nnx.Optimizer):
    model = Net(nnx.Rngs(seed))
    return model, make(model, optax.adam(1e-2), wrt=nnx.Param)


def loss_fn(model, x):
    return ((model(x) - x) ** 2).mean()


def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def data(n=16):
    return np.asarray(jax.random.normal(jax.random.key(9), (n, 16)))


def values(*modules):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(modules, nnx.Not(nnx.RngKey)))]


def close(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def test_the_users_own_objects_are_updated_and_counters_are_state():
    mine, expected = create(), create()
    hidden, kernel = mine[0].hidden, mine[0].hidden.kernel
    train, plain = lensjax.parallelize(step, plan="fsdp"), nnx.jit(step)
    for _ in range(3):  # dropout: every step draws other numbers
        close(train(*mine, data()), plain(*expected, data()))
        assert mine[0].drop.rngs.count[...] == expected[0].drop.rngs.count[...]
    close(nnx.state(mine[0], nnx.Param), nnx.state(expected[0], nnx.Param), 1e-4)
    assert mine[0].hidden is hidden and hidden.kernel is kernel and int(mine[1].step[...]) == 3
    assert kernel[...].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")
    assert len(train._ready) == 1


def test_the_model_inside_its_optimizer_is_one_state():
    def inside(optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, x)
        optimizer.update(grads)
        return loss

    def beside(model, optimizer, x):
        return inside(optimizer, x)

    (model, optimizer), (_, other) = create(make=nnx.ModelAndOptimizer), create(make=nnx.ModelAndOptimizer)
    train = lensjax.parallelize(beside, plan="fsdp")
    train(model, optimizer, data())
    nnx.jit(inside)(other, data())
    close(values(optimizer), values(other))
    assert optimizer.model is model
    paths = [a.path for a in train.program.arguments]
    assert "model/hidden/kernel" in paths and not any(p.startswith("optimizer/model") for p in paths)
    assert len(paths) == len(jax.tree.leaves(nnx.state(other))) + 1


def test_tied_weights_are_one_leaf():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 16, rngs=rngs)
            self.second = self.first

        def __call__(self, x):
            return self.second(nnx.tanh(self.first(x)))

    def sgd(model, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    mine, expected = Tied(nnx.Rngs(0)), Tied(nnx.Rngs(0))
    train = lensjax.parallelize(sgd, plan="dp")
    close(train(mine, data()), nnx.jit(sgd)(expected, data()))
    close(values(mine), values(expected))
    assert mine.first is mine.second and len(train.program.arguments) == 3


def test_init_makes_modules_whose_arrays_are_sharded_from_birth():
    train = lensjax.parallelize(step, plan="fsdp")
    model, optimizer = train.init(create, 0, batch=jax.ShapeDtypeStruct((16, 16), jnp.float32))
    assert isinstance(model, Net) and isinstance(optimizer, nnx.Optimizer)
    close(values(model), values(create()[0]))
    spec = jax.sharding.PartitionSpec(None, "fsdp")
    kernels = model.hidden.kernel, optimizer.opt_state[0].mu.hidden.kernel
    assert [k[...].sharding.spec for k in kernels] == [spec, spec]
    kernel = kernels[0][...]
    train(model, optimizer, data())
    assert kernel.is_deleted() and not model.hidden.kernel[...].is_deleted()  # its buffers were given up
    assert len(train._ready) == 1


def test_shapes_of_modules_are_enough_to_plan_and_come_back_as_modules():
    train = lensjax.parallelize(step, plan="fsdp", cluster="cpu:8")
    train.plan_for(*nnx.eval_shape(create), jax.ShapeDtypeStruct((16, 16), jnp.float32))
    model, optimizer = train.abstract_state
    assert isinstance(model, Net) and isinstance(optimizer, nnx.Optimizer)
    kernel = model.hidden.kernel.get_raw_value()
    assert kernel.shape == (16, 64) and kernel.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")


@pytest.mark.slow
def test_under_nnx_jit_with_static_and_donated_arguments():
    def powered(model, optimizer, x, power, mode="mean"):
        reduce = jnp.mean if mode == "mean" else jnp.sum
        loss, grads = nnx.value_and_grad(lambda m: reduce(jnp.abs(m(x) - x) ** power))(model)
        optimizer.update(model, grads)
        return loss

    jitted = nnx.jit(powered, static_argnums=3, static_argnames="mode", donate_argnums=(0, 1))
    mine, expected = create(), create()
    train = lensjax.parallelize(jitted, plan="dp")
    for arguments, keywords in (((2,), {}), ((3,), {}), ((2,), {"mode": "sum"})):
        one, other = train(*mine, data(), *arguments, **keywords), powered(*expected, data(), *arguments, **keywords)
        close(one, other, 1e-4)
    assert len(train._ready) == 3


def test_a_stream_of_keys_is_an_argument_of_its_own():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 64, rngs=rngs)

        def __call__(self, x, rngs):
            return self.linear(x + jax.random.normal(rngs.noise(), x.shape))

    def noisy(model, rngs, x):
        loss, grads = nnx.value_and_grad(lambda m, r: (m(x, r) ** 2).mean())(model, rngs)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    make = lambda: (Noisy(nnx.Rngs(0)), nnx.Rngs(noise=5))
    mine, expected = make(), make()
    train = lensjax.parallelize(noisy, plan="dp=2,fsdp=4")
    for _ in range(2):
        close(train(*mine, data()), nnx.jit(noisy)(*expected, data()))
    assert int(mine[1].noise.count[...]) == 2
    assert {a.path: a.role for a in train.program.arguments}["rngs/noise/key"] == "key"


def test_containers_keywords_and_metrics():
    def measured(parts, x, *, metrics):
        loss = step(parts["model"], parts["optimizer"], x)
        metrics.update(loss=loss)
        return {"loss": loss}

    def run(call):
        model, optimizer = create()
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
        for _ in range(2):
            call({"model": model, "optimizer": optimizer}, data(), metrics=metrics)
        return float(metrics.compute()["loss"])

    train = lensjax.parallelize(measured, plan="fsdp")
    assert run(train) == pytest.approx(run(measured), rel=1e-5)
    assert "parts/model/hidden/kernel" in [a.path for a in train.program.arguments]


def test_static_attributes_that_the_step_sets_come_back():
    def mode(model, optimizer, x):
        model.train()
        loss = step(model, optimizer, x)
        model.eval()
        return loss

    mine, expected = create(), create()
    assert not mine[0].drop.deterministic
    train = lensjax.parallelize(mode, plan="dp")
    for _ in range(2):
        close(train(*mine, data()), nnx.jit(mode)(*expected, data()))
    assert mine[0].drop.deterministic
    assert any("static" in n for n in train.notices)
    close(values(*mine), values(*expected), 1e-4)


def test_bare_arrays_in_a_module_are_values_too():
    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 64, rngs=rngs)
            self.scale = jnp.ones(64)
            self.pair = nnx.data((jnp.ones(64), jnp.zeros(64)))

        def __call__(self, x):
            self.scale = self.scale * 0.5
            self.pair = (self.pair[0], self.pair[1] + 1)
            return self.linear(x) * self.scale + self.pair[1]

    def grads(model, x):
        model(x)
        return nnx.grad(lambda m: (m.linear(x) ** 2).mean())(model)

    mine, expected = Scaled(nnx.Rngs(0)), Scaled(nnx.Rngs(0))
    train = lensjax.parallelize(grads, plan="dp")
    for _ in range(2):
        close(train(mine, data()), nnx.jit(grads)(expected, data()))
    close((mine.scale, mine.pair), (jnp.full(64, 0.25), (jnp.ones(64), jnp.full(64, 2.0))))


def test_a_module_that_is_returned_is_the_users_own():
    def both(model, optimizer, x):
        return model, step(model, optimizer, x), {"again": optimizer}

    model, optimizer = create()
    one, _, other = lensjax.parallelize(both, plan="dp")(model, optimizer, data())
    assert one is model and other["again"] is optimizer


def test_donate_false_keeps_the_old_arrays():
    train = lensjax.parallelize(step, plan="fsdp", donate=False)
    model, optimizer = train.init(create, batch=data())
    kernel = model.hidden.kernel[...]
    train(model, optimizer, data())
    assert not kernel.is_deleted() and kernel is not model.hidden.kernel[...]


# ---- what fails leaves the modules as they were ------------------------------------------------------------------


def add(model):
    model.more = nnx.Param(jnp.ones(3))


def remove(model):
    del model.out


def reshape(model):
    model.out.bias.set_value(jnp.ones(3))


def sow(model):
    model.sow(nnx.Intermediate, "seen", jnp.ones(3))


def share(model):
    model.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def replace(model):
    model.hidden = nnx.LinearGeneral(16, 64, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "change, message",
    [
        (add, "adds model/more"),
        (remove, "removes model/out/bias"),
        (reshape, r"makes model/out/bias, which was float32\[16\], float32\[3\]"),
        (sow, "adds model/seen"),
        (replace, "puts its modules together in another way"),
    ],
)
def test_a_changed_structure_is_named_and_nothing_is_touched(change, message):
    def changing(model, optimizer, x):
        loss = step(model, optimizer, x)
        change(model)
        return loss

    model, optimizer = create()
    before, hidden = values(model, optimizer), model.hidden
    with pytest.raises(StateError, match=message):
        lensjax.parallelize(changing, plan="dp")(model, optimizer, data())
    close(before, values(model, optimizer), 0)
    assert model.hidden is hidden and not hasattr(model, "more")


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, jax.errors.JaxRuntimeError])
def test_a_failed_compile_leaves_the_modules(monkeypatch, error):
    train = lensjax.parallelize(step, plan="fsdp")
    model, optimizer = train.init(create, batch=data())
    before = values(model, optimizer)

    def fail(*_, **__):
        raise error("stop")

    with monkeypatch.context() as m:
        m.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises((KeyboardInterrupt, lensjax.CompileError)):
            train(model, optimizer, data())
    close(before, values(model, optimizer), 0)
    assert np.isfinite(train(model, optimizer, data()))


def test_a_module_that_the_step_closes_over_cannot_be_updated():
    model, optimizer = create()
    with pytest.raises(TraceError, match="updates an NNX module that is not among its arguments"):
        lensjax.parallelize(lambda x: step(model, optimizer, x), plan="dp")(data())


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_experimental_variables_are_refused(kind):
    with nnx.var_defaults(**{kind: True}):
        model, optimizer = create()
    with pytest.raises(TraceError, match=rf"the variable .* is made with {kind}=True"):
        lensjax.parallelize(step, plan="dp")(model, optimizer, data())


def test_flax_is_not_imported_for_other_steps():
    code = (
        "import sys, jax.numpy as jnp, numpy as np, jax, lensjax\n"
        "step = lensjax.parallelize(lambda p, x: p - jax.grad(lambda p: (x @ p).mean())(p), plan='dp', cluster='cpu:8')"
        "\nstep(jnp.ones((16, 64)), np.ones((8, 16), np.float32)); assert 'flax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
