"""Gradients of scanned layers, reduced inside the backward loop (`inside` of a plan's `reduce`)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lensjax
from lensjax._errors import PlanError
from lensjax.cost.price import price
from lensjax.execute.place import device_mesh
from lensjax.models import target
from lensjax.models.targets import CONFIGS
from lensjax.passes import share_layers
from lensjax.plan.plan import Micro, Reduce
from lensjax.program.program import analyze
from lensjax.search.choose import tier_names
from lensjax.search.presets import preset
from lensjax.topology import Cluster
from lensjax.verify.collectives import collectives
from lensjax.verify.hlo import parse_hlo
from lensjax.verify.traffic import mesh_axes, step_bytes

MACHINE, SLOW = "cpu:2x4", "host"
LAYERS, WIDTH = 5, 128


def init():
    r = np.random.RandomState(0)
    on = lambda *shape: jnp.asarray(r.randn(*shape) * 0.1, jnp.float32)
    layers = {"up": on(LAYERS, WIDTH, WIDTH), "down": on(LAYERS, WIDTH, WIDTH), "bias": on(LAYERS, WIDTH)}
    return {"in": on(16, WIDTH), "layers": layers, "out": on(WIDTH, 8)}


def batch(n=0, dtype=jnp.float32):
    r = np.random.RandomState(100 + n)
    return {"x": jnp.asarray(r.randn(64, 16), dtype), "y": jnp.asarray(r.randn(64, 8), dtype)}


def layer(h, w):
    return h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None


def step(params, batch, reverse=False):
    def loss(params):
        h, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"], reverse=reverse)
        return jnp.mean((h @ params["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), {"loss": value, "grads": grads}


def under(codec, inside=True, preset="dp=2,zero1=4", fn=step, args=None, **more):
    """The step under a plan whose gradients are split over the slow tier and coded."""
    plan = lensjax.parallelize(fn, cluster=MACHINE, plan=preset).plan_for(*(args or (init(), batch())))
    reduce = Reduce(codec, split=True, inside=inside, **more)
    return lensjax.parallelize(fn, cluster=MACHINE, plan=plan.replace(reduce={SLOW: reduce}), donate=False)


def gradients(made, *args):
    return made(*(args or (init(), batch())))[1]["grads"]


def furthest(mine, expected) -> float:
    """The largest difference of a gradient over the largest gradient."""
    pairs = list(zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True))
    numbers = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(np.abs(a - b).max() for a, b in numbers) / max(np.abs(b).max() for _, b in numbers)


def crossing(made):
    """The collectives of a compiled plan that cross the slow axis."""
    mesh, axis = device_mesh(made.plan.mesh), made.plan.mesh.axes[0].name
    found = collectives(parse_hlo(made.compiled.as_text())).collectives
    return [c for c in found if axis in mesh_axes(c.groups, dict(mesh.shape))]


# ---- the numbers ----------------------------------------------------------------------------------------------------


def remat(params, batch):
    def loss(params):
        h, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"] @ params["in"], params["layers"])
        return jnp.mean((h @ params["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), {"loss": value, "grads": grads}


def half(params, batch):
    """Layers in bfloat16: the loop stacks gradients that are converted to float32 afterwards."""

    def loss(params):
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"])
        h, _ = jax.lax.scan(layer, (batch["x"] @ params["in"]).astype(jnp.bfloat16), narrow)
        return jnp.mean((h.astype(jnp.float32) @ params["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), {"loss": value, "grads": grads}


def turned(params, batch):
    """Weights that are transposed and reshaped before the loop, so gradients are after it."""
    flat = {**params["layers"], "up": params["layers"]["up"].reshape(LAYERS, -1, 2)}

    def loss(p):
        layers = {**p["layers"], "up": p["layers"]["up"].reshape(LAYERS, WIDTH, WIDTH)}
        layers["down"] = layers["down"].swapaxes(1, 2)
        h, _ = jax.lax.scan(layer, batch["x"] @ p["in"], layers)
        return jnp.mean((h @ p["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)({**params, "layers": flat})
    grads["layers"]["up"] = grads["layers"]["up"].reshape(LAYERS, WIDTH, WIDTH)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), {"loss": value, "grads": grads}


def weighed(params, batch):
    """A normaliser made of data, and layers that run from the last to the first."""

    def loss(params):
        h, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"], reverse=True)
        keep = (batch["y"][:, 0] > 0).astype(jnp.float32)
        return (keep[:, None] * (h @ params["out"] - batch["y"]) ** 2).sum() / keep.sum()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), {"loss": value, "grads": grads}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fn, preset, within",
    [
        (step, "dp=2,zero1=4", 1e-6),
        (weighed, "dp=2,fsdp=4", 1e-6),
        (turned, "dp=2,fsdp=4", 1e-6),
        (remat, "dp=2,tp=4", 1e-6),
        (half, "dp=2,fsdp=4", 1e-2),
    ],
)
def test_exact_gradients_are_those_of_the_reduction_at_the_end(fn, preset, within):
    made = under("exact", preset=preset, fn=fn)
    mine = gradients(made)
    assert furthest(mine, gradients(under("exact", False, preset, fn))) <= 1e-6
    assert furthest(mine, jax.jit(fn)(init(), batch())[1]["grads"]) <= within
    assert "of 5 gradients cross" in made.explain()


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["dp=2,zero1=4", "dp=2,fsdp=4", "dp=2,tp=4"])
def test_coded_gradients_are_within_the_codec_s_error(preset):
    """int8 is off by 1/252 of a block's largest value in each hop, of at most two replicas and their sum."""
    expected = jax.jit(step)(init(), batch())[1]["grads"]
    mine = gradients(under("int8", preset=preset))
    assert 1e-5 < furthest(mine, expected) <= 4 / 252
    assert furthest(mine, gradients(under("int8", False, preset))) <= 8 / 252


