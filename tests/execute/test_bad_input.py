"""Bad input gets an error that says what was found, what was expected and what to do, and nothing of the user's is
lost."""

import dataclasses
import json

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
        with pytest.raises(StateError, match="was donated to an earlier call and is gone"):
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


def edited(tmp_path, preset="fsdp", **changes):
    """A step under a plan file with other fields ("mesh__order" is the field order of mesh)."""
    train = lensjax.parallelize(step, plan=preset)
    train.plan_for(jax.eval_shape(create), batch())
    data = train.plan.to_dict()
    for name, value in changes.items():
        *outer, last = name.split("__")
        inner = data
        for key in outer:
            inner = inner[key]
        inner[last] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    return lensjax.parallelize(step, plan=str(path))


HIDDEN = "leaves__state/params/hidden"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"micro__count": 4}, r"field 'micro\.count' of the plan is 4, which cannot be executed yet"),
        ({"micro__share": 2}, r"field 'micro\.share' of the plan is 2, which cannot be executed yet"),
        ({"layers": {"*": "full"}}, r"field 'layers\.\*' of the plan is 'full', which cannot be executed yet"),
        ({"reduce": {"device": {"codec": "int8"}}}, r"field 'reduce\.device' names no tier"),
        ({"reduce": {"process": {"codec": "int8"}}}, r"field 'reduce\.process\.codec' of the plan is 'int8', which"),
        ({"reduce": {"process": {"bucket": 1}}}, r"field 'reduce\.process\.bucket' of the plan is 1, which cannot"),
        ({"pipeline": {"stages": 2, "schedule": "1f1b"}}, "field 'pipeline' of the plan is '2 stages', which cannot"),
        ({"flags": {"xla_x": "1"}}, r"field 'flags\.xla_x' of the plan is '1', which cannot be executed yet"),
        ({"rules__params": {"heads": ["fsdp"]}}, r"field 'rules\.params\.heads' does nothing by itself"),
        ({"rules__grads": {"batch": []}}, r"field 'rules\.grads\.batch' is \[\]; 'rules\.activations\.batch' is"),
        ({"rules__params": {"heads": ["tp"]}}, r"field 'rules\.params\.heads' names 'tp', which is not an axis"),
        ({"rules__activations": {"batch": ["dp"]}}, r"field 'rules\.activations\.batch' names 'dp', which is not"),
        ({"gather": {"*": "never"}}, r"field 'gather\.\*' is 'never'; expected 'once' or 'again'"),
        ({"gather": {"blocks": "once"}}, r"field 'gather\.blocks' names a layer that the step does not have"),
        ({"mesh__axes": [{"name": "fsdp", "size": -8}]}, r"field 'mesh\.axes\[0\]\.size' is -8"),
        ({"mesh__axes": [{"name": "fsdp", "size": 2}, {"name": "fsdp", "size": 4}]}, "two axes named 'fsdp'"),
        ({"mesh__axes": [{"name": "", "size": 8}]}, r"field 'mesh\.axes\[0\]\.name' is empty"),
        ({"mesh__axes": []}, r"field 'mesh\.axes' is empty"),
        ({"mesh__order": [0, 1]}, r"field 'mesh\.order' has 2 numbers; expected each of 0..7 once"),
        ({"mesh__order": [0, 0, 2, 3, 4, 5, 6, 7]}, r"field 'mesh\.order' names the device 0 twice"),
        ({"mesh__order": [8, 1, 2, 3, 4, 5, 6, 7]}, r"field 'mesh\.order' names the device 8"),
        ({HIDDEN: [["fsdp"], ["fsdp"]]}, "field 'leaves.state/params/hidden' names the mesh axis 'fsdp' twice"),
        ({HIDDEN: [["tp"], []]}, "field 'leaves.state/params/hidden' names 'tp', which is not an axis"),
        ({HIDDEN: [[], [], ["fsdp"]]}, "a spec of 3 dimensions"),
    ],
)
def test_an_edited_plan_names_the_field(tmp_path, changes, message):
    with pytest.raises(PlanError, match=message):
        edited(tmp_path, **changes)(create(), batch())


def test_a_plan_made_by_hand_is_checked_like_a_file():
    plan = lensjax.parallelize(step, plan="fsdp").plan_for(jax.eval_shape(create), batch())
    with pytest.raises(PlanError, match=r"'plan\.leaves\.state/params/hidden\[0\]' is 'fsdp'; expected a list"):
        wrong = plan.replace(leaves={"state/params/hidden": ("fsdp", None)})
        lensjax.parallelize(step, plan=wrong)(create(), batch())
    with pytest.raises(PlanError, match=r"field 'micro\.count' of the plan is 2, which cannot be executed yet"):
        wrong = plan.replace(micro=dataclasses.replace(plan.micro, count=2))
        lensjax.parallelize(step, plan=wrong)(create(), batch())


