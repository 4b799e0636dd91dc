"""Gradients that cross the slow tier as codes, from the plan's `reduce` field to the wire."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import lensjax
from lensjax._errors import PlanError
from lensjax.cost.price import price
from lensjax.execute.place import device_mesh
from lensjax.models import target
from lensjax.models.targets import CONFIGS
from lensjax.plan.plan import Micro, Plan, Reduce
from lensjax.program.program import analyze
from lensjax.search.choose import tier_names
from lensjax.search.presets import preset
from lensjax.topology import Cluster
from tests.comm.wire import along, sent
from tests.gpu_compiler import needs_gpu_compiler
from tests.split.harness import between_nodes

MACHINE = "cpu:2x4"
SLOW = "host"


def init(key):
    shapes = {"up": (128, 256), "norm": (256,), "down": (256, 130), "router": {"kernel": (130, 8)}}
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))
    params = [jax.random.normal(jax.random.fold_in(key, i), s) / 16 for i, s in enumerate(leaves)]
    return TrainState.create(
        apply_fn=None, params=jax.tree.unflatten(tree, params), tx=optax.sgd(0.05, momentum=0.9)
    )  # fmt: skip


def step(state, batch):
    def loss_fn(p):
        h = jax.nn.gelu(batch["x"] @ p["up"]) * (1 + p["norm"])
        y = h @ p["down"]
        return jnp.mean((y - batch["y"]) ** 2) + jnp.mean((y @ p["router"]["kernel"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads}


def batch(n=0):
    k = jax.random.key(100 + n)
    return {"x": jax.random.normal(k, (32, 128)), "y": jax.random.normal(jax.random.fold_in(k, 1), (32, 130))}


@functools.cache
def base(preset: str) -> Plan:
    return lensjax.parallelize(step, cluster=MACHINE, plan=preset).plan_for(init(jax.random.key(0)), batch())


def under(codec: str, preset: str = "dp=2,zero1=4", micro: int = 1, bucket: int | None = None):
    plan = base(preset).replace(reduce={SLOW: Reduce(codec, bucket)}, micro=Micro(micro))
    return lensjax.parallelize(step, cluster=MACHINE, plan=plan, donate=False)


def spread(mine, expected) -> float:
    """The rms of a difference over the rms of what was expected."""
    mine, expected = np.asarray(mine, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean((mine - expected) ** 2) / np.mean(expected**2)))


# Rms errors of two hops over two replicas, for Gaussian values: communication in this precision is worth so much.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "codec, preset, micro, most",
    [
        ("bf16", "dp=2,zero1=4", 1, 0.004),
        ("int8", "dp=2,zero1=4", 1, 0.01),
        ("int8", "dp=2,fsdp=4", 4, 0.01),
        ("int8", "dp=2,tp=4", 1, 0.01),
        ("int4", "dp=2,zero1=4", 2, 0.175),
    ],
)
def test_gradients_are_those_of_one_device_within_the_codec_s_error(codec, preset, micro, most):
    state = init(jax.random.key(0))
    made = under(codec, preset, micro)
    (_, mine), (_, expected) = made(state, batch()), jax.jit(step)(state, batch())
    np.testing.assert_allclose(mine["loss"], expected["loss"], rtol=1e-6)  # the loss is no gradient: exact
    worst = {}
    for (path, g), e in zip(jax.tree.leaves_with_path(mine["grads"]), jax.tree.leaves(expected["grads"])):
        worst[jax.tree_util.keystr(path)] = spread(g, e)
    assert max(worst.values()) <= most, worst
    assert worst["['up']"] > 1e-6, "nothing was coded"
    assert worst["['norm']"] <= 0.004 and worst["['router']['kernel']"] <= 0.004, "small leaves go as bf16"


def test_single_parameters_have_codecs_of_their_own():
    state = init(jax.random.key(0))
    compress = {"*/up": "exact", "*": "int4", "*/norm": "exact"}
    made = lensjax.parallelize(step, cluster=MACHINE, plan="dp=2,zero1=4", compress=compress, donate=False)
    (_, mine), (_, expected) = made(state, batch()), jax.jit(step)(state, batch())
    apart = {name: spread(mine["grads"][name], expected["grads"][name]) for name in ("up", "norm", "down")}
    assert apart["up"] < 1e-6 and apart["norm"] < 1e-6 and 0.01 < apart["down"] < 0.175, apart
    assert "*/up as exact" in made.explain()
    assert lensjax.Plan.from_json(made.plan.to_json()) == made.plan


@pytest.mark.few(1)
@pytest.mark.parametrize("codec, wide", [("int8", "u8"), ("int4", "u8")])
@pytest.mark.parametrize("preset", ["dp=2,fsdp=4", "dp=2,tp=4"])
def test_only_codes_cross_the_slow_tier(codec, wide, preset):
    """Besides the codes: bf16 as uint16 for small leaves, and the loss, four bytes. Split gradients are coded shard by
    shard: nothing is gathered first."""
    made = under(codec, preset)
    made(init(jax.random.key(0)), batch())
    axis = made.plan.mesh.axes[0].name
    slow = along(sent(made.compiled.as_text(), device_mesh(made.plan.mesh)), axis)
    coded = [s for s in slow if set(s.dtypes) <= {wide, "u16"}]
    assert all(s.axes == (axis,) for s in coded)
    assert sorted(s.kind for s in coded if s.dtypes == (wide,)) == ["all-gather", "all-to-all"]  # one bucket
    assert sum(s.bytes for s in slow if s not in coded) <= 8
    values = (128 * 256 + 256 * 130) / 4  # of the two matrices, per device
    per_value = {"int8": 1 + 2 / 128, "int4": 0.5 + 2 / 128}[codec]
    wire = sum(s.bytes for s in coded if s.dtypes == (wide,))
    assert wire == pytest.approx(values * per_value, rel=0.02)  # two hops, each sends half of it elsewhere
    predicted = made.plan.predicted.tiers[SLOW]
    assert predicted == pytest.approx(sum(s.bytes for s in slow), rel=0.02)


def test_the_memory_of_a_codec_lives_in_extra_and_replicas_stay_equal():
    made = under("int4")
    state = init(jax.random.key(0))
    seen = []
    for n in range(6):
        state, metrics = made(state, batch(n))
        seen.append(float(metrics["loss"]))
        copies = [np.asarray(s.data) for s in state.params["up"].addressable_shards]
        assert all((copies[0] == c).all() for c in copies)
    assert list(made.extra) and all(name.startswith("reduce/") for name in made.extra)
    assert all(x.shape[0] == 8 and x.sharding.num_devices == 8 for x in made.extra.values())
    assert any(np.abs(np.asarray(x)).max() > 0 for x in made.extra.values())
    assert seen[-1] < seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "powersgd:4"])
def test_two_hundred_steps_leave_all_replicas_the_same_bits(codec, tmp_path):
    """And a run that is taken up again in the middle ends with the same bits as one that was not."""
    made, state = under(codec), init(jax.random.key(0))
    for n in range(200):
        state, metrics = made(state, batch(n % 7))
        if n == 99:
            made.save(tmp_path, state, n)
    assert np.isfinite(metrics["loss"])
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(s.data).view(np.uint32) for s in leaf.addressable_shards]
        assert all((copies[0] == c).all() for c in copies)
    again = under(codec)
    again.plan_for(init(jax.random.key(0)), batch())
    made.wait()
    resumed = again.restore(tmp_path)
    for n in range(100, 200):
        resumed, _ = again(resumed, batch(n % 7))
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.slow
def test_saved_and_restored_it_continues_bit_for_bit(tmp_path):
    made, state = under("int4"), init(jax.random.key(0))
    for n in range(3):
        state, _ = made(state, batch(n))
    made.save(tmp_path, state, 3)
    made.wait()
    for n in range(3, 6):
        state, metrics = made(state, batch(n))
    other = under("int4")
    other.plan_for(init(jax.random.key(1)), batch())
    back = other.restore(tmp_path)
    for n in range(3, 6):
        back, again = other(back, batch(n))
    jax.tree.map(np.testing.assert_array_equal, (state.params, metrics), (back.params, again))


def before_a_bad_batch(value):
    """(a step that has run once, its state, its memory, a batch with `value` in it)."""
    made, state = under("int4"), init(jax.random.key(0))
    state, _ = made(state, batch(0))
    bad = batch(1)
    bad["x"] = bad["x"].at[3, 5].set(value)
    return made, state, {k: np.asarray(v) for k, v in made.extra.items()}, bad


def test_a_non_finite_gradient_is_seen_everywhere_and_leaves_the_memory_alone():
    made, state, before, bad = before_a_bad_batch(jnp.inf)
    _, metrics = made(state, bad)
    assert not np.isfinite(np.asarray(metrics["grads"]["up"])).all()
    for k, v in made.extra.items():
        np.testing.assert_array_equal(before[k], np.asarray(v))


def test_a_step_that_jax_was_asked_to_stop_at_puts_the_memory_back():
    """jax_debug_nans: state and hidden state are what they were before the call, and training goes on."""
    made, state, before, bad = before_a_bad_batch(jnp.nan)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            made(state, bad)
    assert any(np.abs(v).max() > 0 for v in before.values())
    for k, v in made.extra.items():
        np.testing.assert_array_equal(before[k], np.asarray(v))
    _, metrics = made(state, batch(2))
    assert np.isfinite(metrics["loss"])


def test_what_cannot_be_meant_is_refused_by_its_field():
    state = init(jax.random.key(0))
    for reduce, words in [
        ({SLOW: Reduce("int3")}, ["reduce.host.codec", "int3", "codecs:"]),
        ({SLOW: Reduce("int8", bucket=0)}, ["reduce.host.bucket"]),
        ({SLOW: Reduce(bucket=1024)}, ["reduce.host.bucket", "exact"]),
        ({SLOW: Reduce(pins={"*/up": "exact"})}, ["reduce.host.pins", "exact"]),
        ({SLOW: Reduce("int8", pins={"*/up": "int3"})}, ["reduce.host.pins.*/up", "int3"]),
        ({SLOW: Reduce("int8", pins={"*/upp": "exact"})}, ["reduce.host.pins", "*/upp", "params/up"]),
        ({"process": Reduce("int8"), SLOW: Reduce("int4")}, ["reduce.host", "reduce.process", "one exchange"]),
    ]:
        made = lensjax.parallelize(step, cluster=MACHINE, plan=base("dp=2,zero1=4").replace(reduce=reduce))
        with pytest.raises(PlanError) as e:
            made.plan_for(state, batch())
        assert all(w in str(e.value) for w in words), str(e.value)


def test_compress_says_what_it_decided():
    state = init(jax.random.key(0))
    with pytest.raises(PlanError, match="int3"):
        lensjax.parallelize(step, compress="int3")
    with pytest.raises(PlanError, match="expected a codec"):
        lensjax.parallelize(step, compress=8)
    made = lensjax.parallelize(step, cluster=MACHINE, plan="dp=2,zero1=4", compress="int8")
    plan = made.plan_for(state, batch())
    assert plan.reduce[SLOW].codec == "int8"
    assert "int8" in made.explain() and "1/252" in made.explain()
    assert not lensjax.parallelize(step, cluster=MACHINE, plan="dp=2,zero1=4").plan_for(state, batch()).reduce
    for wrong in ({"*/up": "int8"}, {"*": "off", "*/up": "int8"}, {"*": "int8", "*/up": "int3"}, {"*": 8}):
        with pytest.raises(PlanError, match="compress="):
            lensjax.parallelize(step, compress=wrong)
    inside = lensjax.parallelize(step, cluster="cpu:8", plan="dp", compress="int8").plan_for(state, batch())
    assert not inside.reduce and any("slow tier" in f for f in inside.predicted.findings)


@pytest.mark.few(1)
@pytest.mark.parametrize("bandwidth, codes", [(50e9, False), (10e6, True)])
def test_auto_compresses_where_it_pays(bandwidth, codes):
    cluster = Cluster.parse(MACHINE)
    tiers = tuple(dataclasses.replace(t, bandwidth=bandwidth) if t.name == SLOW else t for t in cluster.tiers)
    cluster = dataclasses.replace(cluster, tiers=tiers)
    made = lensjax.parallelize(step, cluster=cluster, plan="dp=2,zero1=4", compress="auto")
    plan = made.plan_for(init(jax.random.key(0)), batch())
    assert bool(plan.reduce) == codes
    assert any("compress='auto'" in f for f in plan.predicted.findings)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    "nodes, inside", [(2, "fsdp:once=8"), (2, "fsdp:once=4,tp=2"), (64, "fsdp:once=4,tp=2")], ids=str
)
def test_compiled_for_nodes_of_h100_only_codes_cross(nodes, inside, tmp_path, monkeypatch):
    """One all-to-all and one all-gather a bucket; nothing is gathered over the tensor axis on the way, and nothing wide
    but scalars (the loss, the clip's norm) leaves a node."""
    from lensjax.verify.proof import prove

    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))
    config = dataclasses.replace(CONFIGS["llama3-tiny"], width=256, kv_heads=8, mlp=1024)
    made = target(config, 16 * nodes, 64)
    program, cluster = analyze(made.step, (made.state, made.batch)), Cluster.parse(f"dgx-h100:{nodes}")
    plain = preset(f"dp={nodes},{inside}", program, cluster.devices, tier_of=tier_names(cluster))
    slow = plain.mesh.axes[0].tier  # the rails of two nodes; the spine of more than a scalable unit
    plan = price(program, plain.replace(reduce={slow: Reduce("int8")}), cluster)
    proof = prove(program, plan, cluster)
    across, wide = between_nodes(proof)
    assert sum(c.payload for c in wide) <= 64, wide
    coded = [c.kind for c in across if "u8" in c.dtypes]  # XLA may join the gathers of codes and of bf16 into one
    assert coded.count("all-to-all") == coded.count("all-gather") == 1
    assert all(c.trips == 1 for c in across if c not in wide)
    for tier in proof.tiers.keys() - {"nvlink"}:
        predicted, compiled = proof.tiers[tier]
        assert compiled == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