@pytest.mark.slow
def test_a_pin_is_of_the_whole_stack():
    expected = jax.jit(step)(init(), batch())[1]["grads"]["layers"]
    mine = gradients(under("int8", pins={"*/up": "exact"}))["layers"]
    assert furthest(mine["up"], expected["up"]) <= 1e-6 < 1e-5 < furthest(mine["down"], expected["down"])


def test_the_whole_stack_decides_whether_it_is_coded():
    """A layer's matrix is 64 KiB here and its bias 512 bytes; pins and the policy's size are of the stack."""
    made = under("int8")
    made(init(), batch())
    trips = {c.dtypes: c.trips for c in crossing(made) if c.trips > 1}
    assert trips == {("u8",): LAYERS, ("u16",): LAYERS}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int4", "powersgd:4", "powersgd:4:stacked=1"])
def test_what_is_remembered_has_a_row_a_layer_and_continues_bit_for_bit(codec, tmp_path):
    made, params = under(codec), init()
    seen = []
    for n in range(6):
        params, metrics = made(params, batch(n % 2))
        seen.append(float(metrics["loss"]))
        for leaf in jax.tree.leaves(params):
            copies = [np.asarray(s.data).view(np.uint32) for s in leaf.addressable_shards]
            assert all((copies[0] == c).all() for c in copies)
        if n == 2:
            made.save(tmp_path, params, n)
    assert seen[-1] < seen[0]
    rows = {k: x for k, x in made.extra.items() if k.startswith("layers/0/")}
    assert rows and all(x.shape[:2] == (LAYERS, 8) for x in rows.values())
    assert all(np.abs(np.asarray(x)).max((1, 2)).min() > 0 for x in rows.values()), "a layer remembers nothing"
    assert all(len({str(s.index) for s in x.addressable_shards}) == 8 for x in rows.values()), (
        "each device keeps its own"
    )
    made.wait()
    other = under(codec)
    other.plan_for(init(), batch())
    back = other.restore(tmp_path)
    for n in range(3, 6):
        back, _ = other(back, batch(n % 2))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    for name, x in made.extra.items():
        np.testing.assert_array_equal(x, other.extra[name])


@pytest.mark.slow
def test_steps_with_a_memory_are_those_of_the_reduction_at_the_end_bit_for_bit():
    """Blocks start where they did, so codes are the same: int4 keeps half of each error, on both hops."""
    ends = []
    for inside in (True, False):
        made, params = under("int4", inside), init()
        for n in range(3):
            params, _ = made(params, batch(n))
        ends.append(params)
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.slow
def test_what_is_remembered_makes_up_for_what_was_lost():
    """The mean of many sums of the same gradients is nearer to them than one sum, in every layer."""
    made, params = under("int4:feedback=1"), init()
    expected = jax.jit(step)(params, batch())[1]["grads"]["layers"]["up"]
    total, first = 0.0, None
    for _ in range(16):
        mine = np.asarray(gradients(made, params, batch())["layers"]["up"], np.float64)
        first = mine if first is None else first
        total = total + mine / 16
    far = lambda x: np.sqrt(((x - np.asarray(expected, np.float64)) ** 2).mean((1, 2)))
    assert (far(total) < far(first) / 4).all()


@pytest.mark.slow
def test_a_non_finite_gradient_leaves_the_memory_alone():
    made, params = under("int4"), init()
    made(params, batch())
    before = {k: np.asarray(v) for k, v in made.extra.items()}
    bad = batch(1)
    bad["x"] = bad["x"].at[3, 5].set(jnp.inf)
    grads = gradients(made, params, bad)
    assert not np.isfinite(np.asarray(grads["layers"]["up"])).all((1, 2)).any()
    for k, v in made.extra.items():
        np.testing.assert_array_equal(before[k], np.asarray(v))


