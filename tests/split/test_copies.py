"""Weights that are split over all devices cross the slow tier once a step, for a copy inside each node."""

import dataclasses
import math

import jax
import pytest

import lensjax
from lensjax._errors import PlanError
from lensjax.cost.price import price
from lensjax.models import target
from lensjax.models.targets import CONFIGS
from lensjax.plan.plan import Axis, Micro, Reduce
from lensjax.program.program import analyze
from lensjax.search.choose import tier_names
from lensjax.search.presets import preset
from lensjax.search.secondary import with_copies
from lensjax.topology import Cluster
from tests.comm.wire import sent
from tests.split.test_codes import MACHINE, SLOW, batch, init, needs_gpu_compiler, spread, step

MESH = jax.make_mesh((2, 4), ("fsdp_out", "fsdp"))


def plain(state, batch):
    state, metrics = step(state, batch)
    return state, {"loss": metrics["loss"]}


def decorated(fn=step, **options):
    return lensjax.parallelize(fn, cluster=MACHINE, plan=options.pop("plan", "fsdp"), donate=False, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    "secondary, compress, most",
    [("exact", "off", 1e-6), ("bf16", "off", 0.004), ("int8", "int8", 0.02), ("int8", "int4", 0.175)],
)
def test_gradients_are_those_of_one_device_within_the_codes_error(secondary, compress, most, micro):
    state = init(jax.random.key(0))
    made = decorated(secondary=secondary, compress=compress)
    if micro > 1:
        made = decorated(plan=made.plan_for(state, batch()).replace(micro=Micro(micro)))
    (after, mine), (wanted, expected) = made(state, batch()), jax.jit(step)(state, batch())
    for name in ("up", "down", "norm"):
        assert spread(mine["grads"][name], expected["grads"][name]) <= most, name
        # The weights themselves are not rounded: what they differ by comes from the gradients.
        apart = abs(after.params[name] - wanted.params[name]).max()
        assert apart <= 0.05 * abs(mine["grads"][name] - expected["grads"][name]).max() + 1e-7, name


def test_only_codes_cross_and_each_weight_once():
    state = init(jax.random.key(0))
    made = decorated(plain, secondary="int8", compress="int4")
    made(state, batch())
    found = [s for s in sent(made.compiled.as_text(), MESH) if "fsdp_out" in s.axes]
    gathers = [s for s in found if s.kind == "all-gather" and s.dtypes == ("u8",)]
    scatters = [s for s in found if s.kind == "all-to-all" and s.dtypes == ("u8",)]
    assert len(gathers) == 2 and len(scatters) == 1, found
    values = (128 * 256 + 256 * 130) // 8  # of one device
    zero3 = 3 * 2 * values  # bfloat16, two gathers and a reduce-scatter, between two nodes
    assert sum(s.bytes for s in gathers + scatters) <= 0.27 * zero3
    assert sum(s.bytes for s in found if "f32" in s.dtypes) <= 1024  # the router's weight, the loss
    assert sum(s.bytes for s in found) == pytest.approx(made.plan.predicted.tiers[SLOW], rel=0.02)
    assert "weights cross 'host' once a step, as int8" in made.explain()


def test_a_step_goes_on_where_it_was_saved(tmp_path):
    state = init(jax.random.key(0))
    made = decorated(secondary="int8", compress="int4")
    state, _ = made(state, batch(0))
    made.save(tmp_path / "here", state, 1)
    made.wait()
    expected, _ = made(state, batch(1))
    again = decorated(plan=made.plan)
    again.plan_for(state, batch(1))
    found, _ = again(again.restore(tmp_path / "here"), batch(1))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a == b).all()


def test_a_tier_s_axis_is_cut_where_its_nodes_end():
    state = init(jax.random.key(0))
    program, cluster = analyze(step, (state, batch())), Cluster.parse(MACHINE)
    plan = preset("fsdp", program, 8, tier_of=tier_names(cluster))
    made = with_copies(program, plan, SLOW, "int8", tier_names(cluster))
    assert made.mesh.axes == (Axis("fsdp_out", 2, SLOW), Axis("fsdp", 4, "process"))
    assert made.leaves["state/params/up"] == ((), ("fsdp", "fsdp_out"))
    assert made.rules.activations["batch"] == ("fsdp_out", "fsdp")
    assert made.reduce[SLOW] == Reduce(split=True) and lensjax.Plan.from_json(made.to_json()) == made


def test_what_cannot_be_copied_is_said():
    state = init(jax.random.key(0))
    for wrong in (8, "int3", "auto"):
        with pytest.raises(PlanError, match="secondary="):
            lensjax.parallelize(step, secondary=wrong)
    for plan in ("dp", "dp=2,fsdp=4"):
        found = decorated(plan=plan, secondary="int8").plan_for(state, batch())
        assert not found.secondary and any("secondary='int8' changes nothing" in f for f in found.predicted.findings)
    with_one = decorated(secondary="int8").plan_for(state, batch())
    for changes, words in [
        ({"reduce": {}}, ["secondary.host", "reduce.host"]),
        ({"secondary": {"nowhere": "int8"}}, ["secondary.nowhere", "tiers:"]),
        ({"secondary": {SLOW: "powersgd:4"}}, ["secondary.host", "powersgd"]),
        ({"leaves": {**with_one.leaves, "state/params/up": ((), ("fsdp_out", "fsdp"))}}, ["params/up", "last"]),
    ]:
        with pytest.raises(PlanError) as e:
            decorated(plan=with_one.replace(**changes)).plan_for(state, batch())
        assert all(w in str(e.value) for w in words), str(e.value)
    with pytest.raises(PlanError, match="secondary"):
        with_one.export("python")


@pytest.mark.slow
@needs_gpu_compiler
def test_compiled_for_two_nodes_of_h100_a_quarter_of_the_bytes_crosses(tmp_path, monkeypatch):
    """Against fully sharded training in bfloat16: two gathers and a reduce-scatter of every weight."""
    from lensjax.verify.proof import prove

    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))
    made = target(dataclasses.replace(CONFIGS["llama3-tiny"], width=512, kv_heads=8, mlp=2048), 32, 64)
    program, cluster = analyze(made.step, (made.state, made.batch)), Cluster.parse("dgx-h100:2")
    plan = preset("fsdp", program, cluster.devices, tier_of=tier_names(cluster))
    plan = with_copies(program, plan, "rail", "int8", tier_names(cluster))
    plan = price(program, plan.replace(reduce={"rail": Reduce("int4")}), cluster)
    proof = prove(program, plan, cluster)
    predicted, compiled = proof.tiers["rail"]
    assert compiled == pytest.approx(predicted, rel=0.02)
    split = [a for a in program.arguments if a.role == "parameter" and "fsdp_out" in str(plan.leaves.get(a.path))]
    zero3 = 3 * 2 * sum(math.prod(a.shape) for a in split) / 16
    print(f"{compiled / zero3:.3f} of bfloat16 ZeRO-3")
    assert compiled <= 0.27 * zero3
