"""Exchanges that come from two specs that do not agree."""

from __future__ import annotations

from collections.abc import Iterator

from lensjax.partition import Body, Node
from lensjax.partition.text import named_list
from lensjax.verify.facts import Facts
from lensjax.verify.finding import SMALL, Case, Finding, size

_EXCHANGES = ("all_to_all", "collective_permute")


def resharded(case: Case) -> Iterator[Finding]:
    """An activation exchanged to another split that no matmul asks for.

    Experts (a matmul whose weights are split along the same axis, one expert a device) ask for one; so does attention
    that trades heads for sequence, as long as its matmuls run between the two exchanges.
    """
    facts = case.facts
    if facts is None or not _has_exchange(case):
        return
    total, worst, most = 0.0, None, 0.0
    for node, times, body in facts.walk():
        if node.name not in _EXCHANGES or node.inputs[0] not in facts.batch or not _exchanged(facts, node):
            continue
        sent = times * facts.parts.values[node.outputs[0]].bytes
        if _asked_for(facts, body, node):
            continue
        total += sent
        if sent > most:
            worst, most = node, sent
    if worst is not None and total > SMALL * max(case.total_sent, 1.0):
        before, after = (facts.parts.values[v].spec for v in (worst.inputs[0], worst.outputs[0]))
        yield Finding(
            "resharded", "warning", worst.source, total,
            f"an activation {list(facts.parts.values[worst.outputs[0]].shape)} goes from {_spec(before)} to "
            f"{_spec(after)} here, which no matmul asks for: {size(total)} per step on each device",
            "make the two specs agree: one of them probably has its axes in the wrong place",
        )  # fmt: skip


def _has_exchange(case: Case) -> bool:
    return any(c.kind in ("all-to-all", "collective-permute", "ragged-all-to-all") for c in case.found.collectives)


def _asked_for(facts: Facts, body: Body, node: Node) -> bool:
    """True when a matmul that reads (or made) the value is split the new (or old) way along the exchanged axes."""
    axes = _exchanged(facts, node)
    readers: dict[int, list[Node]] = {}
    makers: dict[int, Node] = {}
    for other in body.nodes:
        for v in other.inputs:
            readers.setdefault(v, []).append(other)
        for v in other.outputs:
            makers[v] = other
    if any(n.name == "stablehlo.scatter" for n in readers.get(node.outputs[0], ())):
        return True  # the gradient of a table, whose rows may be split only

    def forward(v: int) -> list[tuple[int, Node]]:
        return [(o, n) for n in readers.get(v, ()) for o in n.outputs]

    def backward(v: int) -> list[tuple[int, Node]]:
        return [(i, makers[v]) for i in makers[v].inputs] if v in makers else []

    return _meets(facts, node.outputs[0], forward, axes) or _meets(facts, node.inputs[0], backward, axes)


def _exchanged(facts: Facts, node: Node) -> frozenset[str]:
    before, after = (facts.parts.values[v].spec for v in (node.inputs[0], node.outputs[0]))
    changed = [a for x, y in zip(before, after) if x != y for a in (*x, *y)]
    return frozenset(a.partition(":")[0] for a in changed)


def _meets(facts: Facts, start: int, step, axes: frozenset[str], reach: int = 12) -> bool:
    """Whether a matmul with a batching dimension split along one of the axes is reached without another exchange."""
    seen, ring = {start}, [start]
    for _ in range(reach):
        following = []
        for value in ring:
            for nearby, node in step(value):
                if node.name == "stablehlo.dot_general":
                    dims = named_list("rhs_batching_dimensions", node.attributes["dot_dimension_numbers"])
                    if facts.split_by(node.inputs[1], dims) & axes:
                        return True
                    continue
                if nearby not in seen and not node.bodies and node.name not in (*_EXCHANGES, "all_gather"):
                    seen.add(nearby)
                    following.append(nearby)
        ring = following
    return False


def _spec(spec) -> str:
    return "P(" + ", ".join("None" if not d else "+".join(d) for d in spec) + ")"


def axis_order(case: Case) -> Iterator[Finding]:
    """The device order puts a busy mesh axis on slow links while a quiet one has the fast ones."""
    if case.priced is None or case.cluster is None or len(case.cluster.tiers) < 2 or len(case.mesh) < 2:
        return
    from lensjax.verify.orders import orders

    now, best = orders(case)
    if best.seconds < 0.9 * now.seconds and best.outside < 0.5 * now.outside:
        saved = now.outside - best.outside
        yield Finding(
            "axis_order", "warning", "", saved,
            f"{size(now.outside)} per step leave the node of each device with this order of devices, "
            f"{size(best.outside)} with the mesh axes nested as {', '.join(best.nesting)} (outermost first): its collectives "
            f"then take {best.seconds * 1e3:.3g} ms instead of {now.seconds * 1e3:.3g} ms",
            f"build the mesh so that {best.nesting[-1]!r} runs over the devices of one node",
        )  # fmt: skip