# ---- of micro-batches, the last one's loop ---------------------------------------------------------------------------


def in_parts(codec, micro, inside=True, preset="dp=2,zero1=4", fn=step):
    made = under(codec, inside, preset, fn)
    return lensjax.parallelize(
        fn, cluster=MACHINE, plan=made.plan_for(init(), batch()).replace(micro=micro), donate=False
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "fn, preset, micro",
    [
        (step, "dp=2,zero1=4", Micro(2)),
        (weighed, "dp=2,fsdp:once=4", Micro(3)),  # two passes; shares of 3, 3 and 2 on each device
        (turned, "dp=2,tp=4", Micro(4)),
        (remat, "dp=2,zero1=4", Micro(4)),
        (half, "dp=2,fsdp=4", Micro(2)),
        (functools.partial(step, reverse=True), "dp=2,fsdp=4", Micro(8)),
        (step, "dp=2,fsdp=4", Micro(3, share=24)),
    ],
)
def test_micro_batches_cross_in_the_last_one_s_loop(fn, preset, micro):
    expected = jax.jit(fn)(init(), batch())[1]["grads"]
    made = in_parts("exact", micro, preset=preset, fn=fn)
    assert furthest(gradients(made), expected) <= (1e-2 if fn is half else 1e-6)
    assert {c.trips for c in crossing(made) if c.payload > 1024} <= {1, LAYERS}, "not once a micro-batch"
    assert any(c.trips == LAYERS for c in crossing(made))
    assert "inside the backward loop" in made.explain()


def test_as_many_bytes_cross_whatever_the_number_of_micro_batches():
    sent = []
    for count in (1, 4, 8):
        made = in_parts("int8", Micro(count))
        mine = gradients(made)
        sent.append(sum(step_bytes(c) for c in crossing(made) if c.dtypes != ("f32",)))
        assert furthest(mine, jax.jit(step)(init(), batch())[1]["grads"]) <= 4 / 252
        assert [c.trips for c in crossing(made) if "u8" in c.dtypes].count(LAYERS) == 2
    assert len(set(sent)) == 1, sent


@pytest.mark.slow
def test_what_is_remembered_over_micro_batches_is_as_at_the_end_bit_for_bit():
    ends = []
    for inside in (True, False):
        made, params = in_parts("int4", Micro(4), inside), init()
        for n in range(3):
            params, _ = made(params, batch(n))
        ends.append(params)
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_without_the_sums_of_the_others_the_gradient_is_wrong(monkeypatch):
    real = share_layers._Loop.__call__

    def forgets(self, offset, *values):
        count = len(self.eqn.invars) + len(self.memory)
        return real(self, offset, *values[:count], *(jnp.zeros_like(x) for x in values[count:]))

    monkeypatch.setattr(share_layers._Loop, "__call__", forgets)
    mine, expected = gradients(in_parts("exact", Micro(4))), jax.jit(step)(init(), batch())[1]["grads"]
    assert furthest(mine["layers"], expected["layers"]) > 0.1
    assert furthest(mine["out"], expected["out"]) <= 1e-6


# ---- what crosses ---------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["dp=2,fsdp=4", "dp=2,zero1=4", "dp=2,tp=4"])
def test_codes_cross_in_the_backward_loop_and_nothing_wide_does(preset):
    made = under("int8", preset=preset)
    made(init(), batch())
    slow = crossing(made)
    assert sum(step_bytes(c) for c in slow if not set(c.dtypes) <= {"u8", "u16"}) <= 8, "the loss, and nothing else"
    coded = [(c.kind, c.trips) for c in slow if "u8" in c.dtypes]
    both = ["all-gather", "all-to-all"]
    assert sorted(coded) == sorted([(k, LAYERS) for k in both] + [(k, 1) for k in both])
    assert made.plan.predicted.tiers[SLOW] == pytest.approx(sum(step_bytes(c) for c in slow), rel=0.02)


def test_a_layer_that_does_not_wait_for_the_exchange_is_what_hides_it():
    """The model of overlap sees it; 1/L more is sent (the first trip's zeros)."""
    program, cluster = analyze(step, (init(), batch())), Cluster.parse("dgx-h100:2")
    base = preset("dp=2,fsdp:once=8", program, cluster.devices, tier_of=tier_names(cluster))
    plans = [base.replace(reduce={"rail": Reduce("int8", inside=i)}) for i in (False, True)]
    end, loop = (price(program, p, cluster).predicted for p in plans)
    assert 1.0 < loop.tiers["rail"] / end.tiers["rail"] <= 1 + 1.3 / LAYERS
    assert any("inside the backward loop" in note for note in loop.findings)


