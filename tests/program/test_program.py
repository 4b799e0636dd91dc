"""What the analysis says about a step: roles, ties, batch, layers, and that the jaxpr still computes the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.program.batch import second_size
from lensjax.program.edit import all_equations
from lensjax.program.flow import dependencies
from lensjax.program.program import analyze
from tests.zoo import FAMILIES


def run(program, leaves):
    out = jcore.jaxpr_as_fun(_jax.close(program.jaxpr))(*leaves, *program.captured)
    return jax.tree.unflatten(program.out_tree, out)


def family(name, grads=False):
    made = FAMILIES[name].make(with_grads=grads)
    return made.step, made.init(jax.random.key(0)), made.batch(jax.random.key(1))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mlp", "gpt_scan_remat_dropout", "dlrm"])
def test_the_inlined_program_computes_the_step(name):
    step, state, batch = family(name)
    program = analyze(step, (state, batch))
    expected = jax.jit(step)(state, batch)
    mine = jax.jit(lambda *x: run(program, x))(*program.call.leaves)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["mlp", "cnn_batchnorm", "gpt_unrolled", "gpt_scan_remat_dropout", "gpt_tied_dropout", "dlrm"]
)
def test_no_call_is_left_and_variables_are_unique(name):
    program = analyze(family(name)[0], family(name)[1:])
    seen = set()
    for eqn in all_equations(program.jaxpr):
        assert eqn.primitive.name not in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
        for v in eqn.outvars:
            assert isinstance(v, jcore.DropVar) or v not in seen
            seen.add(v)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", ["mlp", "cnn_batchnorm", "gpt_unrolled", "gpt_scan_remat_dropout", "gpt_tied_dropout", "dlrm"]
)
def test_parameters_and_moments_are_those_of_the_state(name):
    """Found from data flow; checked here against the names that Flax and optax happen to use."""
    program = analyze(family(name)[0], family(name)[1:])
    for a in program.arguments:
        parts = a.path.split("/")
        if parts[1] == "params":
            assert a.role == "parameter", a
        elif {"mu", "nu", "trace"} & set(parts):
            assert a.role == "optimizer", a
            inside = a.path.partition(next(f"/{m}/" for m in ("mu", "nu", "trace") if m in parts))[2]
            assert program.arguments[a.follows].path.endswith("/" + inside), (a, program.arguments[a.follows])
        elif parts[0] == "state":
            assert a.role in ("other", "key", "optimizer"), a
        assert (a.result is None) == (a.role == "batch"), a


def test_user_lines_are_known_for_nearly_every_equation():
    program = analyze(family("gpt_unrolled")[0], family("gpt_unrolled")[1:])
    lines = [_jax.user_line(e) for e in all_equations(program.jaxpr)]
    assert sum(bool(line) for line in lines) >= 0.95 * len(lines)


def test_layers_of_a_scanned_model():
    program = analyze(family("gpt_scan_remat_dropout")[0], family("gpt_scan_remat_dropout")[1:])
    (layer,) = program.layers
    assert layer.name.startswith("state/params/") and layer.count == program.arguments[layer.parameters[0]].shape[0]


def test_the_fingerprint_follows_the_program_and_nothing_else():
    step, state, batch = family("mlp")
    one, two = analyze(step, (state, batch)), analyze(step, (state, batch))
    assert one.fingerprint == two.fingerprint
    half = jax.tree.map(lambda x: x[: len(x) // 2], batch)
    assert analyze(step, (state, half)).fingerprint != one.fingerprint


@pytest.mark.parametrize("n", [2, 3, 4, 6, 7, 9, 12, 97, 1024])
def test_the_second_size_is_another_one_and_mostly_a_divisor(n):
    m = second_size(n)
    assert m != n and m >= 2 and (n % m == 0 or m == 2 * n)


def test_dependencies_go_through_loops_branches_and_carries():
    def f(a, b, c, d):
        def body(carry, x):
            return (carry[0] + x, carry[0] * c), carry[1]

        (s, t), ys = jax.lax.scan(body, (a, jnp.zeros_like(a)), b)
        z = jax.lax.cond(d > 0, lambda: s, lambda: jnp.zeros_like(s))
        w = jax.lax.while_loop(lambda v: v[1] < d, lambda v: (v[0] + 1.0, v[1] + 1), (a, 0))[0]
        return s, t, ys, z, w

    args = (jnp.ones(3), jnp.ones((4, 3)), jnp.ones(3), 2)
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    deps = dependencies(jaxpr)
    a, b, c, d = 1, 2, 4, 8
    assert [deps[v] for v in jaxpr.outvars] == [a | b, a | b | c, a | b | c, a | b | d, a | d]


def test_moments_of_equal_shape_are_tied_by_flow_and_path():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(params, opt_state, x):
        grads = jax.grad(lambda p: jnp.tanh(jnp.tanh(x @ p["b"]) @ p["a"]).mean())(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    program = analyze(step, (params, tx.init(params), jnp.ones((6, 8))))
    for a in program.arguments:
        if a.role == "optimizer":
            assert program.arguments[a.follows].path[-1] == a.path[-1]
    assert sum(a.role == "optimizer" for a in program.arguments) == 4


def test_batch_along_another_axis_as_told():
    def step(p, x):
        return p - jax.grad(lambda p: (p @ x).mean())(p)

    program = analyze(step, (jnp.ones((3, 5)), jnp.ones((5, 12))), batch_argnums=(1,), batch_axes=1)
    assert program.batch.axes == {1: 1} and program.batch.size == 12
    found = analyze(step, (jnp.ones((3, 5)), jnp.ones((5, 12))))
    assert found.batch.axes == {1: 1}
