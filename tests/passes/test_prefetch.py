"""Weights gathered one layer ahead: the same values, the bytes of before, and a schedule that hides them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jcore
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax import Plan, PlanError, _jax
from lensjax.cost.price import price
from lensjax.models import target
from lensjax.models.targets import CONFIGS
from lensjax.passes.emit import abstract_mesh, emit
from lensjax.passes.prefetch import GATHER, prefetch
from lensjax.plan.plan import Micro, Reduce
from lensjax.plan.validate import validate
from lensjax.program.edit import all_equations, bodies, is_var
from lensjax.program.program import analyze
from lensjax.search.choose import tier_names
from lensjax.search.presets import preset
from lensjax.topology import Cluster
from lensjax.verify.hlo import parse_hlo
from lensjax.verify.proof import prove
from tests.gpu_compiler import needs_gpu_compiler
from tests.split.test_end_to_end import traced
from tests.split.test_layers_compiled import compiled
from tests.zoo import FAMILIES

WIDTH = 8


@functools.cache
def mesh():
    return jax.make_mesh((8,), ("gpu",), axis_types=(AxisType.Auto,))


def gathered(w):
    """A split weight, whole, as the pin pass writes it: cast first, then gathered."""
    w = jax.lax.with_sharding_constraint(w.astype(jnp.float32), NamedSharding(mesh(), P("gpu")))
    with jax.named_scope(GATHER):
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh(), P()))


def stack(count, remat, reverse):
    """A loop over layers with `count` weights each, another thing scanned over, a constant, a carry and a stack."""

    def layer(scale, x, ws, other):
        for w in ws:
            x = (x @ gathered(w)) % 7 + other
        return x * scale % 11

    layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def fn(scale, x, ws, others):
        def body(carry, row):
            x, n = carry
            ws, other = row
            y = layer(scale, x, ws, other)
            return (y, n + 1), (y.sum(0), other + n)

        return jax.lax.scan(body, (x, jnp.int32(0)), (ws, others), reverse=reverse)

    return fn


def whole_numbers(seed, *shape):
    return jax.random.randint(jax.random.key(seed), shape, -3, 4).astype(jnp.float32)


@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans())
@settings(max_examples=5, deadline=None)
def test_the_same_values(length, count, remat, reverse):
    """Whole numbers, so that no order of sums makes a difference."""
    args = (
        jnp.float32(3),
        whole_numbers(0, 2, WIDTH),
        tuple(whole_numbers(k + 1, length, WIDTH, WIDTH).astype(jnp.bfloat16) for k in range(count)),
        whole_numbers(9, length, WIDTH),
    )
    made = jax.make_jaxpr(stack(count, remat, reverse))(*args)
    ahead, done = prefetch(made)
    assert done.loops == (((length, count),) if length > 1 else ())
    assert ("one trip" in done.note()) == (length == 1)
    leaves = jax.tree.leaves(args)
    run = lambda jaxpr: jax.jit(jcore.jaxpr_as_fun(_jax.close(jaxpr)))(*leaves)
    for a, b in zip(run(made), run(ahead), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_gathers_of_a_trip_are_of_the_next_one():
    """Nothing that a trip computes reads what it gathers: that is only handed on."""
    args = (jnp.float32(3), jnp.zeros((2, WIDTH)), (jnp.zeros((4, WIDTH, WIDTH)),), jnp.zeros((4, WIDTH)))
    ahead, _ = prefetch(jax.make_jaxpr(stack(1, False, False))(*args))
    (loop,) = [e for e in all_equations(ahead) if e.primitive.name == "scan"]
    (body,) = map(_jax.open_jaxpr, bodies(loop))
    assert loop.params["length"] == 3
    made = {v: e for e in body.eqns for v in e.outvars}
    above, todo = set(), [a for e in body.eqns if e.primitive.name == "dot_general" for a in e.invars]
    while todo:
        if (e := made.get(todo.pop())) is not None:
            above.add(e.primitive.name)
            todo += [a for a in e.invars if is_var(a)]
    first = [e for e in body.eqns if e.primitive.name == "sharding_constraint" and e.invars[0] in made]
    assert first and all(made[e.invars[0]].primitive.name != "dot_general" for e in first)
    assert "dot_general" not in above and above <= {"sharding_constraint"}


def shared(x, w):
    return jax.lax.scan(lambda x, _: (x @ gathered(w), None), x, None, length=3)[0]


def endless(x, w):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ gathered(w), x)


def printing(x, ws):
    def body(x, w):
        jax.debug.print("{}", x.sum())
        return x @ gathered(w), None

    return jax.lax.scan(body, x, ws)[0]


def drawing(x, ws):
    def body(key, w):
        key, mine = jax.random.split(key)
        return key, (mine, x @ gathered(w))

    return jax.lax.scan(body, jax.random.key(0), ws)[1][1]


def unrolled(x, ws):
    for w in ws:
        x = x @ gathered(w)
    return x


@pytest.mark.parametrize(
    "fn, stacked, why",
    [
        (shared, False, "trips share them"),
        (endless, False, "while loop"),
        (printing, True, "effects"),
        (drawing, True, "random keys"),
        (unrolled, True, "no loop over layers"),
    ],
)
def test_what_stays_says_why(fn, stacked, why):
    w = jnp.zeros((3, WIDTH, WIDTH) if stacked else (WIDTH, WIDTH))
    made = jax.make_jaxpr(fn)(jnp.zeros((2, WIDTH)), w)
    ahead, done = prefetch(made)
    assert ahead is made and why in done.note(), done.note()


def test_in_a_plan():
    plan = preset("fsdp:again", decoder(), 8).replace(prefetch=True)
    assert Plan.from_json(plan.to_json()) == plan and validate(plan).prefetch
    old = plan.to_dict()
    del old["prefetch"]
    assert not Plan.from_dict(old).prefetch
    with pytest.raises(PlanError, match="'prefetch' of the plan does nothing"):
        validate(plan.replace(gather={"*": "once"}))
    with pytest.raises(PlanError, match="prefetch"):
        plan.export("json")
    (note,) = emit(decoder(), plan, abstract_mesh(plan)).notes
    assert "2 scanned layers are gathered one layer ahead" in note


@functools.cache
def decoder(batch=16, seq=32, **changes):
    sizes = dict(width=64, kv_heads=8, mlp=128, layers=2, vocab=256) | changes
    step, state, example = target("llama3-tiny", batch, seq, **sizes)
    return analyze(step, (state, example))


def test_priced_with_what_the_loop_copies():
    """The bytes on the wire of before; one more gathered layer, its copy, and less waiting."""
    cluster = Cluster.parse("dgx-h100:1")
    p = decoder(8, 1024, width=1024, mlp=4096, layers=8, vocab=512)
    plain = preset("fsdp:again", p, 8, tier_of=tier_names(cluster))
    was, now = (price(p, plain.replace(prefetch=on), cluster).predicted for on in (False, True))
    assert was is not None and now is not None
    assert now.tiers == pytest.approx(was.tiers)
    assert now.detail["exposed"] < was.detail["exposed"]
    assert was.detail["compute"] < now.detail["compute"] < 1.1 * was.detail["compute"]
    assert was.peak_bytes < now.peak_bytes


# nn.scan with remat and dropout, NNX scan, nn.scan with grouped heads, bfloat16 beside float32 masters, scan over time.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ahead",
    [
        ("gpt_scan_remat_dropout", True),
        ("nnx_gpt_scan", True),
        ("gqa_rope_swiglu", True),
        ("bf16_masters", True),
        ("lstm_scan", False),
    ],
)
@pytest.mark.parametrize("text", ["fsdp:again", "dp=2,fsdp:again=4"])
def test_families_equal_one_device(name, ahead, text):
    p, whole = traced(name)
    plan = preset(text, p, 8, tier_of=tier_names(Cluster.parse("cpu:2x4"))).replace(prefetch=True)
    if text.startswith("dp"):
        plan = plan.replace(reduce={"host": Reduce(split=True, inside=True)})
    expected = whole()
    mine, notes = compiled(p, plan)
    where = [i for i, path in enumerate(p.result_paths) if "grads" in path.split("/")]
    largest = max(np.abs(expected[i]).max() for i in where)
    far = max(np.abs(mine[i] - expected[i]).max() for i in where) / largest
    print(f"{name} {text}: {far:.1e}; {notes}")
    assert far <= (2e-6 if FAMILIES[name].dtype == "float32" else 2e-2)
    assert ahead == any("one layer ahead" in n for n in notes)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"layers": {"*": "inputs"}}, {"micro": Micro(2)}])
def test_with_recompute_and_micro_batches(change):
    p, whole = traced("gpt_scan_remat_dropout" if "micro" in change else "gqa_rope_swiglu")
    plan = preset("fsdp:again", p, 8).replace(prefetch=True, **change)
    expected, (mine, notes) = whole(), compiled(p, plan)
    assert any("one layer ahead" in n for n in notes), notes
    where = [i for i, path in enumerate(p.result_paths) if "grads" in path.split("/")]
    largest = max(np.abs(expected[i]).max() for i in where)
    assert max(np.abs(mine[i] - expected[i]).max() for i in where) <= 2e-6 * largest


def windows(hlo):
    """For each loop body that gathers: (trips' matmuls between the start and the end of its gathers, whether it also
    reduces gradients)."""
    found = []
    for computation in parse_hlo(hlo).computations.values():
        all_ = computation.instructions
        starts = [n for n, i in enumerate(all_) if i.opcode == "all-gather-start"]
        if not starts or computation.name.startswith("main"):
            continue
        between = 0
        for at in starts:
            done = next(n for n, k in enumerate(all_) if k.opcode == "all-gather-done" and all_[at].name in k.operands)
            between += sum("cublas" in x.tail for x in all_[at + 1 : done])
        found.append((between, any(i.opcode == "reduce-scatter-start" for i in all_)))
    return sorted(found, key=lambda w: w[1])


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("spec, text", [("dgx-h100:1", "fsdp:again=8"), ("dgx-h100:2", "fsdp:again=16")])
def test_compiled_for_h100(spec, text, tmp_path, monkeypatch):
    """Without it no matmul runs while a layer's weights are gathered (one gather at the top of each body); with it,
    forward and backward, and the bytes are those of before. XLA's own option moves the backward's gathers to where
    nothing hides them."""
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))
    cluster = Cluster.parse(spec)
    config = dataclasses.replace(CONFIGS["llama3-tiny"], width=512, kv_heads=8, mlp=2048, layers=6)
    made = target(config, 32, 256)
    p = analyze(made.step, (made.state, made.batch))
    base = preset(text, p, cluster.devices, tier_of=tier_names(cluster))
    proofs = [prove(p, price(p, base.replace(prefetch=on), cluster), cluster) for on in (False, True)]
    (before, b), (after, a) = ((windows(x.audit.artifact.hlo), x.audit) for x in proofs)
    print(f"{spec}: matmuls beside gathers, forward and backward: {before} -> {after}")
    assert [w[1] for w in before] == [w[1] for w in after] == [False, True]
    assert [w[0] for w in before] == [0, 0] and min(w[0] for w in after) >= 4
    assert a.traffic.tiers == pytest.approx(b.traffic.tiers)
    for tier, (planned, found) in proofs[1].tiers.items():
        assert found == pytest.approx(planned, rel=0.02), tier
    assert a.peak.bytes == pytest.approx(proofs[1].predicted.peak_bytes, rel=0.1)
    assert a.peak.bytes <= b.peak.bytes + 2 * 2**20 * 8  # a layer's weights, twice


def test_loops_that_keep_values_on_the_host_stay():
    """Their stacks are in another memory: rows are written there by the loop itself only."""

    def step(params, x):
        layer = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)
        grads = jax.grad(lambda p: jnp.square(jax.lax.scan(layer, x, p)[0]).mean())(params)
        return jax.tree.map(jnp.subtract, params, grads)

    on = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    program = analyze(step, ({"up": on(3, 128, 128), "down": on(3, 128, 128)}, on(32, 4, 128)))
    plan = preset("fsdp:again=8", program, 8, tier_of=tier_names(Cluster.parse("dgx-h100:1")))
    notes = emit(program, plan.replace(prefetch=True, layers={"*": "offload"}), abstract_mesh(plan)).notes
    assert "not gathered ahead in a loop that keeps values in the host's memory" in " ".join(notes)
