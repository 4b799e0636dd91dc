"""From a plan to the sharding of every argument and result of a program."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax._errors import BatchError, PlanError
from lensjax.plan.plan import Plan, Spec
from lensjax.program.edit import is_var, shape_of
from lensjax.program.program import Program


@dataclasses.dataclass(frozen=True)
class Shardings:
    """Specs under a plan. `arguments`: one per argument; `results`: one per result (None: left to the compiler);
    `gradients`: {parameter index: the spec in which its gradient and its update live}."""

    arguments: tuple[Spec, ...]
    results: tuple[Spec | None, ...]
    gradients: dict[int, Spec]


def whole(rank: int) -> Spec:
    return ((),) * rank


def partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*[None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec])


def named(mesh: Any, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(spec))


def batch_axes(plan: Plan) -> tuple[str, ...]:
    """Mesh axes that split the batch."""
    return tuple(plan.rules.activations.get("batch", ()))


def ways(plan: Plan, axes: tuple[str, ...]) -> int:
    return math.prod(plan.mesh.shape[a] for a in axes)


def batch_spec(plan: Plan, rank: int, axis: int) -> Spec:
    return tuple(batch_axes(plan) if d == axis else () for d in range(rank))


def resolve(program: Program, plan: Plan) -> Shardings:
    """Every argument's and result's spec. Raises PlanError when the plan names other tensors or does not divide them,
    BatchError when the batch does not divide."""
    check_batch(program, plan)
    paths = {a.path for a in program.arguments}
    if unknown := sorted(set(plan.leaves) - paths):
        raise PlanError(
            f"the plan shards {unknown[0]!r}, which the program does not have",
            hint="the plan was made for another program: plan again, or rename the leaf in the plan",
        )
    arguments = []
    for a in program.arguments:
        rank = len(a.shape)
        if a.path in plan.leaves:
            arguments.append(_checked(plan, a.path, a.shape, plan.leaves[a.path]))
        elif a.batch_axis is not None:
            arguments.append(batch_spec(plan, rank, a.batch_axis))
        else:
            arguments.append(whole(rank))
    gradients = _gradient_specs(program, arguments)
    return Shardings(tuple(arguments), _result_specs(program, plan, arguments, gradients), gradients)


def check_batch(program: Program, plan: Plan) -> None:
    n, parts = program.batch.size, ways(plan, batch_axes(plan))
    if n % parts:
        below, above = n // parts * parts, (n // parts + 1) * parts
        sizes = f"{below} or {above}" if below else str(above)
        raise BatchError(
            f"the batch of {n} does not divide into {parts} equal parts (mesh axes {', '.join(batch_axes(plan))})",
            hint=f"the nearest sizes that do: {sizes}. The batch was taken to be {_where(program)}; "
            "if it is not, name it: parallelize(batch_argnums=..., batch_axes=...)",
        )


def _where(program: Program) -> str:
    first = next(a for a in program.arguments if a.batch_axis is not None)
    return f"dimension {first.batch_axis} of {first.path}"


def _checked(plan: Plan, path: str, shape: tuple[int, ...], spec: Spec) -> Spec:
    if len(spec) != len(shape):
        raise PlanError(f"the plan gives {path} a spec of {len(spec)} dimensions; its shape is {shape}")
    for d, axes in enumerate(spec):
        for a in axes:
            if a not in plan.mesh.shape:
                raise PlanError(
                    f"the plan splits {path} over {a!r}, which is not an axis of its mesh {plan.mesh.shape}"
                )
        if shape[d] % ways(plan, axes):
            raise PlanError(
                f"the plan splits dimension {d} of {path} (size {shape[d]}) in {ways(plan, axes)} equal parts",
                hint="JAX shards whole parts only: choose another dimension, or leave it whole",
            )
    return spec


def _gradient_specs(program: Program, arguments: list[Spec]) -> dict[int, Spec]:
    """A gradient lives where the optimizer needs it: split like the parameter's moments if these are split, else like
    the parameter."""
    specs = {p: arguments[p] for p in program.parameters}
    for i, a in enumerate(program.arguments):
        if a.role == "optimizer" and a.follows is not None and any(arguments[i]):
            specs[a.follows] = arguments[i]
    return specs


def _result_specs(
    program: Program, plan: Plan, arguments: list[Spec], gradients: dict[int, Spec]
) -> tuple[Spec | None, ...]:
    out: list[Spec | None] = []
    from_argument = {a.result: i for i, a in enumerate(program.arguments) if a.result is not None}
    from_gradient = {r: p for p, r in program.gradients.items()}
    for r, v in enumerate(_jax.open_jaxpr(program.jaxpr).outvars):
        rank = len(shape_of(v))
        if r in from_argument:
            out.append(arguments[from_argument[r]])
        elif r in from_gradient:
            out.append(gradients[from_gradient[r]])
        elif not is_var(v) or v not in program.batch.dims:
            out.append(whole(rank))
        elif plain := program.batch.plain(v):
            out.append(batch_spec(plan, rank, plain[0]))
        else:
            out.append(None)
    return tuple(out)
