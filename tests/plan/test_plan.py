"""Plans are data: they round-trip, and a file that is not one says which field is wrong."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from lensjax import Plan, PlanError
from lensjax.plan.grammar import NAMES, parse
from lensjax.plan.pins import apply_pin, find, matches, normalize
from lensjax.plan.plan import Axis, MeshPlan, Micro, Pipeline, Predicted, Provenance, Reduce, Rules

names = st.text("abcdefgh_/", min_size=1, max_size=8)
floats = st.floats(0, 1e18)
axes = st.lists(names, max_size=2).map(tuple)
specs = st.lists(axes, max_size=4).map(tuple)
maps = lambda values: st.dictionaries(names, values, max_size=3)
rules = st.builds(Rules, maps(axes), maps(axes), maps(axes), maps(axes))
plans = st.builds(
    Plan,
    mesh=st.builds(
        MeshPlan,
        st.lists(st.builds(Axis, names, st.integers(1, 512), names), max_size=3).map(tuple),
        st.none() | st.lists(st.integers(0, 99), max_size=4).map(tuple),
    ),
    name=names,
    rules=rules,
    leaves=maps(specs),
    gather=maps(st.sampled_from(["once", "again"])),
    layers=maps(names),
    micro=st.builds(Micro, st.integers(1, 64), st.none() | st.integers(1, 64)),
    reduce=maps(st.builds(Reduce, names, st.none() | st.integers(1, 1 << 30))),
    chunks=st.integers(1, 64),
    host=axes,
    prefetch=st.booleans(),
    pipeline=st.none()
    | st.builds(Pipeline, st.integers(1, 8), names, st.none() | st.lists(st.integers(1, 9)).map(tuple)),
    flags=maps(names),
    predicted=st.none()
    | st.builds(
        Predicted, floats, floats, maps(floats), maps(floats), maps(floats), st.lists(names, max_size=2).map(tuple)
    ),
    provenance=st.builds(Provenance, names, names, maps(names), st.booleans(), names),
)


@given(plans)
def test_json_round_trip(plan):
    assert Plan.from_json(plan.to_json()) == plan


@given(plans, st.data())
def test_a_plan_with_any_field_spoilt_is_refused_by_name(plan, data):
    fields = plan.to_dict()
    name = data.draw(st.sampled_from(sorted(set(fields) - {"schema"})))
    fields[name] = 1.5
    with pytest.raises(PlanError, match=name):
        Plan.from_dict(fields)


@given(plans, names.filter(lambda n: n not in Plan.__dataclass_fields__))
def test_an_unknown_field_is_named(plan, name):
    with pytest.raises(PlanError, match="does not know"):
        Plan.from_dict({**plan.to_dict(), name: 1})


@pytest.mark.parametrize(
    "text, message", [("[]", "JSON object"), ("{", "not JSON"), ("{}", "'schema' of the plan is None")]
)
def test_files_that_are_no_plan(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_replace_drops_the_prediction_that_was_for_the_old_fields():
    plan = Plan(MeshPlan((Axis("dp", 8),)), predicted=Predicted(1.0, 1.0, {}))
    assert plan.replace(name="other").predicted is None
    assert json.loads(plan.to_json())["schema"] == 1


@given(st.permutations(NAMES), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(1, 6))
def test_sizes_multiply_to_the_devices(order, sizes, rest):
    devices = rest
    for s in sizes:
        devices *= s
    chosen = [n for n in order if n != "dp"][: len(sizes)]
    terms = parse(",".join(f"{n}={s}" for n, s in zip(chosen, sizes)), devices)
    product = 1
    for t in terms:
        product *= t.size
    assert product == devices
    assert [t.name for t in terms if t.name != "dp"] == chosen


def test_a_name_alone_takes_every_device_and_the_missing_factor_is_dp():
    assert [(t.name, t.size) for t in parse("fsdp", 8)] == [("fsdp", 8)]
    assert [(t.name, t.size) for t in parse("fsdp=4", 8)] == [("dp", 2), ("fsdp", 4)]
    assert [(t.name, t.size) for t in parse("dp,fsdp=4", 8)] == [("dp", 2), ("fsdp", 4)]
    assert parse("fsdp:once=4", 8)[1].gather == "once"


@given(st.text(max_size=20), st.integers(1, 64))
def test_any_text_parses_or_is_refused_in_words(text, devices):
    try:
        parse(text, devices)
    except PlanError as e:
        assert e.message


def test_the_first_pin_that_matches_wins_and_the_arguments_name_is_optional():
    pins = normalize({"params/a/*": (None, "x"), "params/*": ()})
    assert find(pins, "state/params/a/kernel") is pins[0] and find(pins, "params/b") is pins[1]
    assert matches("*/kernel", "state/params/a/kernel") and not matches("kernel", "state/params/kernel")


def test_a_pin_takes_its_axis_from_the_dimensions_that_it_leaves_free():
    (pin,) = normalize({"w": ("x",)})
    assert apply_pin(pin, "w", (8, 8), ((), ("x",)), {"x": 4}) == (("x",), ())


def test_a_partition_spec_is_a_pin_and_unconstrained_is_free():
    (pin,) = normalize({"w": PartitionSpec(None, ("x", "y"), PartitionSpec.UNCONSTRAINED)})
    assert pin.dims == ((), ("x", "y"), None)
    mesh, spec = {"x": 2, "y": 2, "z": 2}, (("z",), (), ("x", "z"), ("z",))
    assert apply_pin(pin, "w", (8, 8, 8, 8), spec, mesh) == ((), ("x", "y"), ("z",), ("z",))


def test_a_plan_file_that_is_no_text(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="is not text in UTF-8") as e:
        Plan.load(path)
    assert "plan.save" in e.value.hint


def test_a_plan_that_cannot_be_written_says_where_and_loses_nothing(tmp_path, monkeypatch):
    plan = Plan(MeshPlan((Axis("dp", 8),)))
    with pytest.raises(PlanError, match=r"cannot write the plan to .*nowhere"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(PlanError, match="it is a folder"):
        plan.save(tmp_path)
    target = tmp_path / "plan.json"
    plan.save(target)
    before = target.read_text()

    def full(self, *_, **__):
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(pathlib.Path, "write_text", full)
        with pytest.raises(PlanError, match="No space left on device"):
            plan.save(target)
    assert target.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    link = tmp_path / "link.json"
    link.symlink_to(target)
    plan.save(link)
    assert link.is_symlink() and Plan.load(link) == plan
