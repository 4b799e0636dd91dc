"""A step that runs out of memory says what it holds and what would fit, and leaves the state alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lensjax
from lensjax._errors import OutOfMemory
from tests.recompute.steps import STEPS, WIDTH


def test_the_error_names_the_largest_buffers_and_the_next_plan():
    plain, params, _ = STEPS["scanned"]()
    batch = jnp.zeros((2**13, WIDTH))
    step = lensjax.parallelize(plain, plan="dp", donate=False)
    params, _ = step(params, batch)

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234 bytes.")

    works = step._run
    step._run = dataclasses.replace(works, jitted=exhausted)  # what XLA says on a device that is full
    with pytest.raises(OutOfMemory) as told:
        step(params, batch)
    text = str(told.value)
    assert "under the plan 'dp'" in text and "allocate 1234 bytes" in text
    assert "activations of 4 x params/layers" in text
    assert "the state is as it was" in text
    assert "step.plan.replace(layers={'" in told.value.hint and "time" in told.value.hint
    step._run = works
    after, _ = step(params, batch)  # training goes on with the same state
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
