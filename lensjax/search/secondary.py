"""Plans in which weights cross the slow tier once: from weights that are split over all devices to a copy in each node.

A mesh axis that reaches over nodes is cut in two, so that its part between the nodes has a name of its own; it splits
weights innermost, and what a device gathers over it is cut from its own shard (see `passes.secondary`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lensjax._errors import PlanError
from lensjax.passes.secondary import parsed
from lensjax.passes.shardings import batch_axes
from lensjax.plan.plan import Axis, MeshPlan, Plan, Reduce, Rules, Spec
from lensjax.program.program import Program


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
    inner = 1
    for a in axes[at + 1 :]:
        inner *= a.size
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
