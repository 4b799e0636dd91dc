"""Comparing a decorated step with one device: the measure that every test uses.

Both sides start each step from the same state. Gradients (an output of the instrumented step) are compared relative to
the global maximum over all gradient leaves, never leaf by leaf, and never as parameters after Adam, where a zero
gradient's rounding becomes a full step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lensjax
from tests.zoo import FAMILIES

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Difference:
    """`gradients`: largest difference over the largest gradient; `loss`: relative."""

    gradients: float
    loss: float


def difference(metrics, reference) -> Difference:
    """Between the metrics of two instrumented steps (`loss` and `grads`)."""
    theirs = [np.asarray(x, np.float64) for x in jax.tree.leaves(reference["grads"])]
    mine = [np.asarray(x, np.float64) for x in jax.tree.leaves(metrics["grads"])]
    largest = max(np.abs(x).max() for x in theirs)
    worst = max(np.abs(x - y).max() for x, y in zip(mine, theirs, strict=True))
    loss = float(reference["loss"])
    return Difference(float(worst / largest), abs(float(metrics["loss"]) - loss) / max(abs(loss), 1e-30))


def get(family: str, state):
    """The values of a state, on the host; copies of keys."""
    values = nnx.state(state) if FAMILIES[family].form == "modules" else state
    return [jnp.copy(x) if is_key(x) else np.array(x) for x in jax.tree.leaves(values)]


def is_key(x) -> bool:
    return jax.dtypes.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def put(family: str, state, values):
    """The state with these values; modules get them in place. Keys are copied: a step gives its state up."""
    values = [jnp.copy(x) if is_key(x) else x for x in values]
    if FAMILIES[family].form != "modules":
        return jax.tree.unflatten(jax.tree.structure(state), values)
    nnx.update(state, jax.tree.unflatten(jax.tree.structure(nnx.state(state)), values))
    return state


@functools.cache
def reference(family: str, steps: int = 2):
    """[(state before, metrics)] of `steps` steps on one device, and the batch; everything on the host."""
    step, init, batch = FAMILIES[family].make(with_grads=True)
    run = FAMILIES[family].jit(step)
    state, data = init(jax.random.key(0)), batch(jax.random.key(1))
    out = []
    for _ in range(steps):
        before = get(family, state)
        state, metrics = FAMILIES[family].call(run, state, data)
        out.append((before, jax.device_get(metrics)))
    return out, data


def compare(
    family: str,
    plan: str,
    cluster: str = "cpu:8",
    steps: int = 2,
    dtype: str = "float32",
    keep: Callable[[Any], None] = lambda step: None,
    sharded_init: bool = True,
) -> list[Difference]:
    """Runs `steps` steps of a family under a plan, each from the reference's state; returns the differences. `keep`
    receives the decorated step. sharded_init=False makes the state on one device: the first call places it."""
    made = FAMILIES[family].make(with_grads=True)
    step = lensjax.parallelize(made.step, plan=plan, cluster=cluster, **FAMILIES[family].options)
    expected, data = reference(family, steps)
    key = jax.random.key(0)
    state = step.init(made.init, key, batch=data) if sharded_init else made.init(key)
    found = []
    for before, metrics in expected:
        state = put(family, state, before)
        state, mine = FAMILIES[family].call(step, state, data)
        found.append(difference(mine, metrics))
    keep(step)
    assert_close(found, dtype, f"{family} under {plan}")
    return found


def assert_close(found: list[Difference], dtype: str, what: str) -> None:
    limit = TOLERANCE[dtype]
    for i, d in enumerate(found):
        assert d.gradients <= limit, f"{what}: gradients differ by {d.gradients:.2e} of the largest at step {i}"
        assert d.loss <= limit, f"{what}: the loss differs by {d.loss:.2e} at step {i}"
