"""Steps as people write them: gradients by hand, several of them, frozen parameters, collections, inner jits, and a
batch that is told because it cannot be found."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lensjax
from lensjax.program.batch import dims_by_rules
from lensjax.program.program import analyze
from lensjax.program.trace import trace
from tests.execute.edges import close, data, same, sgd, weight
from tests.zoo import FAMILIES


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["fsdp", "dp=2,zero1=4"])
def test_two_networks_against_each_other_with_vjp_by_hand(plan):
    def step(nets, x):
        make = lambda g: jnp.tanh(x @ g)
        judge = lambda d, fake: (jax.nn.sigmoid(fake @ d) - 0.5).mean()
        fake, pull = jax.vjp(make, nets["generator"])
        for_judge, for_fake = jax.grad(judge, argnums=(0, 1))(nets["judge"], fake)
        other = jax.grad(lambda g: -judge(nets["judge"], make(g)))(nets["generator"])
        generator = nets["generator"] - 0.1 * (pull(for_fake)[0] + other)
        return {"generator": generator, "judge": nets["judge"] + 0.1 * for_judge}

    nets = lambda: {"generator": weight(), "judge": jnp.full((64, 16), 0.03)}
    train = lensjax.parallelize(step, plan=plan)
    close(train(nets(), data()), step(nets(), data()))
    assert [a.role for a in train.program.arguments] == ["parameter", "parameter", "batch"]


def test_frozen_parameters():
    tx = optax.multi_transform(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, {"base": "freeze", "head": "train"}
    )

    def step(params, opt_state, x):
        loss, grads = jax.value_and_grad(lambda p: ((jnp.tanh(x @ p["base"]) @ p["head"]) ** 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = lambda: {"base": weight(), "head": jnp.full((64, 16), 0.05)}
    train = lensjax.parallelize(step, plan="fsdp")
    new, opt_state, _ = train(params(), tx.init(params()), data())
    close(new, step(params(), tx.init(params()), data())[0])
    close(new["base"], weight(), 0)
    assert new["base"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")
    train(new, opt_state, data())


def test_mutable_collections_beside_the_parameters():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
            count.value += 1
            return nn.Dense(8)(nn.BatchNorm(use_running_average=False)(nn.Dense(64)(x)))

    model = Net()

    def step(variables, x):
        params, rest = variables["params"], {k: v for k, v in variables.items() if k != "params"}

        def loss(p):
            out, changed = model.apply({"params": p, **rest}, x, mutable=["batch_stats", "counts"])
            return (out**2).mean(), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), **changed}, value

    variables = model.init(jax.random.key(0), data())
    train = lensjax.parallelize(step, plan="fsdp")
    close(train(variables, data()), step(model.init(jax.random.key(0), data()), data()))
    roles = {a.path: a.role for a in train.program.arguments}
    assert roles["variables/counts/calls"] == "other" and roles["variables/batch_stats/BatchNorm_0/mean"] == "other"


def test_a_jitted_loss_and_a_donating_jit_inside():
    loss = jax.jit(lambda p, x, power: ((x @ p) ** power).mean(), static_argnums=2)
    update = jax.jit(lambda p, g: p - 0.1 * g, donate_argnums=0)

    def step(p, x):
        value, grad = jax.value_and_grad(loss)(p, x, 2)
        return update(p, grad), value

    same(step, reference=sgd(lambda p, x: ((x @ p) ** 2).mean()))


def test_a_told_batch_that_fits_one_size_only_is_followed_by_the_partitioners_rules():
    def step(p, x):
        assert x.shape == (16, 16), "made for sixteen"
        loss, grads = jax.value_and_grad(lambda p: ((jnp.tanh(x @ p["in"]) @ p["out"]) ** 2).mean())(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), loss

    params = lambda: {"in": weight(), "out": jnp.full((64, 16), 0.1)}
    train = lensjax.parallelize(step, plan="fsdp", batch_argnums=1)
    close(train(params(), data()), step(params(), data()))
    assert [a.role for a in train.program.arguments] == ["parameter", "parameter", "batch"]
    assert "made for sixteen; the partitioner's rules follow it" in " ".join(train.explain_trace().split())
    assert "all-gather" in train.compiled.as_text()  # weights are gathered, so the batch stays split


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["mlp", "cnn_batchnorm", "gpt_scan_remat_dropout", "lstm_scan", "control_flow"])
def test_rules_and_two_traces_agree_on_the_batch(family):
    made = FAMILIES[family].make()
    args = jax.eval_shape(made.init, jax.random.key(0)), jax.eval_shape(made.batch, jax.random.key(1))
    program = analyze(made.step, args)
    traced = trace(made.step, args)
    found = dims_by_rules(traced, program.batch.axes)
    assert sorted(found.values()) == sorted(program.batch.dims.values()) and found


def test_gradients_of_two_losses_and_a_penalty_on_them():
    def step(p, x):
        first = jax.grad(lambda p: jnp.sin(x @ p).mean())(p)
        second = jax.grad(lambda p: (jax.grad(lambda q: ((x @ q) ** 2).mean())(p) ** 2).sum())(p)
        return p - 0.1 * first - 0.01 * second

    same(step, "dp=2,fsdp=4")


def test_numpy_state_is_taken():
    step = sgd(lambda p, x: ((x @ p) ** 2).mean())
    close(lensjax.parallelize(step, plan="fsdp")(np.asarray(weight()), data()), step(weight(), data()))
