"""Which parts of the batch are computed apart: from the plan's `micro` and `reduce` fields to sizes and mesh axes."""

from __future__ import annotations

import dataclasses

from lensjax._errors import PlanError
from lensjax.passes.shardings import batch_axes, ways
from lensjax.plan.plan import Micro, Plan
from lensjax.program.program import Program


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How the batch is cut. `axes`: mesh axes along which shares lie side by side, `groups` of them; `inside`: axes
    that split the batch of each share; `slow`: those of `axes` that the plan reduces by itself. Examples, in units of
    one for each of the `outer` pieces into which the step itself splits its batch: `local` of each group are `full`
    shares of `share`, then one of `rest`."""

    axes: tuple[str, ...]
    inside: tuple[str, ...]
    slow: tuple[str, ...]
    groups: int
    outer: int
    local: int
    share: int
    full: int
    rest: int

    @property
    def count(self) -> int:
        return self.full + (self.rest > 0)


def slow_axes(plan: Plan) -> tuple[str, ...]:
    """Mesh axes of the batch over which the plan reduces partial gradients by itself: those of a tier whose `reduce`
    says `split`, or names a codec."""
    tiers = {tier for tier, r in plan.reduce.items() if r.split or r.codec != "exact"}
    tier_of = {a.name: a.tier for a in plan.mesh.axes}
    return tuple(a for a in batch_axes(plan) if tier_of[a] in tiers and plan.mesh.shape[a] > 1)


def inside_loops(plan: Plan) -> bool:
    """Whether gradients of scanned layers are reduced over the slow axes in their backward loop."""
    tier_of = {a.name: a.tier for a in plan.mesh.axes}
    return any(plan.reduce[tier_of[a]].inside for a in slow_axes(plan))


def splits(plan: Plan) -> bool:
    """Whether the plan computes shares of the batch apart."""
    return plan.micro != Micro() or bool(slow_axes(plan))


def falls_back(program: Program, plan: Plan) -> str:
    """Why the plan's node split is left to the compiler instead (an exact reduction of the whole step); empty where it
    is not, or where none is asked for."""
    if plan.micro != Micro() or not slow_axes(plan) or program.split.node:
        return ""
    return (
        f"the reduction over {', '.join(slow_axes(plan))} is left to the compiler, exact and uncompressed: the step "
        f"does not split over nodes: {program.split.node}"
    )


def sizes(program: Program, plan: Plan) -> Sizes:
    """Raises PlanError where the step does not split, or not into that many shares."""
    split, micro = program.split, plan.micro
    looped = micro != Micro()
    if looped and not split.micro:
        field = "count" if micro.share is None else "share"
        raise PlanError(
            f"field 'micro.{field}' of the plan is {getattr(micro, field)}; the step cannot go through its batch share "
            f"by share: {split.micro}",
            hint="leave 'micro' out: the whole batch then goes through at once",
            code="split",
        )
    slow = slow_axes(plan)
    axes = batch_axes(plan) if looped else slow
    inside = tuple(a for a in batch_axes(plan) if a not in axes)
    if slow != batch_axes(plan)[: len(slow)]:
        raise PlanError(
            f"field 'reduce' of the plan is about the mesh axes {', '.join(slow)}; the batch is split over "
            f"{', '.join(batch_axes(plan))}",
            hint="axes that are reduced apart are the outermost of the batch's: reorder 'rules.activations.batch'",
            code="split",
        )
    n, outer, groups = program.batch.size, split.outer, ways(plan, axes)
    unit = outer * groups
    if n % (unit * ways(plan, inside)):
        raise PlanError(
            f"the batch of {n} does not divide into the {outer} pieces of the step's own accumulation on each of "
            f"{groups * ways(plan, inside)} devices",
            hint=f"a batch that {unit * ways(plan, inside)} divides",
            code="split",
        )
    local = n // unit
    one = _share(plan, n, unit, local)
    found = Sizes(axes, inside, slow, groups, outer, local, one, local // one, local % one)
    if looped and inside_loops(plan) and not found.rest:  # the last share has a program of its own
        found = dataclasses.replace(found, full=found.full - 1, rest=one)
    if micro.share is None and found.count != micro.count:
        raise PlanError(
            f"field 'micro.count' of the plan is {micro.count}; the {local} examples of each device do not make as "
            f"many shares of equal size (shares of {one} make {found.count})",
            hint=f"micro.count {found.count}, or another number up to {local}",
            code="split",
        )
    if not micro.any_number and found.count != micro.count:
        raise PlanError(
            f"fields 'micro.count' and 'micro.share' of the plan are {micro.count} and {micro.share}; a batch of {n} "
            f"makes {found.count} shares of {micro.share}",
            hint="give one of the two: share alone takes batches of any size",
            code="split",
        )
    return found


def _share(plan: Plan, n: int, unit: int, local: int) -> int:
    micro = plan.micro
    if micro.share is None:
        return -(-local // micro.count)
    if micro.share % unit or not 0 < micro.share <= n:
        raise PlanError(
            f"field 'micro.share' of the plan is {micro.share}; expected a number of examples up to the batch of {n}, "
            f"of which each of {unit} parts gets as many",
            hint=f"a multiple of {unit}, at most {n}",
            code="split",
        )
    return micro.share // unit
