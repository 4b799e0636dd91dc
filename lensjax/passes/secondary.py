"""A copy of the weights inside each node: what is split over a slow tier crosses it once a step.

Weights that are split over all devices (ZeRO stage 3) travel over slow links twice a step, for the forward and for the
backward. Under a plan with a `secondary` field they are gathered over the slow axes before the batch is read, as codes
where the field names a codec; the copy stays split over the other axes and is what forward and backward read. The
optimizer goes on with the weights themselves, so that no rounding is ever kept. (hpZ and qwZ of ZeRO++, Wang et al.,
arXiv:2306.10209.) The price is the copy's memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lensjax import comm
from lensjax._errors import PlanError
from lensjax.passes.compress import codec_in
from lensjax.passes.shardings import Shardings, partition_spec
from lensjax.passes.share_layout import without
from lensjax.plan.plan import Plan, Spec
from lensjax.program.program import Program


@dataclasses.dataclass(frozen=True)
class Copy:
    """A weight's copy. `spec`: of the weight; `inside`: of the copy; `gathered`: (dimension, slow axes) to gather."""

    spec: Spec
    inside: Spec
    gathered: tuple[tuple[int, tuple[str, ...]], ...]
    codec: comm.Codec

    def __call__(self, weight: jax.Array, mesh: Any) -> jax.Array:
        def gather(shard: jax.Array) -> jax.Array:
            for d, axes in self.gathered:
                shard = comm.all_gather(shard, axes, dimension=d, codec=self.codec)
            return shard

        spec, inside = partition_spec(self.spec), partition_spec(self.inside)
        return jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=inside, check_vma=False)(weight)


def check(plan: Plan, slow: tuple[str, ...]) -> None:
    """Raises PlanError where gradients are not reduced apart (over the mesh axes `slow`) over a tier of the field."""
    for tier in plan.secondary:
        if not slow or {a.name for a in plan.mesh.axes if a.tier == tier} - set(slow):
            raise PlanError(
                f"field 'secondary.{tier}' of the plan: gradients are not reduced apart over that tier",
                hint=f"set reduce.{tier} to a codec, or its 'split' to true",
            )


def copies(program: Program, plan: Plan, shardings: Shardings, slow: tuple[str, ...]) -> dict[int, Copy]:
    """{argument index: its copy}. `slow`: the mesh axes over which the plan reduces gradients by itself. Raises
    PlanError for a weight that cannot be copied so."""
    check(plan, slow)
    found: dict[int, Copy] = {}
    for tier, name in plan.secondary.items():
        axes = {a.name for a in plan.mesh.axes if a.tier == tier}
        policy = comm.Policy(parsed(tier, name), small="exact")
        for i, a in enumerate(program.arguments):
            spec = shardings.arguments[i]
            if a.role != "parameter" or not any(axes & set(entry) for entry in spec):
                continue
            if i in found:
                raise PlanError(f"{a.path} is split over two tiers of the field 'secondary'", hint="name one of them")
            gathered = []
            for d, entry in enumerate(spec):
                own = tuple(x for x in entry if x in axes)
                if entry[len(entry) - len(own) :] != own:
                    raise PlanError(
                        f"the plan splits dimension {d} of {a.path} over {', '.join(entry)}; a copy inside the node "
                        f"needs {', '.join(own)} last",
                        hint="parallelize(secondary=...) lays weights out so",
                    )
                if own:
                    gathered.append((d, own))
            float_ = jnp.issubdtype(a.dtype, jnp.floating)
            codec = policy(a.path, jax.ShapeDtypeStruct(a.shape, a.dtype)) if float_ else comm.Exact()
            found[i] = Copy(spec, without(spec, tuple(axes)), tuple(gathered), codec)
    return found


def parsed(tier: str, name: str) -> comm.Codec:
    """The codec of a plan's `secondary` field. Raises PlanError."""
    codec = codec_in(f"secondary.{tier}", name)
    if not isinstance(codec, comm.VectorCodec | comm.Exact):
        raise PlanError(
            f"field 'secondary.{tier}' of the plan is {name!r}, which sums and does not send",
            hint="int8, int4, fp8, bf16 or exact",
        )
    return codec


def describe(plan: Plan) -> str:
    """How weights are rounded under a plan with copies; empty under any other."""
    told = []
    for tier, name in plan.secondary.items():
        codec = comm.parse_codec(name)
        how = "exactly" if isinstance(codec, comm.Exact) else f"as {codec} (rounded by {codec.precision})"
        told.append(f"weights cross {tier!r} once a step, {how}, for a copy that stays inside")
    return "; ".join(told)