class Together(share_layers._Exchange):
    """An exchange that does not keep partial gradients apart: the mapped dimension is summed by the compiler."""

    def __call__(self, offset, *values):
        from lensjax.passes.islands import Total

        count = len(self.loop.rows)
        return [*self.narrow([Total("sum")(x) for x in values[:count]]), *values[count:]]


class First(share_layers._Exchange):
    """A removed cut: the first group's partial gradients stand for all."""

    def __call__(self, *operands):
        first = jax.custom_batching.custom_vmap(lambda *xs: list(xs))
        first.def_vmap(lambda _, split, *xs: ([x[0] if b else x for x, b in zip(xs, split)], [False] * len(xs)))
        return first(*operands)[1:]


def test_without_a_cut_the_gradient_is_wrong(monkeypatch):
    monkeypatch.setattr(share_layers, "_Exchange", First)
    mine, expected = gradients(under("exact")), jax.jit(step)(init(), batch())[1]["grads"]
    assert furthest(mine["layers"], expected["layers"]) > 0.1
    assert furthest(mine["out"], expected["out"]) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("codec, within", [("bf16", 2**-7), ("int4:feedback=0.5", 0.2)])
def test_totals_that_stay_split_over_the_slow_axis(codec, within):
    """Fully sharded over the nodes too: the first of the two hops, in the loop."""
    args = init(), batch()
    made = lensjax.parallelize(step, cluster=MACHINE, plan="fsdp", secondary="exact", compress=codec, donate=False)
    plan = made.plan_for(*args)
    inside = {tier: dataclasses.replace(r, inside=True) for tier, r in plan.reduce.items()}
    made = lensjax.parallelize(step, cluster=MACHINE, plan=plan.replace(reduce=inside), donate=False)
    assert furthest(gradients(made), jax.jit(step)(*args)[1]["grads"]) <= within
    assert any(c.kind == "all-to-all" and c.trips == LAYERS for c in crossing(made))
    back = [c for c in crossing(made) if c.kind == "all-gather" and c.trips == LAYERS]
    assert all(c.payload < 1024 for c in back), "a bias is whole everywhere; nothing else travels back"
    assert all(k.startswith("layers/0/scatter/") for k in made.extra) and bool(made.extra) == ("feedback" in codec)


def test_what_cannot_be_inside():
    args = init(), batch()
    plan = lensjax.parallelize(step, cluster=MACHINE, plan="dp=2,zero1=4").plan_for(*args)
    for changes, words in [
        ({"reduce": {SLOW: Reduce(inside=True)}}, ["reduce.host.inside", "split"]),
        (
            {"reduce": {SLOW: Reduce("int8", inside=True)}, "micro": Micro(share=16)},
            ["reduce.host.inside", "any number", "micro.count"],
        ),
    ]:
        with pytest.raises(PlanError) as e:
            lensjax.parallelize(step, cluster=MACHINE, plan=plan.replace(**changes))(*args)
        assert all(w in str(e.value) for w in words)
    again = plan.replace(reduce={SLOW: Reduce("int8", inside=True)})
    assert lensjax.Plan.from_json(again.to_json()) == again


def unrolled(params, batch):
    def loss(params):
        h = batch["x"] @ params["in"]
        for n in range(LAYERS):
            h, _ = layer(h, jax.tree.map(lambda w, n=n: w[n], params["layers"]))
        return jnp.mean((h @ params["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), {"loss": value, "grads": grads}


def test_layers_that_are_not_scanned_are_reduced_at_the_end():
    made = under("exact", fn=unrolled)
    assert furthest(gradients(made), jax.jit(unrolled)(init(), batch())[1]["grads"]) <= 1e-6
    assert "no gradient crosses dp inside a loop" in made.explain()


@pytest.mark.slow
def test_compress_takes_it_where_it_is_worth_it():
    """Hidden behind the next layer on a network that is slow but not hopeless."""
    taken = set()
    for bandwidth in (50e9, 5e9):
        cluster = Cluster.parse("dgx-h100:2")
        tiers = tuple(dataclasses.replace(t, bandwidth=bandwidth) if t.name == "rail" else t for t in cluster.tiers)
        cluster = dataclasses.replace(cluster, tiers=tiers)
        made = target(dataclasses.replace(CONFIGS["llama3-tiny"], width=1024, mlp=4096, layers=12), 256, 512)
        step = lensjax.parallelize(made.step, cluster=cluster, plan="dp=2,fsdp=8", compress="int8")
        taken.add(step.plan_for(made.state, made.batch).reduce["rail"].inside)
    assert taken == {False, True}
