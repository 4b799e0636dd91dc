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
from lensjax.verify.proof import prove
from lensjax.verify.traffic import mesh_axes, step_bytes
from tests.gpu_compiler import needs_gpu_compiler
from tests.split.harness import between_nodes

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
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}


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
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}


def half(params, batch):
    """Layers in bfloat16: the loop stacks gradients that are converted to float32 afterwards."""

    def loss(params):
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"])
        h, _ = jax.lax.scan(layer, (batch["x"] @ params["in"]).astype(jnp.bfloat16), narrow)
        return jnp.mean((h.astype(jnp.float32) @ params["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}


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
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}


def weighed(params, batch):
    """A normaliser made of data, and layers that run from the last to the first."""

    def loss(params):
        h, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"], reverse=True)
        keep = (batch["y"][:, 0] > 0).astype(jnp.float32)
        return (keep[:, None] * (h @ params["out"] - batch["y"]) ** 2).sum() / keep.sum()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "fn, preset, within",
    [
        (step, "dp=2,zero1=4", 1e-6),
        (weighed, "dp=2,fsdp=4", 1e-6),
        (turned, "dp=2,fsdp=4", 1e-6),
        (remat, "dp=2,tp=4", 1e-6),
        (remat, "fsdp=8", 1e-6),  # totals stay split over the slow axis
        (half, "dp=2,fsdp=4", 1e-2),
    ],
)
def test_exact_gradients_are_those_of_the_reduction_at_the_end(fn, preset, within):
    args = init(), batch()
    if preset == "fsdp=8":
        preset = "dp=2,fsdp=4"
    made = under("exact", preset=preset, fn=fn)
    mine = gradients(made)
    assert furthest(mine, gradients(under("exact", False, preset, fn))) <= 1e-6
    assert furthest(mine, jax.jit(fn)(*args)[1]["grads"]) <= within
    assert "of 5 gradients cross" in made.explain()


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["dp=2,zero1=4", "dp=2,fsdp=4", "dp=2,tp=4"])
def test_coded_gradients_are_within_the_codec_s_error(preset):
    """int8 is off by 1/252 of a block's largest value in each hop, of at most two replicas and their sum."""
    expected = jax.jit(step)(init(), batch())[1]["grads"]
    mine = gradients(under("int8", preset=preset))
    assert 1e-5 < furthest(mine, expected) <= 4 / 252
    assert furthest(mine, gradients(under("int8", False, preset))) <= 8 / 252
    exact = gradients(under("int8", preset=preset, pins={"*/up": "exact"}))
    assert furthest(exact["layers"]["up"], expected["layers"]["up"]) <= 1e-6


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
    assert all(len({s.index for s in x.addressable_shards}) == 8 for x in rows.values()), "each device keeps its own"
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


class Apart(share_layers._Exchange):
    """A removed cut: each group goes on with its own partial gradient."""

    def __call__(self, offset, *values):
        return [*self.narrow(values[: len(self.loop.rows)]), *values[len(self.loop.rows) :]]


def test_without_the_exchange_float32_crosses(monkeypatch):
    monkeypatch.setattr(share_layers, "_Exchange", Together)
    made = under("int8")
    mine = gradients(made)
    assert furthest(mine, jax.jit(step)(init(), batch())[1]["grads"]) <= 4 / 252  # right, but not as was asked for
    wide = [c for c in crossing(made) if "f32" in c.dtypes and c.trips == LAYERS]
    assert wide and {c.kind for c in wide} <= {"all-reduce", "reduce-scatter"}


def test_without_a_cut_the_gradient_is_wrong(monkeypatch):
    """One exchange removed: its layers get a total that is no sum. JAX sees it already (totals differ by group)."""
    monkeypatch.setattr(share_layers, "_Exchange", Apart)
    with pytest.raises(ValueError, match="out_axes"):
        gradients(under("exact"))


