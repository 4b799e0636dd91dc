"""A batch is never lost inside a layer: on compiled HLO, for every family of the zoo under a sample of presets."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import lensjax
from lensjax import PlanError
from lensjax.passes.emit import emit, lower
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from tests.lost_batch import lost, on_one_device
from tests.zoo import FAMILIES

PLANS = ["fsdp:again", "dp=2,fsdp=4", "fsdp=2,tp=4", "fsdp=4,tp_sp=2", "dp=2,ep=4", "zero1=2,fsdp:once=4", "hsdp=4"]
NAMES = list(FAMILIES)


def program_of(name):
    family = FAMILIES[name]
    made = family.make()
    state, batch = made.init(jax.random.key(0)), made.batch(jax.random.key(1))
    step = lensjax.parallelize(made.step, plan="dp", **family.options)
    step.plan_for(*(state if family.form != "state" else (state,)), batch)
    return step.program


def mesh_of(plan):
    axes = plan.mesh.shape
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def found(program, plan, one):
    return lost(program, plan, one, lower(emit(program, plan, mesh_of(plan)), donate=False).compile().as_text())


def check(name, plans):
    program = program_of(name)
    one = on_one_device(program)
    for text in plans:
        try:
            plan = preset(text, program, 8)
        except PlanError:
            continue  # what does not apply says so: tests/search/test_tensor.py
        assert not (wrong := found(program, plan, one)), f"{name} under {text}: {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("name, plan", [("gpt_scan_remat_dropout", "fsdp=2,tp=4"), ("gpt_unrolled", "dp=2,fsdp=4")])
def test_no_matmul_does_more_than_its_share(name, plan):
    check(name, [plan])


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(NAMES)))
def test_every_family_under_rotating_presets(index):
    check(NAMES[index], [PLANS[index % len(PLANS)]])


def test_a_lost_batch_is_seen():
    """A step by hand whose second layer works on the whole batch: that layer is named, the first is not."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (NamedSharding(mesh, p) for p in (PartitionSpec("dp"), PartitionSpec()))

    def step(w, x, constrain=lambda x, s: x):
        def loss(w):
            with jax.named_scope("first"):
                h = constrain(jnp.tanh(x @ w["a"]), split)
            with jax.named_scope("second"):
                return (constrain(constrain(h, whole) @ w["b"], whole) ** 2).mean()

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    args = ({"a": jnp.ones((32, 64)), "b": jnp.ones((64, 32))}, jnp.ones((64, 32)))
    program = analyze(step, args)
    by_hand = jax.jit(functools.partial(step, constrain=jax.lax.with_sharding_constraint), in_shardings=(whole, split))
    wrong = lost(program, preset("dp", program, 8), on_one_device(program), by_hand.lower(*args).compile().as_text())
    assert any("second" in w and "8.0 of 1 share" in w for w in wrong) and not any("first" in w for w in wrong), wrong
