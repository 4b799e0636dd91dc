"""Other functions of the step's state: same numbers, the state left where it lies, batches of any size."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lensjax
from lensjax import BatchError, PlanError, StateError, TraceError
from tests.execute.edges import close, data
from tests.zoo import FAMILIES

TX = optax.adam(1e-2)


def create():
    params = {"in": jnp.full((16, 64), 0.05, jnp.float32), "out": jnp.full((64, 16), 0.1, jnp.float32)}
    return {"params": params, "opt": TX.init(params), "ema": jax.tree.map(jnp.copy, params)}


def predict(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def train_step(state, x):
    loss, grads = jax.value_and_grad(lambda p: (predict(p, x) ** 2).mean())(state["params"])
    updates, opt = TX.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["ema"], params)
    return {"params": params, "opt": opt, "ema": ema}, loss


def evaluate(state, x, weight=1.0):
    out = predict(state["params"], x)
    return {"loss": weight * (out**2).mean(), "each": out}


def trained(plan):
    step = lensjax.parallelize(train_step, plan=plan)
    state, _ = step(step.init(create, batch=data()), data())
    return step, state


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["dp=2,fsdp=4", "dp=2,tp=4"])
def test_evaluation_on_batches_of_any_size(plan):
    step, state = trained(plan)
    judge = step.companion(evaluate)
    before = {k: v.sharding for k, v in state["params"].items()}
    for n in (16, 12, 1):  # over all devices, over some of them, over none
        close(judge(state, data(n)), evaluate(jax.device_get(state), data(n)))
    assert {k: v.sharding for k, v in state["params"].items()} == before
    assert len(judge._ready) == 3 and not any(x.is_deleted() for x in jax.tree.leaves(state))
    specs = {a.path: s for a, s in zip(judge.program.arguments, judge._run.emitted.arguments)}
    assert specs["state/params/in"].is_equivalent_to(before["in"], 2)
    step(state, data())  # the step goes on with the same state


def test_a_companion_of_a_part_of_the_state_under_its_own_names():
    step, state = trained("fsdp")
    logits = step.companion(lambda weights, images: predict(weights, images))
    close(logits(state["ema"], data(24)), predict(jax.device_get(state["ema"]), data(24)))
    assert {a.path: a.role for a in logits.program.arguments} == {
        "weights/in": "parameter", "weights/out": "parameter", "images": "batch",
    }  # fmt: skip
    assert "all-gather" in logits.compiled.as_text()  # the weights were split and stay so


@pytest.mark.slow
def test_generation_with_a_key_and_without_a_batch():
    step, state = trained("fsdp")

    def generate(params, start, key):
        def one(x, k):
            x = jnp.tanh(predict(params, x)) + 0.1 * jax.random.normal(k, x.shape)
            return x, x

        return jax.lax.scan(one, start, jax.random.split(key, 5))[1]

    run = step.companion(generate)
    start, key = data(1)[0], jax.random.key(5)
    close(run(state["params"], start, key), generate(jax.device_get(state["params"]), start, key))
    many = step.companion(jax.vmap(generate, (None, 0, 0)))
    keys = jax.random.split(key, 8)
    close(
        many(state["params"], data(8), keys),
        jax.vmap(generate, (None, 0, 0))(jax.device_get(state["params"]), data(8), keys),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["fsdp", "dp=2,zero1=4"])
def test_two_players_on_one_state(plan):
    def fake(nets, z):
        return jnp.tanh(z @ nets["generator"])

    def play(nets, z):
        grads = jax.grad(lambda g: -((fake({**nets, "generator": g}, z) @ nets["judge"]) ** 2).mean())(
            nets["generator"]
        )
        return {**nets, "generator": nets["generator"] - 0.1 * grads}

    def judge(nets, z, x):
        loss = lambda d: ((fake(nets, z) @ d) ** 2).mean() - ((x @ d) ** 2).mean()
        return {**nets, "judge": nets["judge"] - 0.1 * jax.grad(loss)(nets["judge"])}

    make = lambda: {"generator": jnp.full((16, 64), 0.05, jnp.float32), "judge": jnp.full((64, 16), 0.03, jnp.float32)}
    x = np.tile(data(), (1, 4))
    first = lensjax.parallelize(play, plan=plan)
    second = first.companion(judge)
    nets = first.init(make, batch=data())
    plain = make()
    for _ in range(2):
        nets, plain = first(nets, data()), play(plain, data())
        nets, plain = second(nets, data(), x), judge(plain, data(), x)
    close(nets, plain)
    assert len(first._ready) == len(second._ready) == 1  # neither moved the state


@pytest.mark.slow
def test_modules():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.down(self.drop(nnx.tanh(self.up(x))))

    def make():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def test(model, x):
        model.eval()
        return (model(x) ** 2).mean()

    train = lensjax.parallelize(step, plan="fsdp")
    model, optimizer = train.init(make, batch=data())
    train(model, optimizer, data())
    judge = train.companion(test)
    w = jax.device_get((model.up.kernel[...], model.up.bias[...], model.down.kernel[...], model.down.bias[...]))
    for n in (16, 5):
        out = np.tanh(data(n) @ w[0] + w[1]) @ w[2] + w[3]
        assert float(judge(model, data(n))) == pytest.approx(float((out**2).mean()), rel=1e-5)
    model.train()
    train(model, optimizer, data())


def test_what_cannot_be_meant():
    early = lensjax.parallelize(train_step, plan="fsdp")
    with pytest.raises(PlanError, match="there is no plan yet"):
        early.companion(evaluate)(create(), data())
    step, state = trained("fsdp")
    with pytest.raises(PlanError, match="a companion has no state of its own"):
        step.companion(evaluate).init(create)
    two = step.companion(lambda params, x, y: predict(params, x).mean() + (y**2).mean())
    with pytest.raises(BatchError, match="more than one group"):
        two(state["params"], data(16), np.ones((24, 3), np.float32))
    told = step.companion(lambda params, x, y: predict(params, x).mean() + (y**2).mean(), batch_argnums=1)
    assert np.isfinite(float(told(state["params"], data(16), np.ones((24, 3), np.float32))))
    step(state, data())
    with pytest.raises(StateError, match="donated to an earlier call"):
        step.companion(evaluate)(state, data())


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda f, s, x: f(), "evaluate.* does not take this call: missing a required argument: 'state'"),
        (lambda f, s, x: f(s), "missing a required argument: 'x'"),
        (lambda f, s, x: f(s, x, scale=2.0), "unexpected keyword argument 'scale'"),
        (lambda f, s, x: f(x, s), r"x is not there as one array, in the step it is float32\[16, 16\]"),
        (lambda f, s, x: f(s, None), "x is not there as one array"),
        (lambda f, s, x: f(s, x.tolist()), "x is not there as one array"),
        (lambda f, s, x: f(s, "hello"), "x is a str, no array"),
        (lambda f, s, x: f(s, x[:, :3]), r"x is float32\[16, 3\], in the step float32\[16, 16\]"),
        (lambda f, s, x: f({"params": {"in": s["params"]["in"]}}, x), "state/ema/in and 7 more of the step's state"),
        (lambda f, s, x: f({"other": jnp.ones(5)}, x), "no argument is of the step's state"),
        (lambda f, s, x: f(s, jax.ShapeDtypeStruct(x.shape, x.dtype)), "x is a ShapeDtypeStruct: there is nothing"),
    ],
)
def test_a_call_that_does_not_fit_says_in_what_it_differs_from_the_steps(companion, call, words):
    judge, state = companion
    with pytest.raises((TraceError, StateError)) as e:
        call(judge, state, data())
    assert re.search(words, str(e.value)), str(e.value)


@pytest.fixture(scope="module", params=["first", "later"])
def companion(request):
    step, state = trained("fsdp")
    judge = step.companion(evaluate)
    if request.param == "later":
        judge(state, data())
    return judge, state


def test_the_functions_own_errors_are_its_own():
    step, state = trained("fsdp")

    def broken(state, x):
        return {}["loss"]

    with pytest.raises(KeyError, match="loss"):
        step.companion(broken)(state, data())


def test_batches_of_other_types_and_by_keyword():
    step, state = trained("fsdp")

    def named(state, *, x):
        return evaluate(state, x)

    judge = step.companion(named)
    whole = jax.device_get(state)
    for x in (data(), np.ones((16, 16), np.int32), data()[0]):
        close(judge(state, x=x), evaluate(whole, x))
    with pytest.raises(TraceError, match=r"named\(state, \*, x\) does not take this call: missing .*'x'"):
        judge(state)


def test_off():
    step = lensjax.parallelize(train_step, plan="off")
    close(step.companion(evaluate)(create(), data()), evaluate(create(), data()))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dlrm", "lstm_scan", "vit"])
def test_the_loss_of_a_family(family):
    made = FAMILIES[family].make()
    batch = made.batch(jax.random.key(1))
    step = lensjax.parallelize(made.step, plan="dp=2,fsdp=4", **FAMILIES[family].options)
    state, _ = step(step.init(made.init, jax.random.key(0), batch=batch), batch)
    loss = lambda state, batch: made.step(state, batch)[1]["loss"]
    judge = step.companion(loss)
    for n in (None, 3):
        part = jax.tree.map(lambda x, n=n: x[:n], batch)
        assert float(judge(state, part)) == pytest.approx(float(loss(jax.device_get(state), part)), rel=1e-5)


def test_a_companion_of_a_state_that_was_given_up_says_so_and_the_process_lives():
    step, state = trained("fsdp")
    score = step.companion(evaluate)
    score(state, data())
    step(state, data())
    with pytest.raises(StateError, match="donated to an earlier call"):
        score(state, data())


def test_what_a_companion_has_not_is_its_steps():
    step, state = trained("fsdp")
    score = step.companion(evaluate)
    for call in (lambda: score.abstract_state, lambda: score.save("x", state, 1), lambda: score.restore("x")):
        with pytest.raises(PlanError, match="a companion has no state of its own"):
            call()
    total = score.companion(lambda params: params["in"].sum())(state["params"])
    assert float(total) == pytest.approx(float(state["params"]["in"].sum()))
    for plan in ("dp", "off"):
        with pytest.raises(PlanError, match="companion got 3 where a function"):
            lensjax.parallelize(train_step, plan=plan).companion(3)


def test_an_evaluation_that_hands_on_a_weight_gives_nothing_up():
    step, state = trained("fsdp")
    seen = step.companion(lambda params, x: {"kernel": params["in"], "loss": (predict(params, x) ** 2).mean()})
    seen(state["params"], data(8))
    through = step.companion(lambda state, x: (state, predict(state["params"], x)))
    through(state, data(8))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    assert np.isfinite(float(step(state, data())[1]))
