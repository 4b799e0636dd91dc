"""Plans, pins and options that cannot be meant are refused in words: the field or the option, what was found, what was
expected."""

import dataclasses
import json

import jax
import pytest

import lensjax
from lensjax import BatchError, PlanError
from tests.execute.test_bad_input import batch, create, planned, step


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
        ({"micro__count": 0}, r"field 'micro\.count' is 0; expected 1 or more"),
        ({"micro__share": -2}, r"field 'micro\.share' is -2; expected 1 or more"),
        ({"micro__share": 3}, r"field 'micro\.share' of the plan is 3; expected a number of examples"),
        ({"layers": {"*": "full"}}, r"field 'layers\.\*' is 'full'; expected one of keep, scores, dots, named"),
        ({"layers": {"attention": "inputs"}}, r"field 'layers\.attention' names a layer that the step does not have"),
        ({"reduce": {"device": {"codec": "int8"}}}, r"field 'reduce\.device' names no tier"),
        ({"reduce": {"process": {"codec": "int3"}}}, r"field 'reduce\.process\.codec' of the plan is 'int3': there"),
        ({"reduce": {"process": {"bucket": 1}}}, r"field 'reduce\.process\.bucket' does nothing: an exact reduction"),
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
    with pytest.raises(PlanError, match=r"field 'micro\.count' is 0; expected 1 or more"):
        wrong = plan.replace(micro=dataclasses.replace(plan.micro, count=0))
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


def test_plans_that_presets_make_are_valid():
    """Also those with rules for tensor axes, and with experts."""
    from lensjax.models.targets import target
    from lensjax.plan.validate import validate
    from lensjax.program.program import analyze
    from lensjax.search.presets import preset

    train, state, tokens = target("llama3-tiny", 16, 32)
    program = analyze(train, (state, tokens))
    for text in ("dp", "zero1", "fsdp:again", "hsdp=4", "dp=2,zero1=4", "fsdp=4,tp=2", "fsdp=4,tp_sp=2"):
        plan = preset(text, program, 8)
        assert validate(plan, layers=[n.name for n in program.layers]) == plan


@pytest.mark.parametrize("text", ["ep=4", "fsdp=2,ep=4", "dp=2,fsdp=2,tp=2"])
def test_plans_with_experts_are_valid(text):
    from lensjax.plan.validate import validate
    from lensjax.program.program import analyze
    from lensjax.search.presets import preset
    from tests.zoo import FAMILIES

    made = FAMILIES["moe_dense"].make()
    shapes = jax.eval_shape(made.init, jax.random.key(0)), jax.eval_shape(made.batch, jax.random.key(1))
    program = analyze(made.step, shapes)
    plan = preset(text, program, 8)
    assert validate(plan, layers=[n.name for n in program.layers]) == plan
