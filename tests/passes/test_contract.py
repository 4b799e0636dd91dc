"""Matmuls that sum over three dimensions: split alike in both operands, XLA computes what it computes on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lensjax
from lensjax.passes.contract import agreeing_splits


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["fsdp=2,tp=4", "dp=2,fsdp=2,tp=2"])
def test_a_bilinear_form_of_four_dimensions(plan):
    """The gradient of `mix` sums over three dimensions; it was wrong by half its size."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)
    params = {"in": draw(32, 64), "form": draw(8, 8, 8, 8), "mix": draw(8, 8)}
    x = rng.normal(size=(16, 32)).astype(np.float32)

    def loss(params, x):
        h = jnp.tanh(x @ params["in"]).reshape(len(x), 8, 8)
        return (jnp.einsum("bij,bkm,ijkl,ml->bjm", h, h, params["form"], params["mix"]) ** 2).mean()

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, grads)

    _, (_, expected) = jax.jit(step)(params, x)
    _, (_, found) = lensjax.parallelize(step, plan=plan, cluster="cpu:8", donate=False, batch_argnums=1)(params, x)
    scale = max(np.abs(g).max() for g in jax.tree.leaves(expected))
    for name, g in expected.items():
        assert np.abs(g - found[name]).max() <= 1e-5 * scale, name


def test_summed_dimensions_agree_and_others_are_free():
    free = P.UNCONSTRAINED
    x = np.zeros((4, 4, 4, 4), np.float32)
    eqn = jax.make_jaxpr(lambda x, y: jnp.einsum("abci,cbaj->ij", x, y))(x, x).jaxpr.eqns[-1]
    summed, _ = eqn.params["dimension_numbers"]
    assert len(summed[0]) == 3
    wanted = {eqn.invars[0]: ["x", "y", None, None], eqn.invars[1]: [free, "x", "x", None]}
    (left, right), result = agreeing_splits(eqn, wanted.get)
    assert result is None
    for a, b in zip(*summed):
        assert left[a] == right[b]
    assert [left[a] for a in range(4) if a not in summed[0]] == [free]
    two = jax.make_jaxpr(lambda x, y: jnp.einsum("abci,abkj->cikj", x, y))(x, x).jaxpr.eqns[-1]
    assert agreeing_splits(two, wanted.get) is None
