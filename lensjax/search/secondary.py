"""Plans in which weights cross the slow tier once: from weights that are split over all devices to a copy in each node.

A mesh axis that reaches over nodes is cut in two, so that its part between the nodes has a name of its own; it splits
weights innermost, and what a device gathers over it is cut from its own shard (see `passes.secondary`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from lensjax._errors import BatchError, CodecError, PlanError
from lensjax.comm import parse_codec
from lensjax.passes.secondary import parsed
from lensjax.passes.shardings import batch_axes
from lensjax.passes.share_sizes import falls_back
from lensjax.plan.plan import Axis, MeshPlan, Plan, Reduce, Rules, Spec
from lensjax.program.program import Program
from lensjax.search.candidates import Candidate
from lensjax.search.choose import Choice, tier_names
from lensjax.search.compressed import COUNT, noted, slow_tier
from lensjax.topology.cluster import Cluster


def check_secondary(how: object) -> None:
    """Raises PlanError for what is no way to carry weights."""
    if how is None:
        return
    if not isinstance(how, str):
        raise PlanError(f"secondary={how!r}; expected a codec's name or None", hint='as in secondary="int8"')
    try:
        parse_codec(how)
    except CodecError as e:
        raise PlanError(f"secondary={how!r}: {e.message}", hint=e.hint) from e


def copied(
    choice: Choice, program: Program, cluster: Cluster, codec: str | None, pricer: Callable[[Plan], Plan]
) -> Choice:
    """The choice among the best plans with copies of their weights inside each node, carried by `codec` (None: as it
    is). The plan's findings say what that gained, or why it changes nothing."""
    if codec is None:
        return choice
    made: list[Candidate] = []
    reason = ""
    for old in [c for c in choice.candidates if c.fits(choice.memory)][:COUNT]:
        assert old.plan is not None
        tier = slow_tier(old.plan, cluster)
        if tier is None:
            reason = reason or "no weight crosses a slow tier under this plan"
            continue
        try:
            plan = with_copies(program, old.plan, tier, codec, tier_names(cluster))
            if why := falls_back(program, plan):
                raise PlanError(why)
            made.append(Candidate(plan.name, pricer(plan)))
        except (PlanError, BatchError) as e:
            reason = reason or e.message
    able = [c for c in made if c.fits(choice.memory)]
    if not able:
        return noted(choice, f"secondary={codec!r} changes nothing: {reason or 'no plan with copies fits the memory'}")
    best = min(able, key=lambda c: c.step_s)
    assert best.plan is not None
    others = tuple(sorted([*choice.candidates, *made], key=lambda c: c.step_s))
    return dataclasses.replace(choice, plan=best.plan, candidates=others)


def with_copies(program: Program, plan: Plan, tier: str, codec: str, sizes: Mapping[int, str]) -> Plan:
    """`plan` with copies of its weights inside the groups that are faster than `tier`. `sizes`: {devices: the name of
    the smallest tier that holds them}. Raises PlanError where no weight is split over the tier."""
    parsed(tier, codec)
    fast = max((n for n in sizes if n < max(k for k, name in sizes.items() if name == tier)), default=1)
    for axis in plan.mesh.axes:
        if axis.tier == tier and axis.name in batch_axes(plan):
            plan = _cut(plan, axis, fast, sizes)
    slow = {a.name for a in plan.mesh.axes if a.tier == tier and a.name in batch_axes(plan)}
    weights = [a.path for a in program.arguments if a.role == "parameter" and a.path in plan.leaves]
    if not any(slow & set(entry) for path in weights for entry in plan.leaves[path]):
        raise PlanError(
            f"no weight is split over {tier!r} under the plan {plan.name!r}: there is nothing to copy",
            hint="copies are for weights that all devices share, as under fsdp",
        )
    leaves = {path: tuple(_last(entry, slow) for entry in spec) for path, spec in plan.leaves.items()}
    reduce = plan.reduce if tier in plan.reduce else {**plan.reduce, tier: Reduce(split=True)}
    return plan.replace(leaves=leaves, reduce=reduce, secondary={tier: codec}, name=f"{plan.name} copies")


def _cut(plan: Plan, axis: Axis, fast: int, sizes: Mapping[int, str]) -> Plan:
    """The plan with `axis` as two: between the fast groups, and inside them. As it is where it is not inside any."""
    axes, at = plan.mesh.axes, plan.mesh.axes.index(axis)
    inner = math.prod(a.size for a in axes[at + 1 :])
    keep = fast // inner
    if keep <= 1 or fast % inner or axis.size % keep or axis.size == keep:
        return plan
    outer = f"{axis.name}_out"
    if outer in plan.mesh.shape:
        raise PlanError(f"the plan has a mesh axis {outer!r} already")
    tier = sizes[min(n for n in sizes if n >= inner * keep)]
    pair = (Axis(outer, axis.size // keep, axis.tier), Axis(axis.name, keep, tier))

    def both(entry: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(x for a in entry for x in ((outer, a) if a == axis.name else (a,)))

    rules = {
        kind: {k: both(v) for k, v in getattr(plan.rules, kind).items()}
        for kind in ("params", "optimizer", "grads", "activations")
    }
    leaves: dict[str, Spec] = {path: tuple(map(both, spec)) for path, spec in plan.leaves.items()}
    mesh = MeshPlan((*axes[:at], *pair, *axes[at + 1 :]), plan.mesh.order)
    return dataclasses.replace(plan, mesh=mesh, rules=Rules(**rules), leaves=leaves)


def _last(entry: tuple[str, ...], slow: set[str]) -> tuple[str, ...]:
    return (*(a for a in entry if a not in slow), *(a for a in entry if a in slow))
