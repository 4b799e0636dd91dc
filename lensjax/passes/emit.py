"""Emission: a program under a plan as something that JAX lowers and runs.

`emit` is the one way from a plan to XLA: what is priced, what is verified and what runs are the same jaxpr with
the same shardings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jcore
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from lensjax import _jax
from lensjax.passes.micro import micro
from lensjax.passes.pin import pin
from lensjax.passes.recompute import recompute
from lensjax.passes.regions import on_mesh
from lensjax.passes.shardings import named, resolve
from lensjax.plan.plan import Micro, Plan
from lensjax.program.program import Program


@dataclasses.dataclass(frozen=True)
class Emitted:
    """A program with its plan applied, on a mesh. `run(*leaves) -> [results]` computes the step from flat leaves
    (captured arrays included); shardings are flat too (a result's None is left to the compiler). `donated`: argument
    positions. `pinned`: the jaxpr behind `run`."""

    program: Program
    plan: Plan
    mesh: Any
    run: Callable[..., list[Any]]
    arguments: tuple[NamedSharding, ...]
    results: tuple[NamedSharding | None, ...]
    donated: tuple[int, ...]
    pinned: Any


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """The plan's mesh without devices."""
    axes = plan.mesh.axes
    return AbstractMesh(
        tuple(a.size for a in axes), tuple(a.name for a in axes), axis_types=(AxisType.Auto,) * len(axes)
    )


def emit(program: Program, plan: Plan, mesh: Any) -> Emitted:
    """Applies the plan's passes. Raises PlanError or BatchError where the plan does not apply."""
    shardings = resolve(program, plan)
    if plan.micro != Micro():
        run = micro(program, plan, mesh, shardings)
    else:
        kept = on_mesh(recompute(program, plan, shardings), plan, mesh)
        run = jcore.jaxpr_as_fun(_jax.close(pin(kept, plan, mesh, shardings).jaxpr))
    donated = tuple(
        i for i, a in enumerate(program.arguments) if program.donate and a.result is not None and a.role != "batch"
    )
    return Emitted(
        program=program,
        plan=plan,
        mesh=mesh,
        run=run,
        arguments=tuple(named(mesh, s) for s in shardings.arguments),
        results=tuple(named(mesh, s) if s is not None else None for s in shardings.results),
        donated=donated,
        pinned=pinned.jaxpr,
    )


def shapes(emitted: Emitted) -> list[jax.ShapeDtypeStruct]:
    """The flat arguments as shapes with shardings."""
    invars = _jax.open_jaxpr(emitted.program.jaxpr).invars
    return [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type, sharding=s)
        for v, s in zip(invars, emitted.arguments)
    ]


def lower(emitted: Emitted, platform: str | None = None, donate: bool = True) -> jax.stages.Lowered:
    """StableHLO of the step for a platform ("cpu", "cuda", "tpu"; None: the one JAX runs on). Needs no device when the
    mesh is abstract and the platform is given."""
    jitted = jax.jit(
        emitted.run,
        in_shardings=list(emitted.arguments),
        out_shardings=list(emitted.results),
        donate_argnums=emitted.donated if donate else (),
        keep_unused=True,
    )
    platforms = (platform,) if platform is not None else None
    return jitted.trace(*shapes(emitted)).lower(lowering_platforms=platforms)
