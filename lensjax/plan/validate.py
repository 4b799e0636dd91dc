"""Whether a plan that was given (a file, or a Plan made by hand) means something: every field is one that is carried
out, and names what exists. A field that would do nothing is refused by its name, never ignored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lensjax._errors import PlanError
from lensjax.plan.levels import parse
from lensjax.plan.plan import MeshPlan, Plan, Rules

GATHER = ("once", "again")


def validate(plan: Plan, *, layers: Collection[str] | None = None, tiers: Collection[str] | None = None) -> Plan:
    """The plan, with every field of its declared type. Raises PlanError naming the field that is wrong.

    `layers`: the program's layers and `tiers`: the cluster's, where they are known, for the fields that name them.
    """
    plan = Plan.from_dict(plan.to_dict())  # a plan made by hand may hold anything: this names the field
    _check_mesh(plan.mesh)
    _check_executable(plan, tiers)
    axes = plan.mesh.shape
    for kind in ("params", "optimizer", "grads", "activations"):
        for logical, names in getattr(plan.rules, kind).items():
            _check_axes(f"rules.{kind}.{logical}", names, axes)
    _check_rules(plan.rules)
    for path, spec in plan.leaves.items():
        _check_axes(f"leaves.{path}", [a for names in spec for a in names], axes)
    _check_gather(plan.gather, layers)
    return plan


def _check_mesh(mesh: MeshPlan) -> None:
    if not mesh.axes:
        raise PlanError("field 'mesh.axes' is empty", hint="a mesh has one axis at least, of size 1 for one device")
    for i, axis in enumerate(mesh.axes):
        if not axis.name:
            raise PlanError(f"field 'mesh.axes[{i}].name' is empty")
        if axis.size < 1:
            raise PlanError(f"field 'mesh.axes[{i}].size' is {axis.size}; an axis has at least 1 device")
    if twice := _twice([a.name for a in mesh.axes]):
        raise PlanError(f"field 'mesh.axes' has two axes named {twice!r}", hint="names tell axes apart: rename one")
    if mesh.order is not None and sorted(mesh.order) != list(range(mesh.size)):
        twice, count = _twice(mesh.order), len(mesh.order)
        why = (
            f"has {count} numbers"
            if count != mesh.size
            else f"names the device {twice} twice"
            if twice is not None
            else f"names the device {next(n for n in mesh.order if not 0 <= n < mesh.size)}"
        )
        raise PlanError(
            f"field 'mesh.order' {why}; expected each of 0..{mesh.size - 1} once",
            hint="leave it out (null) for JAX's own order",
        )


def _check_executable(plan: Plan, tiers: Collection[str] | None) -> None:
    """Fields for what no pass carries out yet hold their defaults."""
    for layer, level in plan.layers.items():
        parse(level, f"layers.{layer}")
    for name in ("count", "share"):
        value = getattr(plan.micro, name)
        if value is not None and value < 1:
            raise PlanError(f"field 'micro.{name}' is {value}; expected 1 or more")
    if plan.chunks < 1:
        raise PlanError(f"field 'chunks' is {plan.chunks}; expected 1 or more")
    for tier, reduce in plan.reduce.items():
        if tiers is not None and tier not in tiers:
            raise PlanError(f"field 'reduce.{tier}' names no tier of the cluster", hint=f"tiers: {', '.join(tiers)}")
        if reduce.bucket is not None and reduce.bucket < 1:
            raise PlanError(f"field 'reduce.{tier}.bucket' is {reduce.bucket}; expected bytes, at least 1")
        if reduce.bucket is not None and reduce.codec == "exact":
            raise PlanError(
                f"field 'reduce.{tier}.bucket' does nothing: an exact reduction is the compiler's own",
                hint="name a codec in 'reduce.*.codec', or leave it out",
            )
        if reduce.pins and reduce.codec == "exact":
            raise PlanError(
                f"field 'reduce.{tier}.pins' does nothing: an exact reduction has no codec to differ from",
                hint="name a codec in 'reduce.*.codec', or leave them out",
            )
        if reduce.inside and not reduce.split and reduce.codec == "exact":
            raise PlanError(
                f"field 'reduce.{tier}.inside' does nothing: the compiler reduces where it likes",
                hint="set 'reduce.*.split', or name a codec in 'reduce.*.codec'",
            )
        if reduce.inside and plan.micro.any_number:
            raise PlanError(
                f"field 'reduce.{tier}.inside' is for the last micro-batch; 'micro' does not say how many there are "
                f"(share {plan.micro.share} alone: any number)",
                hint="give micro.count, or leave 'inside' out",
            )
        batch = plan.rules.activations.get("batch", ())
        if (reduce.split or reduce.codec != "exact") and not any(
            a.tier == tier and a.name in batch for a in plan.mesh.axes
        ):
            raise PlanError(
                f"field 'reduce.{tier}' does nothing: no mesh axis of that tier splits the batch",
                hint="the tier of an axis stands in 'mesh.axes'",
            )
    for tier in plan.secondary:
        if tiers is not None and tier not in tiers:
            raise PlanError(f"field 'secondary.{tier}' names no tier of the cluster", hint=f"tiers: {', '.join(tiers)}")
        mine = {a.name for a in plan.mesh.axes if a.tier == tier}
        if not any(mine & set(entry) for spec in plan.leaves.values() for entry in spec):
            raise PlanError(
                f"field 'secondary.{tier}' does nothing: no tensor is split over a mesh axis of that tier",
                hint="the tier of an axis stands in 'mesh.axes'",
            )
    if plan.prefetch and "again" not in plan.gather.values():
        raise PlanError(
            "field 'prefetch' of the plan does nothing: no layer gathers its weights again",
            hint="set 'gather' to 'again' for a layer, or '*'",
        )
    if plan.pipeline is not None:
        raise _not_yet("pipeline", f"{plan.pipeline.stages} stages", "set it to null")
    if plan.flags:
        name, value = next(iter(plan.flags.items()))
        raise _not_yet(f"flags.{name}", value, "set it in XLA_FLAGS, where the program is started")


def _not_yet(field: str, value: Any, hint: str) -> PlanError:
    return PlanError(f"field '{field}' of the plan is {value!r}, which cannot be executed yet", hint=hint)


def _check_axes(field: str, names: Sequence[str], axes: Mapping[str, int]) -> None:
    if unknown := [a for a in names if a not in axes]:
        raise PlanError(
            f"field '{field}' names {unknown[0]!r}, which is not an axis of the plan's mesh",
            hint=f"axes of this plan: {', '.join(axes)}",
        )
    if (twice := _twice(names)) is not None:
        raise PlanError(f"field '{field}' names the mesh axis {twice!r} twice", hint="an axis splits one dimension")


def _check_rules(rules: Rules) -> None:
    """Tensors of the state are split as `leaves` says: a rule for them repeats a rule for activations or is void."""
    for kind in ("params", "optimizer", "grads"):
        for logical, names in getattr(rules, kind).items():
            if logical not in rules.activations:
                raise PlanError(
                    f"field 'rules.{kind}.{logical}' does nothing by itself: no rule for activations has this axis",
                    hint="how a tensor of the state is split stands in 'leaves', by its path",
                )
            if names != rules.activations[logical]:
                raise PlanError(
                    f"field 'rules.{kind}.{logical}' is {list(names)}; 'rules.activations.{logical}' is "
                    f"{list(rules.activations[logical])}",
                    hint="the two must agree; a single tensor's split stands in 'leaves', by its path",
                )


def _check_gather(gather: Mapping[str, str], layers: Collection[str] | None) -> None:
    for layer, mode in gather.items():
        if mode not in GATHER:
            raise PlanError(f"field 'gather.{layer}' is {mode!r}; expected {' or '.join(map(repr, GATHER))}")
        known = {"*"} if not layers else {"*", "", *layers}
        if layers is not None and layer not in known:
            raise PlanError(
                f"field 'gather.{layer}' names a layer that the step does not have",
                hint=f"layers of this step: {', '.join(layers) or 'none'}; '*' stands for all",
            )


def _twice(values: Sequence[Any]) -> Any:
    """The first value that stands twice, None where none does."""
    return next((v for v, n in Counter(values).items() if n > 1), None)
