"""What XLA does to Shardy's collectives before it emits them, on data.

* `all_reduce` whose only uses are `all_slice`s over (some of) the same axes becomes `reduce_scatter`, then an `all_reduce`
  of the shard over the axes that are left: XLA's reduce-scatter creator and all-reduce splitter, which make the
  hierarchical reduction of HSDP out of one sharding.
* The same collective of the same value happens once.
* Collectives over axes of size one, and sharding constraints that did their work, are nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from lensjax._errors import PartitionError
from lensjax.partition.data import Axes, Body, Node, Value
from lensjax.partition.groups import axes_of_groups
from lensjax.partition.text import axes_in, axis_size

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
_AXES_ATTRIBUTE = {
    "sdy.all_gather": "gathering_axes",
    "sdy.all_slice": "slicing_axes",
    "sdy.all_reduce": "reduction_axes",
    "sdy.all_to_all": "params",
    "sdy.reduce_scatter": "reduce_scatter_axes",
}
_NOTHING = ("sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier", "sdy.data_flow_edge")


class _Simplifier:
    def __init__(self, values: list[Value], mesh: Mapping[str, int]):
        self.values = values
        self.mesh = tuple(mesh.items())
        self.renamed: dict[int, int] = {}
        self.uses: Counter[int] = Counter()
        self.slices: dict[int, list[Node]] = {}
        self.dropped: set[int] = set()

    def now(self, value: int) -> int:
        while value in self.renamed:
            value = self.renamed[value]
        return value

    # First sweep: names and axes, what is nothing, what is twice.

    def clean(self, body: Body, seen: dict[tuple, Node]) -> Body:
        nodes = []
        for node in body.nodes:
            node = self.normal(dataclasses.replace(node, inputs=tuple(map(self.now, node.inputs))))
            if node.name in _NOTHING or (node.name in (*COLLECTIVES, "all_slice") and not node.axes):
                self.renamed.update(zip(node.outputs, node.inputs))
                continue
            if node.name in (*COLLECTIVES, "all_slice"):
                key = (node.name, node.inputs, node.axes, self.values[node.outputs[0]].spec)
                if key in seen:
                    self.renamed.update(zip(node.outputs, seen[key].outputs))
                    continue
                seen[key] = node
            bodies = tuple(self.clean(b, dict(seen)) for b in node.bodies)
            nodes.append(dataclasses.replace(node, bodies=bodies))
        return Body(body.arguments, tuple(nodes), tuple(map(self.now, body.results)))

    def normal(self, node: Node) -> Node:
        dialect, _, name = node.name.partition(".")
        if dialect not in ("sdy", "stablehlo") or name not in (*COLLECTIVES, "all_slice"):
            return node
        return dataclasses.replace(node, name=name, axes=self.large(self.axes(node)))

    def axes(self, node: Node) -> Axes:
        if node.name == "sdy.collective_permute":
            before, after = (self.values[v].spec for v in (node.inputs[0], node.outputs[0]))
            moved = [a for b, c in zip(before, after, strict=True) if b != c for a in (*b, *c)]
            return tuple(dict.fromkeys(moved))
        if node.name in _AXES_ATTRIBUTE:
            return axes_in(node.attributes[_AXES_ATTRIBUTE[node.name]])
        return axes_of_groups(*next(iter(node.attributes.items())), dict(self.mesh))

    def large(self, axes: Axes) -> Axes:
        return tuple(a for a in axes if axis_size(a, self.mesh) > 1)

    # Second sweep: partial sums that are only used in slices.

    def count(self, body: Body) -> None:
        self.uses.update(body.results)
        for node in body.nodes:
            self.uses.update(node.inputs)
            if node.name == "all_slice":
                self.slices.setdefault(node.inputs[0], []).append(node)
            for inner in node.bodies:
                self.count(inner)

    def fold(self, body: Body) -> Body:
        nodes: list[Node] = []
        for node in body.nodes:
            node = dataclasses.replace(
                node, inputs=tuple(map(self.now, node.inputs)), bodies=tuple(self.fold(b) for b in node.bodies)
            )
            if node.outputs and node.outputs[0] in self.dropped:
                continue
            nodes.extend(self.scattered(node) or [node])
        return Body(body.arguments, tuple(nodes), tuple(map(self.now, body.results)))

    def scattered(self, node: Node) -> list[Node] | None:
        """The reduce_scatter (and all_reduce of what is left) that replaces an all_reduce and its slice, if it does."""
        if node.name != "all_reduce":
            return None
        slices = self.slices.get(node.outputs[0], [])
        if len(slices) != 1 or self.uses[node.outputs[0]] != 1 or not set(slices[0].axes) <= set(node.axes):
            return None
        rest = tuple(a for a in node.axes if a not in slices[0].axes)
        target = slices[0].outputs[0]
        self.dropped.add(target)
        scatter = dataclasses.replace(node, name="reduce_scatter", axes=slices[0].axes, outputs=(target,))
        if not rest:
            return [scatter]
        self.values.append(self.values[target])
        partial = len(self.values) - 1
        scatter = dataclasses.replace(scatter, outputs=(partial,))
        return [scatter, dataclasses.replace(node, inputs=(partial,), outputs=(target,), axes=rest)]


def simplify(values: list[Value], body: Body, mesh: Mapping[str, int]) -> Body:
    """The body with its collectives as XLA will emit them; values may be appended to.

    Raises PartitionError for a hand-written collective whose groups are not along mesh axes.
    """
    work = _Simplifier(values, mesh)
    body = work.clean(body, {})
    work.count(body)
    return work.fold(body)


def payload(node: Node, values: list[Value]) -> float:
    """Bytes per device of the full buffer of a collective (see `Collective.bytes`)."""
    if node.name in ("all_gather", "all_reduce"):
        return sum(values[v].bytes for v in node.outputs)
    if node.name in COLLECTIVES:
        return sum(values[v].bytes for v in node.inputs)
    raise PartitionError(f"{node.name} is not a collective")