def test_other_functions_and_other_batches_live_with_a_codec():
    """An evaluation of the state has no gradient to code; a smaller batch goes on with the same memory."""
    made, state = under("int4"), init(jax.random.key(0))
    state, _ = made(state, batch())
    held = {k: np.asarray(v) for k, v in made.extra.items()}
    evaluate = made.companion(lambda state, batch: {"y": batch["x"] @ state.params["up"]})
    out = evaluate(state, batch())
    np.testing.assert_allclose(out["y"], batch()["x"] @ np.asarray(state.params["up"]), rtol=1e-4, atol=1e-4)
    assert all((held[k] == np.asarray(v)).all() for k, v in made.extra.items())
    small = jax.tree.map(lambda x: x[:16], batch(1))
    after, metrics = made(state, small)
    _, expected = jax.jit(step)(state, small)
    assert spread(metrics["grads"]["up"], expected["grads"]["up"]) < 0.3
    assert any((held[k] != np.asarray(v)).any() for k, v in made.extra.items())
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_pattern_of_compress_that_matches_nothing_is_refused():
    """It would leave everything exact, or code what it should protect."""
    made = lensjax.parallelize(step, cluster=MACHINE, compress={"*/nothing/*": "exact", "*": "int8"})
    with pytest.raises(PlanError, match=r"compress: .*nothing"):
        made.plan_for(init(jax.random.key(0)), batch())


def test_a_codec_of_whole_gradients_is_refused_where_each_device_keeps_a_part():
    """PowerSGD makes factors of totals; where the optimizer keeps parts over the slow axis they would cross exactly."""
    made = lensjax.parallelize(step, cluster=MACHINE, plan="fsdp")
    plan = made.plan_for(init(jax.random.key(0)), batch())
    slow = {SLOW: Reduce("powersgd:4")}
    with pytest.raises(PlanError, match="needs whole gradients"):
        lensjax.parallelize(step, cluster=MACHINE, plan=plan.replace(reduce=slow))(init(jax.random.key(0)), batch())
    said = lensjax.parallelize(step, cluster=MACHINE, plan="fsdp", compress="powersgd:4")
    said.plan_for(init(jax.random.key(0)), batch())
    assert "needs whole gradients" in said.explain() and not said.plan.reduce
