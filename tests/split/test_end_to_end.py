"""Plans with shares on decorated steps, priced and run; families of the zoo; what is compiled for real GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lensjax
from lensjax._errors import PlanError
from lensjax.cost.price import price
from lensjax.execute.in_place import InPlace
from lensjax.plan.plan import Micro, Reduce
from lensjax.program.program import analyze
from lensjax.search.choose import tier_names
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from tests.gpu_compiler import needs_gpu_compiler
from tests.same_numbers import difference
from tests.split.harness import micro, nodes, plain, run
from tests.zoo import FAMILIES


def step(params, batch):
    def loss(params):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"] @ params["in"], params["layers"])
        return jnp.mean((h @ params["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}


def shapes(batch=64, width=32, layers=2):
    on = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {"in": on((16, width)), "layers": on((layers, width, width)), "out": on((width, 8))}
    return params, {"x": on((batch, 16)), "y": on((batch, 8))}


def values(tree, seed=0):
    r = np.random.RandomState(seed)
    return jax.tree.map(lambda s: jnp.asarray(r.randn(*s.shape) * 0.3, s.dtype), tree)


def planned(name, cluster, **changes):
    program = analyze(step, shapes())
    cluster = Cluster.parse(cluster)
    return preset(name, program, cluster.devices, tier_of=tier_names(cluster)).replace(**changes), program, cluster


def test_a_decorated_step_in_micro_batches():
    plan, _, _ = planned("dp=2,fsdp:once=4", "cpu:8", micro=Micro(count=4))
    args = values(shapes())
    _, expected = jax.jit(step)(*args)
    decorated = lensjax.parallelize(step, plan=plan, cluster="cpu:8", donate=False)
    for _ in range(2):
        _, mine = decorated(*args)
        found = difference(mine, expected)
        assert found.gradients <= 1e-6 and found.loss <= 1e-6
    assert decorated.plan.micro == Micro(count=4)
    with pytest.raises(PlanError, match=r"micro\.count"):
        lensjax.parallelize(step, plan=plan.replace(micro=Micro(count=0)), cluster="cpu:8")(*args)


def test_the_slow_tier_carries_the_same_whatever_the_count():
    """Priced by the emission that runs: as many bytes between nodes for one share as for many."""
    sent = set()
    for count in (1, 4):
        plan, program, cluster = planned("dp=2,fsdp:once=8", "dgx-h100:2", micro=Micro(count=count))
        sent.add(price(program, plan, cluster).predicted.tiers["rail"])
    assert len(sent) == 1, sent


@pytest.mark.slow
@needs_gpu_compiler
def test_compiled_for_gpus_nothing_is_reduced_in_the_loop(tmp_path, monkeypatch):
    """For 16 H100s: one reduce-scatter in the node, one all-reduce of the parts across, after the loop."""
    from lensjax.verify.proof import prove

    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))
    rail = set()
    big = shapes(batch=4096, width=256)
    program, cluster = analyze(step, big), Cluster.parse("dgx-h100:2")
    base = preset("dp=2,fsdp:once=8", program, cluster.devices, tier_of=tier_names(cluster))
    for changes in ({"micro": Micro(4)}, {"micro": Micro(16)}, {"reduce": {"rail": Reduce(split=True)}}):
        plan = price(program, base.replace(**changes), cluster)
        proof = prove(program, plan, cluster)
        found = proof.audit.found.collectives
        across = [c for c in found if c.members == 2]
        if plan.micro.count > 1:
            assert all(c.trips == 1 for c in found), "the gathers too: once, before the loop"
        else:  # without micro-batches the loop over layers scatters in the node, where it overlaps with the backward
            assert all(c.trips == 1 or (c.kind, c.members) == ("reduce-scatter", 8) for c in found)
        assert [c.kind for c in across] == ["all-reduce"]
        wide = [c for c in found if c.members == 16]
        assert all(c.payload <= 64 for c in wide)
        for tier, (predicted, compiled) in proof.tiers.items():
            assert compiled == pytest.approx(predicted, rel=0.02), tier
        rail.add(round(proof.tiers["rail"][1] / 64))
    assert len(rail) == 1, rail


@pytest.mark.slow
@needs_gpu_compiler
def test_a_convolution_crosses_no_nodes():
    """An island around each convolution: only the gradient crosses."""
    from lensjax.verify.proof import prove

    def convolve(w, batch):
        def loss(w):
            y = jax.lax.conv_general_dilated(batch["x"], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return (jax.nn.relu(y) ** 2).mean()

        value, g = jax.value_and_grad(loss)(w)
        return w - g, {"loss": value}

    on = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    program, cluster = analyze(convolve, (on((3, 3, 16, 32)), {"x": on((64, 8, 8, 16))})), Cluster.parse("dgx-h100:2")
    base = preset("dp=16", program, cluster.devices, tier_of=tier_names(cluster))
    plan = price(program, base.replace(micro=Micro(4)), cluster)
    found = prove(program, plan, cluster).audit.found.collectives
    assert {(c.kind, c.trips) for c in found} == {("all-reduce", 1)}
    assert sum(c.payload for c in found) <= 3 * 3 * 16 * 32 * 4 + 64


def traced(name):
    """(program, plain results) of a family's step, its gradients among them."""
    family = FAMILIES[name]
    case = family.make(with_grads=True)
    state, batch = case.init(jax.random.key(0)), case.batch(jax.random.key(1))
    args, named, fn = ((state, batch) if family.form == "state" else (*state, batch)), {}, case.step
    if family.form == "modules":
        pure = InPlace(fn)
        (args, named), fn = pure.take(args, {}).tree, pure.pure
    return analyze(fn, args, named, **family.options), lambda: plain(fn, *args, **named)


# Families that do not split, and those whose shares need several totals first.
CROSS = {"two_tower_contrastive", "nnx_two_tower", "graph_segment_sum", "moe_ragged"}
NORMS = {"cnn_batchnorm", "resnet", "nnx_cnn_batchnorm"}


def check_family(name, plan):
    p, whole = traced(name)
    verdict = p.split.micro if plan.micro != Micro() else p.split.node
    if name in CROSS:
        assert not verdict and verdict.reason
        return
    if plan.micro != Micro() and name in NORMS:
        assert not verdict and "totals over the batch" in verdict.reason
        return
    assert verdict, f"{name}: {verdict}"
    gradients = [i for i, path in enumerate(p.result_paths) if "grads" in path.split("/")]
    assert gradients
    mine, expected = run(p, plan), whole()
    largest = max(np.abs(expected[i]).max() for i in gradients)
    worst = max(np.abs(mine[i] - expected[i]).max() for i in gradients) / largest
    assert worst <= (2e-6 if FAMILIES[name].dtype == "float32" else 2e-2), f"{name}: {worst:.1e}"


def test_a_family_in_uneven_shares():
    check_family("token_weighted", micro(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_in_uneven_micro_batches(name):
    check_family(name, micro(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_over_nodes(name):
    check_family(name, nodes(2, 2))
