"""What a step knows for `step.export`: the shardings of everything, its constraints by line, and the step itself in
`jax.export`'s own format, so that what is exported compiles to the same collectives."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import jax

from lensjax import __version__, _jax
from lensjax._errors import PlanError
from lensjax.execute.nnx import is_values
from lensjax.passes.emit import abstract_mesh, emit, shapes
from lensjax.passes.shardings import resolve
from lensjax.plan.export import Facts
from lensjax.plan.plan import Plan
from lensjax.program.edit import all_equations
from lensjax.program.program import Program


def facts(program: Program, plan: Plan, name: str, mesh: Any = None) -> Facts:
    """`mesh`: of real devices where the step itself is wanted, None without it. Raises PlanError where it cannot be
    written to a file."""
    found = resolve(program, plan)
    return Facts(
        name=name,
        arguments={a.path: s for a, s in zip(program.arguments, found.arguments)},
        results=tuple(zip(program.result_paths, found.results)),
        donated=emit(program, plan, mesh or abstract_mesh(plan)).donated,
        constraints=constraints(program, plan),
        program=serialized(program, plan, mesh) if mesh is not None else "",
        made=f"Made by lensjax {__version__} with jax {jax.__version__}",
    )


def constraints(program: Program, plan: Plan) -> list[tuple[str, Any]]:
    """(line of the user's code and type, spec) of every sharding constraint that the plan puts into the step, once."""
    pinned = emit(program, plan, abstract_mesh(plan)).pinned
    found: dict[tuple[str, Any], None] = {}
    for eqn in all_equations(pinned) if pinned is not None else ():
        if eqn.primitive.name == "sharding_constraint":
            aval = eqn.outvars[0].aval
            at = f"{_jax.user_line(eqn)} {aval.dtype}{list(aval.shape)}"
            found[at, eqn.params["sharding"].spec] = None
    return list(found)


def serialized(program: Program, plan: Plan, mesh: Any) -> str:
    """The emitted step as base-85 text of compressed jax.export bytes."""
    if program.captured:
        raise PlanError(
            f"the step closes over {len(program.captured)} arrays, which a file cannot refer to",
            hint="pass them as arguments, then export",
        )
    taken = program.arguments[: len(program.call.leaves)]
    args = program.call.rebuild([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in taken])
    if any(map(is_values, jax.tree.leaves(args, is_leaf=is_values))):
        raise PlanError(
            "the step updates modules in place: a file cannot hold their classes",
            hint='write the step with nnx.split and nnx.merge, or export("json")',
        )
    emitted = emit(program, plan, mesh)
    jitted = jax.jit(
        emitted.run, in_shardings=list(emitted.arguments), out_shardings=list(emitted.results), keep_unused=True
    )
    platform = jax.default_backend().replace("gpu", "cuda")
    try:
        made = jax.export.export(jitted, platforms=(platform,))(*shapes(emitted))
    except (ValueError, NotImplementedError) as e:
        raise PlanError(
            f"the step cannot be written to a file: {str(e).splitlines()[0]}",
            hint='callbacks and foreign kernels belong to their process; export("json") has the shardings',
        ) from e
    try:
        return base64.b85encode(zlib.compress(made.serialize(), 9)).decode()
    except ImportError as e:
        raise PlanError(
            "jax.export writes programs with the package flatbuffers, which is not installed",
            hint="pip install flatbuffers (the exported file needs it as well); json and flax-rules do without",
        ) from e
