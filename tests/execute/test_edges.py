"""Edges: effects, the user's own shardings, kernels, generators, sizes that do not divide, settings of JAX."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lensjax
from lensjax import BatchError, CompileError, PlanError, TraceError
from lensjax.execute import checks
from tests.execute.edges import close, data, mesh, same, sgd, weight


def squared(p, x):
    return ((x @ p) ** 2).mean()


# ---- effects ------------------------------------------------------------------------------------------------------


def test_a_print_prints_once_a_step_and_the_whole_value(capfd):
    seen = []

    def loss(p, x):
        h = jnp.tanh(x @ p)
        jax.debug.print("mean {:.4f}", h.mean())
        jax.debug.callback(lambda v: seen.append(v.shape), h)
        return (h**2).mean()

    train = lensjax.parallelize(sgd(loss), plan="dp=2,fsdp=4")
    new, _ = train(weight(), data())
    train(new, data())
    jax.effects_barrier()
    assert len(re.findall(r"mean -?\d\.\d{4}", capfd.readouterr().out)) == 2
    assert seen == [(16, 64)] * 2


def test_callbacks_see_the_whole_batch():
    seen = []

    def step(p, x):
        value, grad = jax.value_and_grad(squared)(p, x)
        whole = jax.pure_callback(lambda h: np.sort(h, 0), jax.ShapeDtypeStruct((16, 64), jnp.float32), x @ p)
        io_callback(lambda v: seen.append(v.shape), None, x)
        return p - 0.1 * grad, value, whole

    same(step)
    jax.effects_barrier()
    assert set(seen) == {(16, 16)}


# ---- the user's own shardings -------------------------------------------------------------------------------------


def constrained(m, spec):
    return lambda p, x: (jax.lax.with_sharding_constraint(x @ p, NamedSharding(m, spec)) ** 2).mean()


def mapped(m):
    f = lambda p, x: jax.lax.pmean(((x @ p) ** 2).mean(), m.axis_names[0])
    return lambda p, x: jax.shard_map(f, mesh=m, in_specs=(P(), P(m.axis_names[0])), out_specs=P())(p, x)


def inner_jit(m):
    whole, rows = NamedSharding(m, P()), NamedSharding(m, P(m.axis_names[0]))
    f = jax.jit(lambda p, x: x @ p, in_shardings=(whole, rows), out_shardings=rows)
    return lambda p, x: (f(p, x) ** 2).mean()


def test_a_constraint_on_the_plans_mesh_is_a_pin():
    train = same(sgd(constrained(mesh(dp=2, fsdp=4), P("dp", "fsdp"))), "dp=2,fsdp=4", reference=sgd(squared))
    assert re.search(r'sharding_constraint .*\[\{"dp"\}, \{"fsdp"\}\]', train.lower().as_text())


@pytest.mark.parametrize("loss", [mapped, inner_jit])
def test_regions_and_inner_jits_on_the_plans_mesh_are_kept(loss):
    same(sgd(loss(mesh(dp=8))), "dp", reference=sgd(squared))


def test_another_order_of_the_same_devices_is_the_same_mesh():
    turned = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("dp",))
    same(sgd(mapped(turned)), "dp", reference=sgd(squared))


@pytest.mark.parametrize(
    "loss, what",
    [
        (lambda m: constrained(m, P("data")), "the sharding constraint"),
        (mapped, "the shard_map"),
        (inner_jit, "the sharding constraint"),
    ],
)
def test_a_foreign_mesh_is_an_error_that_names_the_line(loss, what):
    p = weight()
    with pytest.raises(PlanError, match=rf"{what} at .*test_edges\.py:\d+ names the mesh \{{'data': 8\}}") as e:
        lensjax.parallelize(sgd(loss(mesh(data=8))), plan="dp")(p, data())
    assert "{'dp': 8}" in e.value.message and not p.is_deleted()


def test_a_step_under_jit_with_shardings_of_its_own():
    def jitted(m):
        whole = NamedSharding(m, P())
        shardings = dict(in_shardings=(whole, NamedSharding(m, P(m.axis_names[0]))), out_shardings=(whole, whole))
        return jax.jit(sgd(squared), **shardings, donate_argnums=0)

    same(jitted(mesh(dp=8)), "dp", reference=sgd(squared))
    with pytest.raises(PlanError, match="a sharding of the jit around the step names the mesh"):
        lensjax.parallelize(jitted(mesh(data=8)), plan="dp")(weight(), data())


def test_the_search_keeps_to_the_users_mesh():
    train = lensjax.parallelize(sgd(constrained(mesh(zero1=8), P("zero1"))))
    train.plan_for(weight(), data())
    assert train.plan.name == "zero1"
    assert "names the mesh {'zero1': 8}; that of the plan 'dp' is {'dp': 8}" in " ".join(train.explain().split())
    small = lensjax.parallelize(sgd(constrained(mesh(zero1=8), P("zero1"))), memory=1000)
    with pytest.raises(PlanError, match="fits"):
        small.plan_for(weight(), data())


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: (jax.lax.with_sharding_constraint(x @ p, P("dp")) ** 2).mean(),
        lambda p, x: jax.shard_map(squared, in_specs=(P(), P("dp")), out_specs=P())(p, x),
    ],
)
def test_mesh_axes_without_a_mesh(loss):
    with pytest.raises(TraceError, match=r"names mesh axes without a mesh at .*test_edges\.py:\d+"):
        lensjax.parallelize(sgd(loss), plan="dp")(weight(), data())


# ---- kernels ------------------------------------------------------------------------------------------------------


def sine(interpret, **options):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.sin(x_ref[...])

    @jax.custom_vjp
    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=interpret, **options)(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * jnp.cos(x),))
    return lambda p, x: (f(x @ p) ** 2).mean()


def test_an_interpreted_kernel_is_ordinary_operations():
    train = same(sgd(sine(True)), "dp=2,fsdp=4")
    assert not train.notices


def test_a_kernel_for_a_gpu_is_planned_anywhere_and_named_where_it_cannot_run():
    step = sgd(sine(False, name="sine"))
    train = lensjax.parallelize(step, plan="fsdp", cluster="dgx-h100:1")
    train.plan_for(weight(), data())
    text = " ".join(train.explain().split())
    assert "the pallas kernel 'sine' at" in text and "every device computes it whole" in text
    p = weight()
    with pytest.raises(
        CompileError, match=r"the pallas kernel 'sine' at .*test_edges\.py:\d+ does not compile for cpu"
    ):
        lensjax.parallelize(step, plan="fsdp")(p, data())
    assert not p.is_deleted()


def test_foreign_calls_of_the_library():
    same(sgd(lambda p, x: jnp.linalg.cholesky((x @ p).T @ (x @ p) + jnp.eye(64)).mean()))


def test_custom_partitioning_is_the_users_own_rule():
    @custom_partitioning
    def f(x):
        return jnp.sin(x)

    def partition(m, operands, result):
        return m, jnp.sin, result.sharding, (operands[0].sharding,)

    f.def_partition(partition=partition, sharding_rule="b i -> b i")
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, c: (c * jnp.cos(x),))
    step, plain = (sgd(lambda p, x, h=h: (h(x @ p) ** 2).mean()) for h in (g, jnp.sin))
    same(step, "fsdp", reference=plain)


def test_a_sharding_rule_splits_what_nobody_can_look_into():
    seen = []

    @lensjax.sharding_rule("row column -> row column", whole=("column",))
    def softmax(x):
        seen.append(x.shape)
        return jax.nn.softmax(x)

    f = jax.custom_vjp(softmax)
    f.defvjp(lambda x: (softmax(x), x), lambda x, c: jax.vjp(jax.nn.softmax, x)[1](c))
    step, plain = (sgd(lambda p, x, h=h: (h(x @ p) ** 2).mean()) for h in (f, jax.nn.softmax))
    train = same(step, "dp", reference=plain)
    assert (2, 64) in seen and "all-gather" not in train.compiled.as_text()


def test_a_sharding_rule_that_does_not_parse():
    with pytest.raises(TraceError, match="the sharding rule 'row' of squared does not parse: There is no ->") as e:
        lensjax.sharding_rule("row")(squared)
    assert "row column" in e.value.hint


# ---- random numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl, partitionable", [("rbg", True), ("unsafe_rbg", True), ("threefry2x32", False)])
def test_other_generators_draw_the_numbers_of_one_device(impl, partitionable):
    def step(p, x, key):
        mask = jax.random.bernoulli(key, 0.5, (x.shape[0], 64))
        return p - 0.1 * jax.grad(lambda p: ((x @ p) * mask).mean())(p), mask

    with jax.threefry_partitionable(partitionable):
        key = jax.random.key(3, impl=impl)
        train = lensjax.parallelize(step, plan="dp=2,fsdp=4")
        np.testing.assert_array_equal(train(weight(), data(), key)[1], jax.jit(step)(weight(), data(), key)[1])


# ---- sizes --------------------------------------------------------------------------------------------------------


def test_what_does_not_divide_stays_whole_and_is_reported():
    def step(p, x):
        loss, grads = jax.value_and_grad(lambda p: ((jnp.tanh(x @ p["odd"]) @ p["even"]) ** 2).mean())(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), loss

    p = {"odd": jnp.full((15, 101), 0.05), "even": jnp.full((101, 64), 0.05)}
    train = lensjax.parallelize(step, plan="fsdp")
    new, _ = train(p, data()[:, :15])
    assert new["odd"].sharding.spec == P(None, None) and new["even"].sharding.spec == P(None, "fsdp")
    assert "whole on every device: 1 tensors, 5.92 KiB (p/odd" in train.explain()


def test_a_batch_that_does_not_divide_names_the_two_nearest_sizes():
    with pytest.raises(BatchError, match=r"the batch of 20 does not divide(.|\n)*16 or 24"):
        lensjax.parallelize(sgd(squared), plan="dp")(weight(), data(20))


def test_symbolic_shapes_are_refused():
    (b,) = export.symbolic_shape("b")
    with pytest.raises(TraceError, match=r"x has the symbolic shape \(b, 16\)"):
        lensjax.parallelize(sgd(squared), plan="dp").plan_for(weight(), jax.ShapeDtypeStruct((b, 16), jnp.float32))


def test_many_equations_advise_a_loop(monkeypatch):
    monkeypatch.setattr(checks, "MANY_EQUATIONS", 20)
    train = lensjax.parallelize(sgd(lambda p, x: sum(((x @ p) ** 2).mean() for _ in range(8))), plan="dp")
    train.plan_for(weight(), data())
    assert "equations: tracing, planning and compiling grow with them" in train.explain()
    assert "jax.lax.scan" in train.notices[0]


# ---- control flow -------------------------------------------------------------------------------------------------


def test_collectives_in_a_branch_that_the_batch_decides():
    def loss(p, x):
        h = x @ p
        return jax.lax.cond(h.mean() > 0, lambda h: (h**2).mean(), lambda h: jnp.abs(h @ p.T).mean(), h)

    same(sgd(loss), "dp=2,fsdp=4")


def test_a_loop_whose_end_the_batch_decides():
    def step(p, x):
        go_on = lambda s: (squared(s[0], x) > 0.05) & (s[1] < 5)
        return jax.lax.while_loop(go_on, lambda s: (s[0] - 0.5 * jax.grad(squared)(s[0], x), s[1] + 1), (p, 0))

    same(step)


# ---- what a step closes over --------------------------------------------------------------------------------------


def test_a_large_captured_array_is_warned_about_and_sharded_like_a_parameter():
    table = jnp.ones((4096, 128))
    step = sgd(lambda p, x: ((x @ p) @ table[:64] * 0.01).mean())
    train = lensjax.parallelize(step, plan="fsdp")
    with pytest.warns(lensjax.CaptureWarning, match=r"closes over table \(float32\[4096, 128\], 2\.00 MiB\)") as seen:
        train(weight(), data())
    assert seen[0].filename == __file__
    assert train._run.captured[0].sharding.spec == P("fsdp", None)


def test_a_captured_variable_that_changes_is_warned_about_once():
    scale = jnp.full(64, 2.0)
    train = lensjax.parallelize(sgd(lambda p, x: ((x @ p) * scale).mean()), plan="dp")
    new, _ = train(weight(), data())
    scale = jnp.zeros(64)
    with pytest.warns(lensjax.CaptureWarning, match="scale, which the step closes over, holds another array") as seen:
        new, _ = train(new, data())
        train(new, data())
    assert len(seen) == 1 and seen[0].filename == __file__


# ---- what makes another call --------------------------------------------------------------------------------------


def test_settings_of_jax_are_part_of_the_signature():
    step = sgd(lambda p, x: squared(p, x) + jnp.zeros(3).sum())
    train = lensjax.parallelize(step, plan="dp")
    assert train(weight(), data())[1].dtype == jnp.float32
    with jax.enable_x64(True):
        assert train(weight(), data())[1].dtype == jnp.float64
        assert train(weight(), data())[1].dtype == jnp.float64
    assert train(weight(), data())[1].dtype == jnp.float32
    assert len(train._ready) == 2 and "x64 on" in train.notices[0]


def test_weak_types_are_part_of_the_signature():
    def step(p, x, rate):
        return p - rate * jax.grad(squared)(p, x)

    train = lensjax.parallelize(step, plan="dp")
    for rate in (0.5, np.float32(0.5), 0.25):
        close(train(weight(), data(), rate), step(weight(), data(), rate))
    assert len(train._ready) == 2 and "rate is float32[]" in train.notices[0]


@pytest.mark.parametrize("made", ["by init", "elsewhere"])
def test_a_step_is_compiled_once(caplog, made):
    def step(state, x):
        return {"w": state["w"] - jax.grad(squared)(state["w"], x), "step": state["step"] + 1}

    train = lensjax.parallelize(step, plan="fsdp")
    create = lambda: {"w": weight(), "step": 0}
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        state = train.init(create, batch=data()) if made == "by init" else create()
        for _ in range(3):
            state = train(state, data())
    assert int(state["step"]) == 3
    assert sum("Finished XLA compilation of jit(step)" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("again", ["numpy", "on one device", "uncommitted"])
def test_a_state_that_is_made_anew_is_placed_and_nothing_is_compiled_again(caplog, again):
    """As in a sweep: the decorated step starts over from what the undecorated script makes."""

    def step(state, x):
        return {"w": state["w"] - jax.grad(squared)(state["w"], x)}

    create = {
        "numpy": lambda: {"w": np.asarray(weight())},
        "uncommitted": lambda: {"w": weight()},
        "on one device": lambda: {"w": jax.device_put(weight(), jax.devices()[1])},
    }[again]
    train = lensjax.parallelize(step, plan="fsdp")
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        for _ in range(3):
            state = create()
            for _ in range(2):
                state = train(state, data())
    close(state, step(step({"w": weight()}, data()), data()))
    assert sum("Finished XLA compilation of jit(step)" in r.getMessage() for r in caplog.records) == 1
    assert len(train._ready) == 1


def test_what_is_compiled_ahead_is_what_runs(caplog):
    def step(state, x):
        return {"w": state["w"] - jax.grad(squared)(state["w"], x)}

    train = lensjax.parallelize(step, plan="fsdp")
    train.plan_for({"w": weight()}, data())
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        train.lower()
        shardings = train.compiled.input_shardings[0]
        state, x = jax.tree.map(jax.device_put, ({"w": weight()}, data()), shardings)
        for _ in range(2):
            state = train(state, x)
    assert sum("Finished XLA compilation of jit(step)" in r.getMessage() for r in caplog.records) == 1


def test_disable_jit_runs_the_users_function_as_it_was_written():
    seen = []

    def loss(p, x):
        seen.append(isinstance(x, jax.core.Tracer))
        return squared(p, x)

    step = lambda p, x: (p, loss(p, x))
    train = lensjax.parallelize(step, plan="fsdp", batch_argnums=1)
    state, _ = train(weight(), data())
    seen.clear()
    with jax.disable_jit():
        train(state, data())
    assert seen == [False]


def test_debug_nans_raises_and_keeps_the_state():
    train = lensjax.parallelize(sgd(lambda p, x: jnp.log((x @ p) - 100).mean()), plan="fsdp")
    state = train.init(weight, batch=data())
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        train(state, data())
    assert not state.is_deleted()
