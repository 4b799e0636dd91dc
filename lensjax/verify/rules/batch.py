"""The batch lost on the way, and work repeated on every device along a mesh axis."""

from __future__ import annotations

from collections.abc import Iterator

from lensjax.partition import Node, Value
from lensjax.partition.flops import flops
from lensjax.partition.text import named_list
from lensjax.verify.facts import Facts, size_of
from lensjax.verify.finding import SMALL, Case, Finding, size

MATMULS = ("stablehlo.dot_general", "stablehlo.convolution")
_LOST = 0.05  # part of the arithmetic that runs on activations too large; routers and losses are below
_MUCH_REPEATED = 0.3  # beyond this part something was forgotten; below, layers are too narrow to be split or worth it
_REPEATED = 0.08  # part of the arithmetic repeated along an axis that is worth a word; small projections are below


def batch_lost(case: Case) -> Iterator[Finding]:
    """Inside the step, values that grow with the batch are not split along the axes that split the batch outside.

    Shardy lets a parameter's sharding win over the batch's where nothing pins the activations.
    """
    facts = case.facts
    if facts is None or not facts.data:
        return
    work = [(node, times * flops(node, facts.parts.values)) for node, times, _ in facts.walk() if node.name in MATMULS]
    total = sum(cost for _, cost in work) or 1.0
    lost = [(n, cost, axes) for n, cost in work if (axes := _missing(facts, n))]
    wasted = sum(cost for _, cost, _ in lost)
    if wasted < _LOST * total:
        return
    axes = sorted(set().union(*(a for _, _, a in lost)))
    extra = _extra_memory(facts, axes)
    moved = _moved(facts, axes)
    where = first_loss(facts, axes) or lost[0][0].source
    times = size_of(facts.mesh, axes)
    yield Finding(
        "batch_lost", "error" if wasted > 0.2 * total else "warning", where, extra + moved,
        f"the batch is no longer split along {_names(axes)} here: {wasted / total:.0%} of the arithmetic runs on "
        f"activations {times}x as large as they need be; on each device they take about {size(extra)} more memory "
        f"(what is kept from forward to backward) and {size(moved)} of traffic per step along {_names(axes)}",
        "pin the activations at layer boundaries: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, "
        f"P({', '.join(map(repr, facts.data))}, ...)))",
    )  # fmt: skip


def _missing(facts: Facts, node: Node) -> frozenset[str]:
    """Data axes that no batch dimension of a matmul is split along, though it has one."""
    values = (*(facts.before(v) for v in node.inputs), *node.outputs)
    inside = [(v, facts.batch[v]) for v in values if v in facts.batch]
    if not inside:
        return frozenset()
    there = [facts.split_by(v, dims) for v, dims in inside]
    missing = frozenset(facts.data) - frozenset.union(*there)
    return missing - _experts(facts, node) if missing else missing


def _experts(facts: Facts, node: Node) -> frozenset[str]:
    """Axes that split a batching dimension of a matmul with weights: experts, each with its own part of the tokens."""
    if node.name != "stablehlo.dot_general":
        return frozenset()
    dims = named_list("rhs_batching_dimensions", node.attributes["dot_dimension_numbers"])
    return facts.split_by(node.inputs[1], dims)


def first_loss(facts: Facts, axes: list[str]) -> str:
    """The line of the first value that grows with the batch and lacks some axes, though what it is made of has them."""
    for node, _, _ in facts.walk():
        for out in node.outputs:
            if out not in facts.batch or not node.source or facts.split_by(out, facts.batch[out]) >= set(axes):
                continue
            having = [v for v in node.inputs if v in facts.batch and facts.split_by(v, facts.batch[v]) >= set(axes)]
            if having and len(facts.parts.values[out].shape) > 1:
                return node.source
    return ""


def _extra_memory(facts: Facts, axes: list[str]) -> float:
    """Bytes that values kept from forward to backward (results of loops) take beyond their share."""
    extra = 0.0
    keep = 1 - 1 / size_of(facts.mesh, axes)
    for node, _, _ in facts.walk():
        if node.name == "stablehlo.while":
            for out in node.outputs:
                if out in facts.batch and not facts.split_by(out, facts.batch[out]) >= set(axes):
                    extra += facts.parts.values[out].bytes * keep
    if not extra:
        lost = [facts.parts.values[v].bytes for v, d in facts.batch.items() if not facts.split_by(v, d) >= set(axes)]
        extra = keep * max(lost, default=0.0)
    return extra


