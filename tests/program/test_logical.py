"""Logical axes from one equation of each kind are those of the whole program, lowered and read as one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lensjax
from lensjax.program import logical
from lensjax.program.edit import all_equations
from lensjax.program.inline import inline
from lensjax.program.logical import logical_axes
from lensjax.program.program import analyze
from tests.program.whole_marks import whole_program_axes
from tests.zoo import FAMILIES


def same_classes(left, right, strided):
    """Whether two {variable: dimensions} differ in the numbers of their axes only. Into which parts strided windows cut
    a dimension, behind its first axis, depends on the order in which they are read: not compared in such programs."""
    there, back = {}, {}
    for v, dims in left.items():
        other = right[v]
        if strided:
            dims, other = [d[:1] for d in dims], [d[:1] for d in other]
        if [len(d) for d in dims] != [len(d) for d in other]:
            return f"{v}: {dims} and {other}"
        for a, b in zip((x for d in dims for x in d), (x for d in other for x in d)):
            if there.setdefault(a, b) != b or back.setdefault(b, a) != a:
                return f"{v}: {dims} and {other}"
    return ""


def compare(jaxpr):
    expected, dims = whole_program_axes(jaxpr)
    found = logical_axes(jaxpr, [str(i) for i in range(len(expected.arguments))], {})
    windows = {e.params.get("window_strides", ()) for e in all_equations(jaxpr)}
    strided = any(stride > 1 for strides in windows for stride in strides)
    assert not same_classes(dims, found.dims, strided)
    number = {a: b for v, d in dims.items() for x, y in zip(d, found.dims[v]) for a, b in zip(x, y)}
    moved = {a for v, d in dims.items() for x, y in zip(d, found.dims[v]) if len(x) != len(y) for a in x}
    for a, b in number.items():
        if a in moved:
            continue
        one, other = expected.axes[a], found.axes[b]
        assert one.sizes == other.sizes
        assert set(one.reductions) == set(other.reductions), (a, one, other)
        assert set(one.replications) == set(other.replications), (a, one, other)


def program(name):
    family = FAMILIES[name]
    made = family.make(with_grads=True)
    state = jax.eval_shape(made.init, jax.random.key(0)) if family.form == "state" else made.init(jax.random.key(0))
    batch = made.batch(jax.random.key(1))
    step = lensjax.parallelize(made.step, plan="dp", cluster="cpu:8", **family.options)
    step.plan_for(*((state,) if family.form == "state" else state), batch)
    return step.program


@pytest.mark.parametrize("name", ["mlp", "control_flow"])
def test_small_families(name):
    compare(program(name).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_families(name):
    compare(program(name).jaxpr)


def test_loops_branches_slices_and_keys():
    def step(w, x, keys):
        def block(h, wk):
            w, k = wk
            h = jnp.where(jax.random.bernoulli(k, 0.5, h.shape), jnp.tanh(h @ w), h)
            return h, h[:, :3].sum(0)

        h, ys = jax.lax.scan(jax.checkpoint(block), x, (w, keys))
        h = jax.lax.cond(h[0, 0] > 0, lambda h: h.reshape(4, 2, -1).swapaxes(0, 1), lambda h: h.reshape(2, 4, -1), h)
        h = jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + jnp.sort(c, -1), h)
        return jnp.pad(h, ((0, 0), (0, 0), (1, 0))), ys

    jaxpr = jax.make_jaxpr(step)(jnp.ones((5, 6, 6)), jnp.ones((8, 6)), jax.random.split(jax.random.key(0), 5))
    compare(inline(jaxpr))


def test_each_kind_of_equation_is_lowered_once(monkeypatch):
    """A model twice as deep asks for no more rules, and a second one like it for none."""
    asked = []
    rules = logical._rules
    monkeypatch.setattr(logical, "_rules", lambda examples: asked.append(len(examples)) or rules(examples))
    for layers, known in ((3, {}), (6, {}), (6, None)):
        if known is not None:
            monkeypatch.setattr(logical, "_RULES", known)

        def loss(params, x):
            for w in params:
                x = jnp.tanh(x @ w)
            return (x**2).mean()

        def step(params, x):
            grads = jax.grad(loss)(params, x)
            return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))

        arguments = [np.ones((4, 4), np.float32)] * layers, np.ones((8, 4), np.float32)
        assert analyze(step, arguments).logical.axes
    assert asked[0] == asked[1] > 0 == asked[2]
