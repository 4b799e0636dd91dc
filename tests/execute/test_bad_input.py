"""Bad input gets an error that says what was found, what was expected and what to do, and nothing of the user's is
lost."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lensjax
from lensjax import BatchError, DoesNotFit, PlanError, StateError, TraceError


def step(state, batch):
    params, opt_state = state["params"], state["opt_state"]

    def loss_fn(p):
        hidden = jnp.tanh(batch["x"] @ p["hidden"])
        return ((hidden @ p["out"])[:, 0] - batch["y"]) ** 2

    loss, grads = jax.value_and_grad(lambda p: loss_fn(p).mean())(params)
    updates, opt_state = optax.adam(1e-2).update(grads, opt_state)
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}, loss


def create(rng=None, width=64):
    params = {"hidden": jnp.full((16, width), 0.1), "out": jnp.full((width, 1), 0.1)}
    return {"params": params, "opt_state": optax.adam(1e-2).init(params)}


def batch(n=16):
    return {"x": np.ones((n, 16), np.float32), "y": np.zeros(n, np.float32)}


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def test_a_batch_that_the_mesh_does_not_divide_names_the_nearest_sizes():
    train = lensjax.parallelize(step, plan="dp")
    with pytest.raises(BatchError, match=r"the batch of 12 does not divide into 8 equal parts.*\n.*8 or 16"):
        train(create(), batch(12))


def test_a_state_that_changes_structure_names_the_leaf():
    train = lensjax.parallelize(step, plan="dp")
    state, _ = train(create(), batch())
    other = {**state, "params": {**state["params"], "extra": jnp.ones(3)}}
    with pytest.raises(StateError, match="state/params/extra is new"):
        train(other, batch())
    state, _ = train(state, batch())  # and training goes on


def test_a_state_that_changes_shape_names_the_leaf():
    train = lensjax.parallelize(step, plan="dp")
    train(create(), batch())
    with pytest.raises(StateError, match=r"state/opt_state/0/mu/hidden was float32\[16, 64\] and is float32\[16, 32\]"):
        train(create(width=32), batch())


def test_a_step_that_is_not_traceable_names_the_line():
    @lensjax.parallelize(plan="dp")
    def branching(state, batch):
        if batch["y"].sum() > 0:  # a Python branch on a value
            state = jax.tree.map(lambda x: x, state)
        return state

    with pytest.raises(TraceError, match=r"test_bad_input.py:\d+ \(if batch\[.y.\].sum\(\) > 0") as e:
        branching(create(), batch())
    assert "jax.lax.cond" in e.value.hint


def test_donated_state_used_again_names_the_leaf():
    train = lensjax.parallelize(step, plan="dp")
    state = train.init(create, batch=batch())
    new, _ = train(state, batch())
    for _ in range(2):  # the same words on the second and on every later use
        with pytest.raises(StateError, match="6 more were donated to an earlier call and are gone"):
            train(state, batch())
    train(new, batch())


def test_a_state_donated_before_the_first_call():
    train = lensjax.parallelize(step, plan="dp")
    state = create()
    jax.tree.leaves(state)[0].delete()
    with pytest.raises(StateError, match="state/opt_state/0/count was donated"):
        train(state, batch())


def test_donate_false_keeps_the_old_state():
    train = lensjax.parallelize(step, plan="fsdp", donate=False)
    state = train.init(create, batch=batch())
    _, first = train(state, batch())
    _, second = train(state, batch())
    assert first == second


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_first_call_leaves_the_state(monkeypatch, error):
    train = lensjax.parallelize(step, plan="fsdp")
    state = train.init(create, batch=batch())
    before = jax.device_get(state)

    def stop(*_, **__):
        raise error("stop")

    with monkeypatch.context() as m:
        m.setattr(jax.stages.Lowered, "compile", stop)
        with pytest.raises(error):
            train(state, batch())
    assert same(before, state)
    _, loss = train(state, batch())
    assert np.isfinite(loss)


def test_a_failed_compile_is_an_error_of_ours_and_the_state_lives(monkeypatch):
    train = lensjax.parallelize(step, plan="fsdp")
    state = train.init(create, batch=batch())

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: no\nmore lines")

    with monkeypatch.context() as m:
        m.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises(lensjax.CompileError, match="under the plan 'fsdp': INTERNAL: no"):
            train(state, batch())
    train(state, batch())


def planned(tmp_path, **changes):
    train = lensjax.parallelize(step, plan="fsdp")
    train.plan_for(jax.eval_shape(create), batch())
    path = tmp_path / "plan.json"
    data = train.plan.to_dict() | changes
    path.write_text(json.dumps(data))
    return path


def test_a_plan_file_replays(tmp_path):
    train = lensjax.parallelize(step, plan=str(planned(tmp_path)))
    _, loss = train(create(), batch())
    assert np.isfinite(loss)


def test_a_plan_file_for_another_program(tmp_path):
    train = lensjax.parallelize(step, plan=str(planned(tmp_path)))
    with pytest.raises(PlanError, match=r"field 'provenance\.program' of the plan is"):
        train(create(width=32), batch())


def test_a_plan_file_for_another_number_of_devices(tmp_path):
    train = lensjax.parallelize(step, plan=str(planned(tmp_path)), cluster="cpu:4")
    with pytest.raises(PlanError, match=r"field 'mesh' of the plan is for 8 devices .*has 4"):
        train(create(), batch())


def test_a_plan_file_of_a_newer_schema(tmp_path):
    train = lensjax.parallelize(step, plan=str(planned(tmp_path, schema=2)))
    with pytest.raises(PlanError, match="field 'schema' of the plan is 2; this lensjax reads schema 1"):
        train(create(), batch())


def test_a_plan_file_that_is_not_there(tmp_path):
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        lensjax.parallelize(step, plan=str(tmp_path / "none.json"))(create(), batch())


def test_a_cluster_of_another_size_than_the_devices():
    with pytest.raises(PlanError, match=r"the plan is for 4 devices .* JAX sees 8"):
        lensjax.parallelize(step, plan="dp", cluster="cpu:4")(create(), batch())


def test_a_pin_that_matches_nothing_names_the_nearest_paths():
    train = lensjax.parallelize(step, plan="fsdp", pins={"params/hiden": (None, "fsdp")})
    with pytest.raises(PlanError, match="matches no tensor") as e:
        train(create(), batch())
    assert "state/params/hidden" in e.value.hint


@pytest.mark.parametrize(
    "pins, message",
    [
        ({"params/hidden": ("fsdp", "fsdp")}, "contradicts itself"),
        ({"params/*": (), "params/hidden": ("fsdp",)}, "is contradicted by 'params/\\*'"),
        ({"params/hidden": ("model",)}, "names the mesh axis 'model', which the plan does not have"),
        ({"params/out": (None, "fsdp")}, r"splits dimension 1 of state/params/out \(size 1\) in 8"),
        ({"params/hidden": (None, None, "fsdp")}, "names 3 dimensions; state/params/hidden has shape"),
        ({"params/hidden": "fsdp"}, "give one entry per dimension"),
    ],
)
def test_pins_that_do_not_apply(pins, message):
    with pytest.raises(PlanError, match=message):
        lensjax.parallelize(step, plan="fsdp", pins=pins)(create(), batch())


def test_a_pin_is_obeyed_and_the_moments_follow():
    train = lensjax.parallelize(step, plan="fsdp", pins={"params/hidden": (None, "fsdp")})
    state, _ = train(create(), batch())
    assert state["params"]["hidden"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")
    assert state["opt_state"][0].mu["hidden"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")


def test_nothing_fits_says_what_binds_and_the_nearest():
    train = lensjax.parallelize(step, memory=1000)
    with pytest.raises(DoesNotFit) as e:
        train.plan_for(jax.eval_shape(create), batch())
    for part in ("nothing fits 1000 B per device", "The nearest plan is", "too much", "state/params/hidden"):
        assert part in str(e.value)


@pytest.mark.parametrize(
    "plan, message",
    [
        ("zero9", "the plan 'zero9' is not a preset"),
        ("dp=2,zero9", "'zero9' in the plan 'dp=2,zero9' is not a preset"),
        ("fsdp=3", "asks for a multiple of 3 devices; there are 8"),
        ("dp=2,fsdp=2", "is for 4 devices; there are 8"),
        ("dp,fsdp", "leaves the size of more than one preset open"),
        ("dp=2,dp=4", "a preset stands twice"),
        ("zero1:once", "':once' does not apply to zero1"),
    ],
)
def test_preset_strings_that_do_not_parse(plan, message):
    with pytest.raises(PlanError, match=message):
        lensjax.parallelize(step, plan=plan)(create(), batch())


def test_unsupported_jax_names_the_range(monkeypatch):
    from lensjax import _jax

    _jax.check_version.cache_clear()
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 2))
    monkeypatch.setattr(jax, "__version__", "0.9.2")
    try:
        with pytest.raises(lensjax.UnsupportedJax, match=r"jax >= 0\.10\.0 .*; jax 0\.9\.2 is installed"):
            lensjax.parallelize(step, plan="dp")(create(), batch())
    finally:
        _jax.check_version.cache_clear()


def test_init_without_a_batch_shows_the_call():
    with pytest.raises(PlanError, match="trace needs the batch") as e:
        lensjax.parallelize(step).init(create)
    assert "step.init(create, ..., batch=batch)" in e.value.hint


def test_init_of_a_state_that_exists_says_what_it_takes():
    with pytest.raises(PlanError, match="got a dict where the function that makes the state") as e:
        lensjax.parallelize(step).init(create(), batch=batch())
    assert "create_state" in e.value.hint


def test_ordered_effects_are_refused_before_anything_runs():
    @lensjax.parallelize(plan="dp")
    def printing(params, batch):
        jax.debug.print("{}", batch.sum(), ordered=True)
        return params - jax.grad(lambda p: (batch @ p).mean())(params)

    params = jnp.ones((4, 4))
    with pytest.raises(TraceError, match="keep their order"):
        printing(params, np.ones((8, 4), np.float32))
    assert not params.is_deleted()


def test_a_result_that_is_no_array_is_named():
    @lensjax.parallelize(plan="dp")
    def naming(params, batch):
        return params - jax.grad(lambda p: (batch @ p).mean())(params), {"name": "loss"}

    with pytest.raises(TraceError, match="the step returns 'loss' at 1/name"):
        naming(jnp.ones((4, 4)), np.ones((8, 4), np.float32))


def test_two_possible_batches_ask_for_batch_argnums():
    def two(params, x, y):
        return jax.grad(lambda p: (x @ p).mean() + (y @ p).mean())(params)

    x, y = np.ones((8, 4), np.float32), np.ones((24, 4), np.float32)
    with pytest.raises(BatchError, match="more than one group of arguments could be the batch") as e:
        lensjax.parallelize(two, plan="dp")(jnp.ones((4, 2)), x, y)
    assert "batch_argnums" in e.value.hint
    got = lensjax.parallelize(two, plan="dp", batch_argnums=2)(jnp.ones((4, 2)), x, y)
    np.testing.assert_allclose(got, two(jnp.ones((4, 2)), x, y), rtol=1e-6)


def test_no_batch_lists_what_was_tried():
    with pytest.raises(BatchError, match="no argument was found"):
        lensjax.parallelize(lambda p: p * 2, plan="dp")(jnp.ones((4, 2)))


def test_errors_are_lensjax_errors_and_carry_a_hint():
    assert issubclass(BatchError, lensjax.LensjaxError) and issubclass(DoesNotFit, PlanError)
    assert dataclasses.is_dataclass(lensjax.Plan)


def test_threads_that_give_up_one_state_at_once_get_one_result_and_errors():
    """Never a dead process: one of the calls runs, the others are told where the state went."""
    run = lensjax.parallelize(step, plan="fsdp", cluster="cpu:8")
    params, _ = run(create(), batch())
    together, found = threading.Barrier(4), []

    def call():
        together.wait()
        try:
            found.append(run(params, batch()))
        except lensjax.LensjaxError as e:
            found.append(e.message)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for action in ("start", "join"):
        for t in threads:
            getattr(t, action)()
    errors = [f for f in found if isinstance(f, str)]
    assert len(found) == 4 and len(errors) == 3
    assert all("donated to an earlier call and" in e for e in errors), errors