def test_an_edited_plan_is_priced_anew(tmp_path):
    train = edited(tmp_path, predicted__step_s=1e9, predicted__peak_bytes=1.0)
    plan = train.plan_for(jax.eval_shape(create), batch())
    assert plan.predicted.step_s < 1 and plan.predicted.peak_bytes > 1000


def test_pins_hold_for_a_plan_file_too(tmp_path):
    path = str(planned(tmp_path))
    state, _ = lensjax.parallelize(step, plan=path, pins={"params/hidden": ("fsdp", None)})(create(), batch())
    assert state["params"]["hidden"].sharding.spec == jax.sharding.PartitionSpec("fsdp", None)
    with pytest.raises(PlanError, match="the pin 'params/hiden' matches no tensor"):
        lensjax.parallelize(step, plan=path, pins={"params/hiden": ()})(create(), batch())


P = jax.sharding.PartitionSpec


@pytest.mark.parametrize("spec", [P(None, "fsdp"), P(P.UNCONSTRAINED, ("fsdp",))])
def test_a_partition_spec_is_a_pin(spec):
    train = lensjax.parallelize(step, plan="fsdp", pins={"params/hidden": spec})
    plan = train.plan_for(jax.eval_shape(create), batch())
    assert plan.leaves["state/params/hidden"] == ((), ("fsdp",))


@pytest.mark.parametrize(
    "options, error, message",
    [
        *[({"plan": p}, PlanError, r"plan=.*expected a preset, a Plan") for p in (3, b"dp", ["dp"], True, {}, 1.5)],
        ({"plan": ""}, PlanError, "the plan '' is not a preset"),
        ({"plan": "banana"}, PlanError, "the plan 'banana' is not a preset"),
        *[({"pins": p}, PlanError, "pins=.*expected a mapping") for p in ([("a", ())], "dp", 3, True)],
        ({"pins": {3: ()}}, PlanError, "the pin of 3: a pattern is a text"),
        ({"pins": {"w1": (0,)}}, PlanError, r"the pin of 'w1' is \(0,\): 0 is no mesh axis"),
        ({"pins": {"w1": ((None,),)}}, PlanError, r"the pin of 'w1' is .*: \(None,\) is no mesh axis"),
        ({"pins": {"w1": None}}, PlanError, "the pin of 'w1' is None"),
        *[
            ({"memory": m}, PlanError, "memory=.*expected a positive number of bytes")
            for m in ("80GB", float("nan"), float("inf"), -1, 0, True, [8])
        ],
        *[({"batch_argnums": n}, BatchError, "batch_argnums=.*expected an int") for n in ("b", 1.0, ["b"], (), True)],
        ({"batch_argnums": (1, 1)}, BatchError, r"batch_argnums=\(1, 1\) names an argument twice"),
        ({"batch_argnums": 1, "batch_axes": "x"}, BatchError, "batch_axes='x': 'x' is no dimension"),
        ({"batch_argnums": 1, "batch_axes": [{"x": 0.0}]}, BatchError, "0.0 is no dimension"),
        ({"batch_axes": 0}, BatchError, "batch_axes was given without batch_argnums"),
        ({"donate": "no"}, PlanError, "donate='no'; expected True or False"),
        ({"report": 3}, PlanError, "report=3; expected a function"),
        ({"cluster": 8}, lensjax.ClusterError, "cluster=8; expected a Cluster"),
    ],
)
def test_options_are_checked_where_the_step_is_decorated(options, error, message):
    with pytest.raises(error, match=message):
        lensjax.parallelize(step, **options)


def test_a_preset_in_the_place_of_the_step():
    with pytest.raises(PlanError, match="parallelize got 'dp' where the step is expected"):
        lensjax.parallelize("dp")


@pytest.mark.parametrize(
    "pins, message, hint",
    [
        ({"params/hiden": (None, "fsdp")}, "^the pin 'params/hiden' matches no tensor", "state/params/hidden"),
        ({"params/hidden": ("model",)}, "^the pin 'params/hidden' names the mesh axis 'model', which no", "fsdp"),
        ({"params/hidden": (None, None, ())}, "^the pin 'params/hidden' names 3 dimensions; state/params/hidden", ""),
    ],
)
def test_a_wrong_pin_is_told_once_when_the_plan_is_chosen(pins, message, hint):
    train = lensjax.parallelize(step, pins=pins)
    with pytest.raises(PlanError, match=message) as e:
        train.plan_for(jax.eval_shape(create), batch())
    assert hint in e.value.hint and str(e.value).count("the pin") == 1


def test_a_reason_that_every_preset_has_is_told_once():
    train = lensjax.parallelize(step, pins={"params/out": (None, ("fsdp", "zero1"))})
    with pytest.raises(PlanError, match="no plan applies") as e:
        train.plan_for(jax.eval_shape(create), batch())
    lines = str(e.value).splitlines()
    assert len(lines) == len({line.partition(": ")[2] for line in lines})
