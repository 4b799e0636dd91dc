"""Micro-batches of a given size, as many as a batch has: compiled once, the numbers of one device for every count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lensjax
from lensjax.passes.lift import lift
from lensjax.plan.plan import Axis, MeshPlan, Micro, Plan, Reduce, Rules
from lensjax.program.edit import all_equations, is_var
from lensjax.program.program import analyze
from tests.same_numbers import difference
from tests.split import test_codes as codes
from tests.split.harness import numbers
from tests.zoo import FAMILIES

SHARE = 16
COUNTS = (1, 3, 4, 16)
SIZES = [SHARE * n for n in COUNTS]


def plan() -> Plan:
    return Plan(
        MeshPlan((Axis("data", 8),)),
        rules=Rules(activations={"batch": ("data",)}),
        micro=Micro(share=SHARE),
    )


def values(seed: int, **shapes):
    r = np.random.RandomState(seed)
    return {k: jnp.asarray(r.randn(*s) * 0.3) for k, s in shapes.items()}


def params():
    return values(0, first=(16, 32), layers=(2, 32, 32), last=(32, 8))


def batch(n: int):
    b = values(n, x=(n, 16), y=(n, 8))
    return b | {"valid": jnp.asarray(np.random.RandomState(n).rand(n, 8) < 0.7)}


def model(params, x, key=None):
    h = x @ params["first"]
    if key is not None:
        h = h * jax.random.bernoulli(key, 0.8, h.shape)
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])
    return h @ params["last"]


def mean(params, batch, key):
    error = (model(params, batch["x"]) - batch["y"]) ** 2
    return error.mean(), error.sum(-1)


def weighted(params, batch, key):
    error = (model(params, batch["x"]) - batch["y"]) ** 2
    return (error * batch["valid"]).sum() / batch["valid"].sum(), error.sum(-1)


def dropped(params, batch, key):
    error = (model(params, batch["x"], key) - batch["y"]) ** 2
    return error.mean(), error.sum(-1)


def balanced(params, batch, key):
    """Needs the batch's mean before its own gradient: two passes."""
    out = model(params, batch["x"])
    share = jax.nn.softmax(batch["x"] @ params["first"]).mean(0)
    return ((out - batch["y"]) ** 2).mean() + (share**2).sum(), (out**2).sum(-1)


def step_of(loss):
    def step(params, batch, key):
        (value, each), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, key)
        metrics = {"loss": value, "grads": grads, "each": each, "n": batch["x"].shape[0]}
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), metrics

    return step


