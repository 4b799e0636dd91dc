"""Putting values where a plan wants them: a mesh of real devices, and leaves onto it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.plan.plan import MeshPlan


def device_mesh(plan: MeshPlan, devices: Sequence[Any] | None = None) -> Mesh:
    """The plan's mesh on real devices (JAX's own, in order, unless given). Raises PlanError when the numbers differ."""
    devices = list(jax.devices() if devices is None else devices)
    if plan.size != len(devices):
        raise PlanError(
            f"the plan is for {plan.size} devices ({plan.shape}); JAX sees {len(devices)}",
            hint="plan for the devices that are there, start JAX with as many "
            f"(XLA_FLAGS=--xla_force_host_platform_device_count={plan.size} emulates them), or only look: "
            "step.plan_for(...)",
        )
    order = range(len(devices)) if plan.order is None else plan.order
    grid = np.array([devices[i] for i in order], dtype=object).reshape([a.size for a in plan.axes])
    # Explicit axes, the default of jax.make_mesh, raise on ordinary programs.
    return Mesh(grid, tuple(a.name for a in plan.axes), axis_types=(AxisType.Auto,) * len(plan.axes))


def place(leaf: Any, sharding: NamedSharding, *, own: bool = False) -> jax.Array:
    """The leaf as an array with that sharding; itself where it has it already.

    `own`: its buffers will be donated, so none may be shared with another array or with numpy. `device_put` shares
    what is on its device already, whatever `may_alias` says (jax 0.10.2, 0.12.0.1), and a buffer that is given up
    twice ends the process; so an owned leaf is copied after it was moved.
    With several processes, a leaf that lives in this process only must hold the same whole value in each of them.
    """
    if isinstance(leaf, bool | int | float | complex):
        return jax.device_put(leaf, sharding)  # which keeps its weak type
    # On one device, another kind of sharding is the same place but another type: JAX would compile again.
    same = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    if same and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    moved = _move(leaf, sharding)
    return jax.numpy.copy(moved) if own else moved


def _move(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array):
        if jax.process_count() == 1 or not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            whole = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
            return jax.random.wrap_key_data(_move(jax.random.key_data(leaf), whole), impl=jax.random.key_impl(leaf))
    value = np.asarray(leaf, jax.typeof(leaf).dtype)
    if jax.process_count() == 1:
        return jax.device_put(value, sharding)
    made = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    return _jax.weaken(made) if jax.typeof(leaf).weak_type else made
