"""What the user wrote about devices, on the plan's mesh.

A sharding constraint (also one that came from the shardings of an inner jit) becomes a pin, a `shard_map` region stays
as it is; both must name the plan's mesh, by its axes and sizes. On an abstract mesh, where there is no device to lower
a kernel or a callback for, a stand-in takes its place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.plan.plan import Plan
from lensjax.program.edit import Builder, Constrain, all_equations, map_bodies, splice
from lensjax.program.opaque import is_kernel
from lensjax.program.program import Program

_MESHES = {"sharding_constraint": "the sharding constraint", "shard_map": "the shard_map"}


_CALLBACKS = ("pure_callback", "io_callback")


def on_mesh(program: Program, plan: Plan, mesh: Any) -> Program:
    """`program` with the user's constraints and regions on `mesh`. Raises PlanError, naming the line, for another
    mesh."""
    touched = (*_MESHES, *_CALLBACKS, "pallas_call", "custom_partitioning")
    if not any(e.primitive.name in touched for e in all_equations(program.jaxpr)):
        return program
    return dataclasses.replace(program, jaxpr=_rewrite(program.jaxpr, plan, mesh))


def _rewrite(jaxpr: Any, plan: Plan, mesh: Any) -> Any:
    inner = _jax.open_jaxpr(jaxpr)
    abstract = isinstance(mesh, AbstractMesh)
    b = Builder()
    for eqn in inner.eqns:
        name = eqn.primitive.name
        if name == "sharding_constraint":
            b.env[eqn.outvars[0]] = _constrain(b, eqn, plan, mesh)
        elif name == "shard_map":
            _check(eqn, eqn.params["mesh"], plan)
            # The body's types hold the user's mesh; without devices that one is as good.
            b.copy(eqn, params={**eqn.params, "mesh": eqn.params["mesh"] if abstract else mesh})
        elif abstract and name == "custom_partitioning":
            results = splice(b.eqns, eqn.params["call"], b.read_all(eqn.invars), lambda _, e=eqn: e.source_info)
            b.env.update(zip(eqn.outvars, results))
        elif abstract and (is_kernel(eqn) or name in _CALLBACKS):
            b.env.update(zip(eqn.outvars, b.apply(StandIn(eqn), *b.read_all(eqn.invars), like=eqn)))
        else:
            b.copy(map_bodies(eqn, lambda body, _: _rewrite(body, plan, mesh)))
    return _jax.rebuild(jaxpr, eqns=b.eqns, outvars=b.read_all(inner.outvars))


def _constrain(b: Builder, eqn: Any, plan: Plan, mesh: Any) -> Any:
    sharding = eqn.params["sharding"]
    _check(eqn, getattr(sharding, "mesh", None), plan)
    moved = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return b.apply(Constrain(moved), b.read(eqn.invars[0]), like=eqn)[0]


def _check(eqn: Any, mesh: Any, plan: Plan) -> None:
    names = tuple(mesh.shape.items()) if mesh is not None else None
    if names == tuple(plan.mesh.shape.items()):
        return
    line = _jax.user_line(eqn)
    what = f"{_MESHES[eqn.primitive.name]} at {line}" if line else "a sharding of the jit around the step"
    raise PlanError(
        f"{what} names the mesh "
        f"{dict(names) if names else 'of one device'}; that of the plan {plan.name!r} is {plan.mesh.shape}",
        hint="name the plan's axes and sizes, or leave the sharding out and let the plan decide",
        code="mesh",
    )


class StandIn:
    """A custom call with the results of a kernel or callback, which lowers on every platform. How it splits is not
    known."""

    def __init__(self, eqn: Any):
        self.results = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars)

    def __call__(self, *operands):
        return jax.ffi.ffi_call("lensjax.kernel", self.results)(*operands) if self.results else ()

    def __hash__(self):
        return hash(self.results)

    def __eq__(self, other):
        return isinstance(other, StandIn) and self.results == other.results