def _moved(facts: Facts, axes: list[str]) -> float:
    """Bytes that a device sends along the axes for activations, which would stay where they are."""
    total = 0.0
    for c in facts.parts.collectives:
        along = {a.partition(":")[0] for a in c.axes}
        if along & set(axes) and any(v in facts.batch for v in (*c.reads, *c.writes)):
            total += c.trips * c.bytes * (2 if c.op == "all_reduce" else 1) * (c.group - 1) / c.group
    return total


def repeated_work(case: Case) -> Iterator[Finding]:
    """Matmuls that every device along a mesh axis does alike."""
    facts = case.facts
    if facts is None:
        return
    nodes = [(n, times * flops(n, facts.parts.values)) for n, times, _ in facts.walk() if n.name in MATMULS]
    total = sum(cost for _, cost in nodes) or 1.0
    for axis, devices in facts.mesh.items():
        if devices < 2:
            continue
        alike = [(n, cost) for n, cost in nodes if axis not in _used(facts, n)]
        wasted = sum(cost for _, cost in alike) * (1 - 1 / devices)
        if wasted < _REPEATED * total:
            continue
        worst = max(alike, key=lambda p: p[1])[0]
        whole = facts.parts.values[max(worst.inputs, key=lambda v: facts.parts.values[v].bytes)]
        yield Finding(
            "repeated_work", "error" if wasted > _MUCH_REPEATED * total else "note", worst.source, _bytes(whole),
            f"{wasted / total:.0%} of the arithmetic of each device is the same on all {devices} devices along "
            f"{axis!r}: nothing in this matmul is split along it",
            f"split a dimension of the weights along {axis!r} here, or give the axis to the batch",
        )  # fmt: skip


def _used(facts: Facts, node: Node) -> frozenset[str]:
    values = [facts.parts.values[v] for v in (*node.inputs, *node.outputs)]
    return frozenset(a.partition(":")[0] for v in values for axes in v.spec for a in axes)


def padding(case: Case) -> Iterator[Finding]:
    """Dimensions that their mesh axes do not divide: XLA pads the last shard, and every device works on the padding."""
    facts = case.facts
    if facts is None:
        return
    total, wasted, worst, most = 0.0, 0.0, None, 0.0
    for node, times, _ in facts.walk():
        if node.name not in MATMULS:
            continue
        cost = times * flops(node, facts.parts.values)
        total += cost
        values = [facts.parts.values[v] for v in (*node.inputs, *node.outputs)]
        part = max((_padded(facts, v) for v in values), default=0.0)
        wasted += cost * part
        if cost * part > most:
            worst, most = node, cost * part
    if worst is None or wasted < SMALL * total:
        return
    value = max((facts.parts.values[v] for v in (*worst.inputs, *worst.outputs)), key=lambda v: _padded(facts, v))
    uneven = next(
        f"{n} over {size_of(facts.mesh, axes)} devices ({_names(list(axes))})"
        for n, axes in zip(value.shape, value.spec)
        if axes and n % size_of(facts.mesh, axes)
    )
    yield Finding(
        "padding", "warning", worst.source, _padded(facts, value) * value.bytes,
        f"{wasted / total:.0%} of the arithmetic is padding: a dimension of {uneven} does not divide",
        "choose a size that the axis divides, or leave this dimension whole",
    )  # fmt: skip


def _padded(facts: Facts, value: Value) -> float:
    """Part of what a device holds of a value that is padding."""
    real = 1.0
    for n, axes, local in zip(value.shape, value.spec, value.local):
        real *= n / (local * size_of(facts.mesh, axes)) if axes and local else 1.0
    return 1 - real


def _bytes(value: Value) -> float:
    return float(value.bytes)


def _names(axes: list[str]) -> str:
    return " and ".join(repr(a) for a in axes)
