"""The recompute pass keeps the numbers and drops what it says, for every shape of backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jcore

import lensjax
from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.passes.recompute import layer_names, recompute
from lensjax.passes.shardings import resolve
from lensjax.program.edit import all_equations
from lensjax.program.program import analyze
from lensjax.program.values import nbytes
from lensjax.search.presets import preset
from tests.recompute.steps import LAYERS, ROWS, STEPS, WIDTH

LEVELS = ("scores", "dots", "named", "inputs", "recompute", "offload")


@functools.cache
def program(name):
    step, params, batch = STEPS[name]()
    return analyze(step, (params, batch))


def under(name, level):
    p = program(name)
    layers = level if isinstance(level, dict) else {"*": level}
    plan = preset("dp", p, 1).replace(layers=layers)
    return recompute(p, plan, resolve(p, plan))


def count(jaxpr, primitive):
    return sum(e.primitive.name == primitive for e in all_equations(jaxpr))


@functools.cache
def expected(name):
    return run(program(name).jaxpr, program(name))


def run(jaxpr, p):
    return [np.asarray(x) for x in jax.jit(jcore.jaxpr_as_fun(_jax.close(jaxpr)))(*p.call.leaves, *p.captured)]


def assert_same(name, jaxpr):
    p = program(name)
    results = run(jaxpr, p)
    grads = [i for i, path in enumerate(p.result_paths) if "grads" in path]
    largest = max(np.abs(expected(name)[i]).max() for i in grads)
    for i, (mine, theirs) in enumerate(zip(results, expected(name), strict=True)):
        scale = largest if i in grads else max(np.abs(theirs).max(), 1e-30)
        assert np.abs(mine - theirs).max() <= 1e-5 * scale, p.result_paths[i]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", STEPS)
def test_recomputed_layers_give_the_same_gradients(name):
    made = under(name, "recompute")
    assert_same(name, made.jaxpr)


@pytest.mark.few(5)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["unrolled", "scanned", "random"])
def test_every_level_gives_the_same_gradients(name, level):
    assert_same(name, under(name, level).jaxpr)


@pytest.mark.parametrize("name", sorted(set(STEPS) - {"checkpointed"}))
def test_layers_are_multiplied_again(name):
    """The forward runs twice: more matmuls than before, but no more than one forward more."""
    before, after = (count(j, "dot_general") for j in (program(name).jaxpr, under(name, "inputs").jaxpr))
    assert before < after <= 2 * before


def test_a_checkpoint_of_the_users_is_not_put_into_another():
    before, after = (
        count(j, "dot_general") for j in (program("checkpointed").jaxpr, under("checkpointed", "inputs").jaxpr)
    )
    assert before == after


def test_scanned_layers_stack_their_inputs_only():
    made = _jax.open_jaxpr(under("scanned", "inputs").jaxpr)
    forward = next(e for e in made.eqns if e.primitive.name == "scan")
    _, carry = _jax.scan_split(forward)
    assert [nbytes(v) for v in forward.outvars[carry:]] == [4 * LAYERS * ROWS * WIDTH]


def test_a_named_value_is_kept():
    """With the hidden values kept, their matmul is not repeated."""
    fewer, more = (count(under("unrolled", level).jaxpr, "dot_general") for level in ("named:hidden", "named:other"))
    assert fewer < more == count(under("unrolled", "inputs").jaxpr, "dot_general")


def test_kept_matmuls_are_not_repeated():
    assert count(under("unrolled", "dots").jaxpr, "dot_general") == count(program("unrolled").jaxpr, "dot_general")


def test_one_layer_alone():
    names = layers_of("unrolled")
    assert [n for n in names if "layer_" in n] == [f"params/layer_{i}" for i in range(LAYERS)]
    one = under("unrolled", {"params/layer_1": "inputs"}).jaxpr
    assert count(one, "dot_general") - count(program("unrolled").jaxpr, "dot_general") in (1, 2)
    assert_same("unrolled", one)


def layers_of(name):
    p = program(name)
    plan = preset("dp", p, 1)
    return layer_names(p, plan, resolve(p, plan))


def test_a_layer_that_is_not_there_is_an_error():
    with pytest.raises(PlanError, match=r"layers.params/layer_9.*does not have"):
        under("unrolled", {"params/layer_9": "inputs"})


@pytest.mark.parametrize("name", ["scanned", "scanned_backwards", "scanned_with_results"])
def test_a_stack_in_two_parts(name):
    made = under(name, "recompute*3+keep*1").jaxpr
    assert count(made, "scan") == 4
    lengths = [e.params["length"] for e in _jax.open_jaxpr(made).eqns if e.primitive.name == "scan"]
    assert lengths == [3, 1, 1, 3]
    assert_same(name, made)


def test_counts_that_do_not_add_up_are_an_error():
    with pytest.raises(PlanError, match="5 layers; the stack has 4"):
        under("scanned", "recompute*3+keep*2")


def test_counts_are_for_the_outer_of_two_stacks():
    assert_same("nested_scans", under("nested_scans", "recompute*1+keep*1").jaxpr)


def test_effects_run_once():
    seen = []

    def step(params, x):
        def loss(params):
            y = x
            for i in range(3):
                y = jnp.tanh(y @ params[f"layer_{i}"]["w"])
                jax.debug.callback(seen.append, i)
            return jnp.mean(y**2)

        return jax.grad(loss)(params)

    params = {f"layer_{i}": {"w": jnp.ones((WIDTH, WIDTH))} for i in range(3)}
    p = analyze(step, (params, jnp.ones((ROWS, WIDTH))))
    plan = preset("dp", p, 1).replace(layers={"*": "inputs"})
    run(recompute(p, plan, resolve(p, plan)).jaxpr, p)
    jax.effects_barrier()
    assert sorted(map(int, seen)) == [0, 1, 2]


def test_everything_kept_is_the_program_itself():
    p = program("unrolled")
    plan = preset("dp", p, 1).replace(layers={"*": "keep"})
    assert recompute(p, plan, resolve(p, plan)) is p


def test_a_bias_gradient_waits_for_the_last_gate_that_its_cotangent_passes():
    """Else its reduction over the devices is bundled with those of the layer before, which then hold the gate up."""

    def loss(params, x):
        for i in range(LAYERS):
            x = x + jnp.tanh(x @ params[f"layer_{i}"]["w"]) + params[f"layer_{i}"]["b"]
        return jnp.mean((x @ params["head"]) ** 2)

    layer = {"w": jnp.eye(WIDTH), "b": jnp.ones(WIDTH)}
    params = {f"layer_{i}": layer for i in range(LAYERS)} | {"head": jnp.ones((WIDTH, 4))}
    p = analyze(jax.value_and_grad(loss), (params, jnp.ones((ROWS, WIDTH))))
    plan = preset("dp", p, 8).replace(layers={"*": "inputs"})
    made = recompute(p, plan, resolve(p, plan)).jaxpr
    eqns = _jax.open_jaxpr(made).eqns
    passed = [e for e in eqns if e.primitive.name == "optimization_barrier"][-1].outvars
    biases = [e for e in eqns if e.primitive.name == "reduce_sum" and e.outvars[0].aval.shape == (WIDTH,)]
    assert any(e.invars[0] in passed for e in biases)
    for mine, theirs in zip(run(made, p), run(p.jaxpr, p), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def offloaded(name, level="offload"):
    """A program with a batch wide enough to be worth moving, and its jaxpr under a level."""
    step, params, batch = STEPS[name]()
    p = analyze(step, (params, jnp.concatenate([batch] * 64)))
    plan = preset("dp", p, 1).replace(layers={"*": level})
    return p, recompute(p, plan, resolve(p, plan)).jaxpr


def assert_close(p, jaxpr):
    for mine, theirs in zip(run(jaxpr, p), run(p.jaxpr, p), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_offloaded_inputs_are_put_on_the_host_and_fetched_behind_a_barrier():
    p, jaxpr = offloaded("unrolled")
    made = _jax.open_jaxpr(jaxpr)
    puts = [e for e in made.eqns if e.primitive.name == "device_put"]
    away = [e for e in puts if "Host" in str(e.params["devices"])]
    # The first layer's input is the batch; the last one's is read first in the backward, and stays.
    assert len(away) == LAYERS - 2 and len(puts) == 2 * len(away)
    behind = {v for e in made.eqns if e.primitive.name == "optimization_barrier" for v in e.outvars}
    assert all(e.invars[0] in behind for e in puts if e not in away)
    assert_close(p, jaxpr)


@pytest.mark.parametrize("level", ["offload", "offload*3+keep*1"])
@pytest.mark.parametrize("name", ["scanned", "scanned_backwards", "scanned_with_results"])
def test_a_scanned_layers_input_is_fetched_in_the_trip_before(name, level):
    """Each trip of the backward hands the next one its input: what it puts on the device is a result of its carry."""
    p, jaxpr = offloaded(name, level)
    assert_close(p, jaxpr)
    (backward,) = [e for e in all_equations(jaxpr) if e.primitive.name == "scan" and fetches(e)]
    _, carry = _jax.scan_split(backward)
    assert fetches(backward) <= set(_jax.open_jaxpr(backward.params["jaxpr"]).outvars[:carry])


def test_two_nested_stacks_on_the_host_give_the_same_numbers():
    p, jaxpr = offloaded("nested_scans")
    assert sum(bool(fetches(e)) for e in all_equations(jaxpr) if e.primitive.name == "scan") == 2
    assert_close(p, jaxpr)


def fetches(scan):
    """What the trips of a scan put on the device."""
    eqns = _jax.open_jaxpr(scan.params["jaxpr"]).eqns
    return {e.outvars[0] for e in eqns if e.primitive.name == "device_put" and "Device" in str(e.params["devices"])}


@pytest.mark.few(1)
@pytest.mark.parametrize("preset_name", ["fsdp:again", "fsdp:once"])
@pytest.mark.parametrize("name", ["unrolled", "scanned"])
def test_recompute_on_a_decorated_step_with_split_weights(name, preset_name):
    step, params, batch = STEPS[name]()
    plain = lensjax.parallelize(step, plan=preset_name, donate=False)
    _, want = plain(params, batch)
    again = lensjax.parallelize(step, plan=plain.plan.replace(layers={"*": "inputs"}), donate=False)
    _, got = again(params, batch)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want["grads"]))
    for mine, theirs in zip(jax.tree.leaves(got["grads"]), jax.tree.leaves(want["grads"]), strict=True):
        assert np.abs(np.asarray(mine) - np.asarray(theirs)).max() <= 1e-5 * largest