def test_what_cannot_be_inside():
    args = init(), batch()
    plan = lensjax.parallelize(step, cluster=MACHINE, plan="dp=2,zero1=4").plan_for(*args)
    for changes, words in [
        ({"reduce": {SLOW: Reduce(inside=True)}}, ["reduce.host.inside", "split"]),
        ({"reduce": {SLOW: Reduce("int8", inside=True)}, "micro": Micro(2)}, ["reduce.host.inside", "micro"]),
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
            h, _ = layer(h, jax.tree.map(lambda w: w[n], params["layers"]))
        return jnp.mean((h @ params["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}


def test_layers_that_are_not_scanned_are_reduced_at_the_end():
    made = under("exact", fn=unrolled)
    assert furthest(gradients(made), jax.jit(unrolled)(init(), batch())[1]["grads"]) <= 1e-6
    assert "no gradient crosses dp inside a loop" in made.explain()


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


# ---- compiled for GPUs ----------------------------------------------------------------------------------------------


def _between(hlo: str) -> dict[str, list[list[str]]]:
    """Kind -> for each collective that is started and waited for in a loop over layers' body and carries codes, the
    matmuls that run between the two."""
    found: dict[str, list[list[str]]] = {}
    for computation in parse_hlo(hlo).computations.values():
        names = [i.name for i in computation.instructions]
        for at, i in enumerate(computation.instructions):
            if not i.opcode.endswith("-start") or computation.name.startswith("main"):
                continue
            done = next(k for k in computation.instructions if k.opcode.endswith("-done") and i.name in k.operands)
            inside = computation.instructions[at + 1 : names.index(done.name)]
            found.setdefault(i.opcode.removesuffix("-start"), []).append(
                [x.name for x in inside if x.opcode in ("custom-call", "fusion", "dot")]
            )
    return found


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("inside", ["fsdp:once=8", "fsdp=8", "fsdp:once=4,tp=2"])
def test_compiled_for_two_nodes_of_h100(inside, tmp_path, monkeypatch):
    """In the backward loop an all-to-all and an all-gather of codes, started and waited for with work between."""
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))
    layers = 6
    config = dataclasses.replace(CONFIGS["llama3-tiny"], width=512, kv_heads=8, mlp=2048, layers=layers)
    made = target(config, 32, 256)
    program, cluster = analyze(made.step, (made.state, made.batch)), Cluster.parse("dgx-h100:2")
    plain = preset(f"dp=2,{inside}", program, cluster.devices, tier_of=tier_names(cluster))
    plan = price(program, plain.replace(reduce={"rail": Reduce("int8", inside=True)}), cluster)
    proof = prove(program, plan, cluster)
    across, wide = between_nodes(proof)
    assert sum(c.payload for c in wide) <= 64, wide
    coded = [c.kind for c in across if "u8" in c.dtypes and c.trips == layers]
    assert coded.count("all-to-all") == coded.count("all-gather") == 1
    for tier, (predicted, compiled) in proof.tiers.items():
        assert compiled == pytest.approx(predicted, rel=0.02), tier
    between = _between(proof.audit.artifact.hlo)
    assert max(len(x) for x in between["all-to-all"]) > 1
    assert max(len(x) for x in between["all-gather"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_scan_remat_dropout", "nnx_gpt_scan", "lstm_scan", "moe_dense"])
def test_families_with_scans(name):
    """A scan over time makes its weights' gradients as carried sums: those cross at the end."""
    from tests.split.test_end_to_end import traced
    from tests.zoo import FAMILIES

    p, whole = traced(name)
    cluster = Cluster.parse(MACHINE)
    base = preset("dp=2,fsdp=4", p, 8, tier_of=tier_names(cluster))
    expected = whole()
    where = [i for i, path in enumerate(p.result_paths) if "grads" in path.split("/")]
    largest = max(np.abs(expected[i]).max() for i in where)
    for reduce, most in ((Reduce(split=True, inside=True), 2e-6), (Reduce("int8", inside=True), 8 / 252)):
        mine = _run(p, base.replace(reduce={SLOW: reduce}))
        most = most if FAMILIES[name].dtype == "float32" else max(most, 2e-2)
        assert max(np.abs(mine[i] - expected[i]).max() for i in where) <= most * largest


def _run(p, plan):
    from lensjax.passes.emit import emit
    from tests.split.harness import QUICK, numbers

    emitted = emit(p, plan, device_mesh(plan.mesh, jax.devices()[:8]))
    shardings = {"in_shardings": list(emitted.arguments), "out_shardings": list(emitted.results)}
    return numbers(jax.jit(emitted.run, compiler_options=QUICK, **shardings)(*p.call.leaves, *p.captured))
