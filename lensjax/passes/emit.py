"""Emission: a program under a plan as something that JAX lowers and runs.

`emit` is the one way from a plan to XLA: what is priced, what is verified and what runs are the same jaxpr with
the same shardings.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core as jcore
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.passes import secondary
from lensjax.passes.chunks import chunks
from lensjax.passes.compress import describe, reducer
from lensjax.passes.host_state import fetched, moved, on_host
from lensjax.passes.pin import pin
from lensjax.passes.prefetch import prefetch
from lensjax.passes.recompute import recompute
from lensjax.passes.reduce import Reducer
from lensjax.passes.regions import on_mesh
from lensjax.passes.shardings import named, resolve
from lensjax.passes.share_sizes import falls_back, splits
from lensjax.passes.shares import shares
from lensjax.passes.steady import compared
from lensjax.plan.plan import Plan, Spec
from lensjax.program.program import Program

# XLA's scheduler that starts collectives early and waits for them late. It is on for GPUs from Hopper on; before them
# XLA leaves it out unless asked, and a collective of a loop's body then stands where it is needed.
HIDING = "xla_gpu_enable_latency_hiding_scheduler"


@dataclasses.dataclass(frozen=True)
class Emitted:
    """A program with its plan applied, on a mesh. `run(*leaves) -> [results]` computes the step from flat leaves
    (captured arrays included); shardings are flat too (a result's None is left to the compiler). `donated`: argument
    positions. `notes`: what a reader should know: a field of the plan that is carried out in another way. `pinned`: the
    jaxpr behind `run`, None where the step is a loop over shares. `extra`: the hidden state of the plan, name ->
    ShapeDtypeStruct with sharding: `run` takes it after the leaves and returns its next values after the results.
    `steady`: some value is held for a comparison (see `passes.steady`)."""

    program: Program
    plan: Plan
    mesh: Any
    run: Callable[..., list[Any]]
    arguments: tuple[NamedSharding, ...]
    results: tuple[NamedSharding | None, ...]
    donated: tuple[int, ...]
    notes: tuple[str, ...] = ()
    pinned: Any = None
    extra: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    steady: bool = False

    def options(self, platform: str | None = None) -> dict[str, Any]:
        """The options that `run` is compiled with on a platform (None: that of the mesh's devices). What XLA_FLAGS
        says of the GPU compiler's scheduler stands."""
        devices = () if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat
        platform = platform or next((d.platform for d in devices), None)
        if platform in ("cuda", "gpu"):
            return {} if HIDING in os.environ.get("XLA_FLAGS", "") else {HIDING: True}
        return _jax.keep_barriers() if self.steady and platform == "cpu" else {}


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """The plan's mesh without devices."""
    axes = plan.mesh.axes
    return AbstractMesh(
        tuple(a.size for a in axes), tuple(a.name for a in axes), axis_types=(AxisType.Auto,) * len(axes)
    )


def emit(program: Program, plan: Plan, mesh: Any, reduce: Reducer | None = None) -> Emitted:
    """Applies the plan's passes; `reduce`: what happens to partial gradients over the plan's slow axes (None: what the
    plan says). Raises PlanError or BatchError where the plan does not apply."""
    shardings = resolve(program, plan)
    note = falls_back(program, plan)
    pinned, extra, copied, stored, ahead = None, {}, "", "", ""
    reduce = reduce or reducer(plan)
    # On CPUs the host's memory is the device's own.
    away = on_host(program, plan) if not _on_cpu(mesh) else ()
    back = {program.arguments[i].result for i in away}
    if not splits(plan):
        secondary.check(plan, ())
    if splits(plan) and not note:
        _check_shares(plan)
        run, extra, stored = shares(program, plan, mesh, shardings, reduce)
        note = describe(plan)
        copied = secondary.describe(plan)
    else:
        kept = on_mesh(chunks(recompute(program, plan, shardings), plan), plan, mesh)
        pinned = pin(kept, plan, mesh, shardings).jaxpr
        if plan.prefetch:
            pinned, done = prefetch(pinned)
            ahead = done.note()
        if away:
            pinned = fetched(pinned, program, away)
        run = jcore.jaxpr_as_fun(_jax.close(pinned))
    donated = tuple(
        i for i, a in enumerate(program.arguments) if program.donate and a.result is not None and a.role != "batch"
    )
    notes = [n for n in (note, stored, copied, ahead) if n]
    lines = compared(program.jaxpr) if plan.mesh.size > 1 else []
    if lines:
        where = ", ".join(line for line in lines if line) or "lines unknown"
        notes.append(
            f"values that are compared with their own maximum, or with others picked from them, are written to memory "
            f"once, so that both sides read the same bits: {where}"
        )
    return Emitted(
        program=program,
        plan=plan,
        mesh=mesh,
        run=run,
        arguments=tuple(_placed(mesh, s, i in away) for i, s in enumerate(shardings.arguments)),
        results=tuple(_placed(mesh, s, r in back) if s is not None else None for r, s in enumerate(shardings.results)),
        donated=donated,
        notes=tuple(notes),
        pinned=pinned,
        steady=bool(lines),
        extra=extra,
    )


def _check_shares(plan: Plan) -> None:
    """Fields that cannot be carried out where shares of the batch are computed apart."""
    apart = "and the plan computes shares of the batch apart (micro, reduce)"
    if plan.chunks > 1:
        raise PlanError(
            f"field 'chunks' is {plan.chunks}, {apart}",
            hint="smaller shares have fewer logits: raise micro.count, or leave one of the two out",
        )
    if plan.host:
        raise PlanError(f"field 'host' is {list(plan.host)}, {apart}", hint="leave one of the two out")


def _on_cpu(mesh: Any) -> bool:
    return not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "cpu"


def _placed(mesh: Any, spec: Spec, away: bool) -> NamedSharding:
    return moved(named(mesh, spec)) if away else named(mesh, spec)


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
    hidden, first = [s.sharding for s in emitted.extra.values()], len(emitted.arguments)
    jitted = jax.jit(
        emitted.run,
        in_shardings=[*emitted.arguments, *hidden],
        out_shardings=[*emitted.results, *hidden],
        donate_argnums=(*emitted.donated, *range(first, first + len(hidden))) if donate else (),
        keep_unused=True,
        compiler_options=emitted.options(platform),
    )
    platforms = (platform,) if platform is not None else None
    return jitted.trace(*shapes(emitted), *emitted.extra.values()).lower(lowering_platforms=platforms)
