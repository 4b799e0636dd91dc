"""The rows of a ragged matmul are split like the batch, though sorting has mixed the examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lensjax.passes.ragged import ragged_rows
from tests.same_numbers import compare
from tests.search.test_lost_batch import check


def test_rows_of_forward_and_gradients():
    loss = lambda x, w, sizes: (jax.lax.ragged_dot(x, w, sizes) ** 2).sum()
    sizes = jnp.full(4, 2, jnp.int32)
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(np.ones((8, 3)), np.ones((4, 3, 5)), sizes)
    found = [r for eqn in jaxpr.eqns if (r := ragged_rows(eqn))]
    assert [(r.operands, r.result, r.count) for r in found] == [
        ((0, None, None), 0, 8),
        ((0, 0, None), None, 8),  # of the weights: rows are summed over
        ((0, None, None), 0, 8),
    ]


def test_a_plan_of_experts_leaves_the_groups_their_axis():
    (d,) = compare("moe_ragged", "dp=2,ep=4", steps=1)
    assert d.gradients < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "dp=2,fsdp=4", "dp=2,ep=4", "dp=2,fsdp=2,tp=2"])
def test_each_device_works_on_its_share_of_the_rows(plan):
    check("moe_ragged", [plan])