@pytest.fixture
def compiled():
    """The names of what XLA compiles."""
    names = []

    def listen(event, duration_secs, **more):
        if event.endswith("backend_compile_duration"):
            names.append(more.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def expensive(names):
    return sum("micro_batch" in n for n in names), sum("update_state" in n for n in names)


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", [mean, weighted, dropped, balanced], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_any_count_is_compiled_once_and_is_one_device_s(loss, wide, compiled):
    with jax.enable_x64(wide):
        step, key = step_of(loss), jax.random.key(5)
        made = lensjax.parallelize(step, plan=plan(), cluster="cpu:8", donate=False)
        passes = 2 if loss in (balanced, weighted) else 1  # a scan's backward needs the sum of the weights first
        for n in SIZES:
            state, mine = made(params(), batch(n), key)
            new, expected = jax.jit(step)(params(), batch(n), key)
            found = difference(mine, expected)
            assert max(found.gradients, found.loss) <= (1e-9 if wide else 1e-6), n
            assert int(mine["n"]) == n
            for x, y in ((mine["each"], expected["each"]), *zip(jax.tree.leaves(state), jax.tree.leaves(new))):
                assert x.dtype == y.dtype
                np.testing.assert_allclose(x, y, rtol=0, atol=(1e-9 if wide else 1e-6) * float(jnp.abs(y).max()))
        assert made.program.split.passes == passes
        assert expensive(compiled) == (passes, 1)
        assert all("are not compiled again" in n for n in made.notices[-3:]), made.notices


def test_an_uneven_last_share_is_compiled_for_its_own_size_and_said(compiled):
    step, key = step_of(dropped), jax.random.key(5)
    made = lensjax.parallelize(step, plan=plan(), cluster="cpu:8", donate=False)
    for n in (32, 40, 56, 24):  # shares of 2 on each device; one is left of 40, 56 and 24
        _, mine = made(params(), batch(n), key)
        _, expected = jax.jit(step)(params(), batch(n), key)
        assert difference(mine, expected).gradients <= 1e-6
        np.testing.assert_allclose(mine["each"], expected["each"], rtol=2e-6, atol=1e-5)
    assert expensive(compiled) == (2, 1)
    assert "compiled again were: micro batch" in made.notices[-3], made.notices


def test_a_step_whose_draw_depends_on_the_size_is_compiled_again():
    """Time comes first: the elements of one step stand apart by the size of the batch, which is part of the program."""

    def loss(params, batch, key):
        x = jnp.stack([batch["x"]] * 3)  # [time, batch, features]
        out = model(params, x * jax.random.bernoulli(key, 0.8, x.shape))
        return ((out - batch["y"]) ** 2).mean(), (out**2).sum((0, 2))

    step, key = step_of(loss), jax.random.key(5)
    made = lensjax.parallelize(step, plan=plan(), cluster="cpu:8", donate=False)
    for n in (32, 64):
        _, mine = made(params(), batch(n), key)
        _, expected = jax.jit(step)(params(), batch(n), key)
        assert difference(mine, expected).gradients <= 1e-6
    assert "compiled again were: micro batch" in made.notices[-1], made.notices


def test_the_state_is_given_up_to_the_update_and_one_program_can_still_be_asked_for():
    step, key = step_of(mean), jax.random.key(5)
    made = lensjax.parallelize(step, plan=plan(), cluster="cpu:8")
    state, _ = made(params(), batch(32), key)
    after, _ = made(state, batch(64), key)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    assert "all-reduce" in made.compiled.as_text()
    assert made.explain() and made.lower().as_text()


def test_literals_of_the_size_are_arguments_at_every_depth():
    def step(w, x):
        def loss(w):
            def body(c, _):
                c = jax.lax.cond(c > 0, lambda c: c / x.shape[0], lambda c: c * (x.shape[0] + 1.0), c)
                return c, None

            total, _ = jax.lax.scan(body, ((x @ w) ** 2).sum(), None, length=2)
            return total

        g = jax.grad(loss)(w)
        return w - g, {"n": x.shape[0]}

    on = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    lifted = lift(analyze(step, (on((4,)), on((12, 4)))))
    program = lifted.program
    assert {float(v) for v in lifted.values} >= {12.0, 13.0}
    assert len(program.arguments) == 2 + len(lifted.values)
    left = [a.val for e in all_equations(program.jaxpr) for a in e.invars if not is_var(a)]
    assert not {12.0, 13.0} & {float(v) for v in left if np.ndim(v) == 0}
    assert program.split.micro, program.split.micro


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["dp=2,fsdp:once=4", "dp=2,zero1=4"])
@pytest.mark.parametrize("codec", ["exact", "int4"])
def test_nodes_and_codecs_with_any_count(codec, preset, compiled):
    """Nothing is reduced between devices while micro-batches are added up; codes keep their memory over all sizes."""
    state = codes.init(jax.random.key(0))
    chosen = codes.base(preset).replace(
        reduce={codes.SLOW: Reduce(codec, split=codec == "exact")}, micro=Micro(share=16)
    )
    made = lensjax.parallelize(codes.step, cluster=codes.MACHINE, plan=chosen, donate=False)
    for copies in (1, 2, 4):
        data = jax.tree.map(lambda x, k=copies: jnp.concatenate([x * (1 + 0.1 * i) for i in range(k)]), codes.batch())
        (_, mine), (_, expected) = made(state, data), jax.jit(codes.step)(state, data)
        worst = max(jax.tree.leaves(jax.tree.map(codes.spread, mine["grads"], expected["grads"])))
        assert worst <= (1e-6 if codec == "exact" else 0.175), copies
    assert expensive(compiled) == (1, 1)
    texts = [c.as_text() for c in made._parts.values()]
    shares = [t for t in texts if t.startswith("HloModule jit_micro_batch")]
    assert len(shares) == 1
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        assert f" {kind}(" not in shares[0] and f" {kind}-start(" not in shares[0], kind
    assert bool(made.extra) == (codec == "int4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "token_weighted", "gpt_tied_dropout", "moe_dense", "lora", "control_flow"])
def test_families_with_any_count(name, compiled):
    family = FAMILIES[name]
    case = family.make(with_grads=True)
    assert family.form == "state"
    state = case.init(jax.random.key(0))
    chosen = plan().replace(micro=Micro(share=8))  # several already in the family's own batch
    made = lensjax.parallelize(case.step, plan=chosen, cluster="cpu:8", donate=False, **family.options)
    for count in COUNTS:
        pieces = [case.batch(jax.random.key(1 + i)) for i in range(count)]
        data = jax.tree.map(lambda *xs: jnp.concatenate(xs) if np.ndim(xs[0]) else xs[0], *pieces)
        mine, theirs = (
            [x for path, x in jax.tree.leaves_with_path(made_by(state, data)) if "grads" in jax.tree_util.keystr(path)]
            for made_by in (made, jax.jit(case.step))
        )
        mine, theirs = numbers(mine), numbers(theirs)
        largest = max(np.abs(x).max() for x in theirs)
        worst = max(np.abs(x - y).max() for x, y in zip(mine, theirs, strict=True)) / largest
        assert worst <= (2e-6 if family.dtype == "float32" else 2e-2), (count, worst)
    assert expensive(compiled) == (made.program.split.passes, 1), made.notices
