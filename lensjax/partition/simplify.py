"""What XLA does to Shardy's collectives before it emits them, on data.

* `all_reduce` whose only use is an `all_slice` over (some of) the same axes becomes `reduce_scatter`, then an
  `all_reduce` of the shard over the axes that are left: XLA's reduce-scatter creator and all-reduce splitter, which
  make the hierarchical reduction of HSDP out of one sharding.
  A slice of several dimensions stays one, after an `all_reduce` of the whole.
* An `all_gather` of several dimensions is one of each, the last dimension first.
* `all_reduce(a) + all_reduce(b)` becomes `all_reduce(a + b)`, and so do their slices: XLA's all-reduce and
  reduce-scatter reassociation.
* The same collective of the same value happens once, and none happens to a constant: it is made in place.
* The gradient of a table is summed whole and scattered where its rows are split over the axes of its updates.
* Collectives over axes of size one, and sharding constraints that did their work, are nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lensjax._errors import PartitionError
from lensjax.partition.data import Axes, Body, Node, Value
from lensjax.partition.groups import axes_of_groups
from lensjax.partition.text import axes_in, axis_size, named_list

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
_AXES_ATTRIBUTE = {
    "sdy.all_gather": "gathering_axes",
    "sdy.all_slice": "slicing_axes",
    "sdy.all_reduce": "reduction_axes",
    "sdy.all_to_all": "params",
    "sdy.reduce_scatter": "reduce_scatter_axes",
}
_CONSTANTS = ("stablehlo.constant", "stablehlo.iota")
_SPREADS = ("stablehlo.broadcast_in_dim", "stablehlo.convert", "stablehlo.reshape", "stablehlo.negate")
_NOTHING = ("sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier", "sdy.data_flow_edge")


def _with(node: Node, inputs: tuple[int, ...], bodies: tuple[Body, ...] = ()) -> Node:
    """The node with these inputs and, where it has bodies and they are given, these; most nodes stay what they are."""
    if node.inputs == inputs and not bodies:
        return node
    return dataclasses.replace(node, inputs=inputs, bodies=bodies or node.bodies)


class _Simplifier:
    def __init__(self, values: list[Value], mesh: Mapping[str, int]):
        self.values = values
        self.mesh = tuple(mesh.items())
        self.renamed: dict[int, int] = {}
        self.uses: Counter[int] = Counter()
        self.slices: dict[int, list[Node]] = {}
        self.dropped: set[int] = set()
        self.splats: set[int] = set()
        self.scatters: set[int] = set()

    def now(self, value: int) -> int:
        while value in self.renamed:
            value = self.renamed[value]
        return value

    # First sweep: names and axes, what is nothing, what is twice.

    def clean(self, body: Body, seen: dict[tuple, Node]) -> Body:
        nodes = []
        for node in body.nodes:
            node = self.normal(_with(node, tuple(map(self.now, node.inputs))))
            if node.name in _CONSTANTS or (
                node.inputs and node.name in _SPREADS and self.splats.issuperset(node.inputs)
            ):
                self.splats.update(node.outputs)
            if self.is_nothing(node):
                self.renamed.update(zip(node.outputs, node.inputs))
                continue
            if node.name in (*COLLECTIVES, "all_slice") and node.name != "all_reduce":
                if self.splats.issuperset(node.inputs):  # made anew, in the size in which it is used
                    self.splats.update(node.outputs)
                    nodes.append(dataclasses.replace(node, name="stablehlo.broadcast_in_dim", axes=()))
                    continue
            if node.name in (*COLLECTIVES, "all_slice"):
                key = (node.name, node.inputs, node.axes, self.values[node.outputs[0]].spec)
                if key in seen:
                    self.renamed.update(zip(node.outputs, seen[key].outputs))
                    continue
                seen[key] = node
            node = _with(node, node.inputs, tuple(self.clean(b, dict(seen)) for b in node.bodies))
            nodes.extend(self.by_dimension(node) if node.name == "all_gather" else (node,))
        return Body(body.arguments, tuple(nodes), tuple(map(self.now, body.results)))

    def by_dimension(self, node: Node) -> list[Node]:
        """The gathers of single dimensions, last first, that XLA makes of one (`PartitionedHlo::ReplicatePartial`)."""
        before, after = (self.values[v].spec for v in (node.inputs[0], node.outputs[0]))
        if len(before) != len(after):
            return [node]
        each = [self.large(tuple(x for x in a if x not in b)) for a, b in zip(before, after)]
        each = [axes for axes in reversed(each) if axes]
        if len(each) < 2 or sorted(x for axes in each for x in axes) != sorted(node.axes):
            return [node]
        found, value = [], node.inputs[0]
        for axes in each[:-1]:
            whole = self.gathered(value, axes)
            found.append(dataclasses.replace(node, inputs=(value,), outputs=(whole,), axes=axes))
            value = whole
        return [*found, dataclasses.replace(node, inputs=(value,), axes=each[-1])]

    def is_nothing(self, node: Node) -> bool:
        if node.name in (*COLLECTIVES, "all_slice"):
            return not node.axes
        return node.name in _NOTHING

    def normal(self, node: Node) -> Node:
        dialect, _, name = node.name.partition(".")
        if dialect not in ("sdy", "stablehlo") or name not in (*COLLECTIVES, "all_slice"):
            return node
        return dataclasses.replace(node, name=name, axes=self.large(self.axes(node)))

    def axes(self, node: Node) -> Axes:
        if node.name == "sdy.collective_permute":
            before, after = (self.values[v].spec for v in (node.inputs[0], node.outputs[0]))
            moved = [a for b, c in zip(before, after, strict=True) if b != c for a in (*b, *c)]
            return _united(tuple(dict.fromkeys(moved)))
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
            if node.name == "stablehlo.scatter":
                self.scatters.update(node.outputs)
            for inner in node.bodies:
                self.count(inner)

    def reassociate(self, body: Body) -> Body:
        """Sums of two totals, or of the same slice of two, become the total of the sum, inner bodies included."""
        nodes: list[Node | None] = []
        made: dict[int, tuple[int, ...]] = {}  # value -> where its all_reduce is, and its slice where it is one
        for node in body.nodes:
            node = _with(node, node.inputs, tuple(map(self.reassociate, node.bodies)))
            if (places := self._same_totals(node, nodes, made)) is not None:
                totals, rest = self._of_the_sum(node, nodes, places)
                for i in (*places[0], *places[1]):
                    nodes[i] = None
                nodes.append(totals)
                chain = tuple(range(len(nodes), len(nodes) + len(rest)))
                nodes.extend(rest)
                if self.uses[node.outputs[0]] == 1:
                    made[node.outputs[0]] = chain
                continue
            if node.outputs and self.uses[node.outputs[0]] == 1:
                if node.name == "all_reduce":
                    made[node.outputs[0]] = (len(nodes),)
                elif node.name == "all_slice" and len(made.get(node.inputs[0], ())) == 1:
                    made[node.outputs[0]] = (*made[node.inputs[0]], len(nodes))
            nodes.append(node)
        return Body(body.arguments, tuple(n for n in nodes if n is not None), body.results)

    def _same_totals(
        self, node: Node, nodes: Sequence[Node | None], made: Mapping[int, tuple[int, ...]]
    ) -> list[tuple[int, ...]] | None:
        """Where the two totals that a node adds are made, if both are made alike."""
        if node.name != "stablehlo.add" or not all(v in made for v in node.inputs) or len(set(node.inputs)) < 2:
            return None
        places = [made[v] for v in node.inputs]
        like = [[(n.name, n.axes, self.values[n.outputs[0]].spec) for i in p if (n := nodes[i])] for p in places]
        return places if like[0] == like[1] else None

    def _of_the_sum(
        self, add: Node, nodes: Sequence[Node | None], places: list[tuple[int, ...]]
    ) -> tuple[Node, list[Node]]:
        """The addition of the parts, and what makes a total (and its slice) of the sum."""
        first, second = ([n for i in p if (n := nodes[i])] for p in places)
        partial = self.copy(first[0].inputs[0])
        sum_ = dataclasses.replace(add, inputs=(first[0].inputs[0], second[0].inputs[0]), outputs=(partial,))
        if len(first) == 1:
            return sum_, [dataclasses.replace(first[0], inputs=(partial,), outputs=add.outputs)]
        total = self.copy(first[0].outputs[0])
        self.uses[total] = 1
        slice_ = dataclasses.replace(first[1], inputs=(total,), outputs=add.outputs)
        self.slices[total] = [slice_]
        return sum_, [dataclasses.replace(first[0], inputs=(partial,), outputs=(total,)), slice_]

    def fold(self, body: Body) -> Body:
        nodes: list[Node] = []
        for node in body.nodes:
            node = _with(node, tuple(map(self.now, node.inputs)), tuple(self.fold(b) for b in node.bodies))
            if node.outputs and node.outputs[0] in self.dropped:
                continue
            nodes.extend(
                self.moved_updates(node, nodes) or self.scattered(node) or self.whole_table(node, nodes) or [node]
            )
        return Body(body.arguments, tuple(nodes), tuple(map(self.now, body.results)))

    def moved_updates(self, node: Node, before: list[Node]) -> list[Node] | None:
        """The gradient of a table whose *columns* are split, updated by rows that are split too.

        XLA does not sum whole tables and slice them: it moves the updates (all_to_all) and gathers the indices, so that
        each device scatters into its own columns. With axes left to sum over it gives up, and keeps the all_reduce.
        """
        slice_ = self.only_slice(node)
        if slice_ is None or self.scatters.isdisjoint(node.inputs):
            return None
        made = next((n for n in before if n.outputs == node.inputs), None)
        if made is None or made.name != "stablehlo.scatter" or made.inputs[0] not in self.splats:
            return None
        whole, own = (self.values[v].spec for v in (node.outputs[0], slice_.outputs[0]))
        inserted = named_list("inserted_window_dims", made.attributes["scatter_dimension_numbers"])
        if any(whole[d] != own[d] for d in inserted) or not set(slice_.axes) <= set(node.axes):
            return None
        if set(slice_.axes) != set(node.axes):
            return [node]
        table, indices, updates = made.inputs
        axes, target = slice_.axes, slice_.outputs[0]
        self.dropped.add(target)
        gathered, moved = self.gathered(indices, axes), self.copy(updates)
        parts = dataclasses.replace(made, name="all_gather", inputs=(indices,), outputs=(gathered,), axes=axes)
        swap = dataclasses.replace(made, name="all_to_all", inputs=(updates,), outputs=(moved,), axes=axes)
        before.remove(made)
        scatter = dataclasses.replace(made, inputs=(table, gathered, moved), outputs=(target,))
        return [parts, swap, scatter]

    def whole_table(self, node: Node, before: list[Node]) -> list[Node] | None:
        """The gradient of a table whose *rows* are split over the axes over which its updates are split.

        Shardy gathers the updates where they are smaller than the table; XLA sums each device's own into a whole table
        and scatters the total. Rows that are split over more axes than the updates keep the gather.
        """
        if node.name != "stablehlo.scatter" or len(node.inputs) != 3 or node.inputs[0] not in self.splats:
            return None
        table, *moved = node.inputs
        gathers = [n for v in moved for n in before if n.outputs == (v,) and n.name == "all_gather"]
        rows = named_list("inserted_window_dims", node.attributes["scatter_dimension_numbers"])
        axes = tuple(a for d in rows for a in self.values[table].spec[d])
        if (
            len(gathers) != 2
            or not axes
            or any(set(n.axes) != set(axes) or self.uses[n.outputs[0]] > 1 for n in gathers)
        ):
            return None
        zeros = next(n for n in before if table in n.outputs)
        whole, partial = self.gathered(table, axes), self.gathered(node.outputs[0], axes)
        self.splats.add(whole)
        for n in (*gathers, *([zeros] if self.uses[table] == 1 else [])):
            before.remove(n)
        own = (whole, *(n.inputs[0] for n in gathers))
        return [
            dataclasses.replace(zeros, name="stablehlo.broadcast_in_dim", outputs=(whole,)),
            dataclasses.replace(node, inputs=own, outputs=(partial,)),
            dataclasses.replace(gathers[1], name="reduce_scatter", inputs=(partial,), outputs=node.outputs, axes=axes),
        ]

    def gathered(self, value: int, axes: Axes) -> int:
        """A new value: this one with none of its dimensions split over these axes."""
        old = self.values[value]
        spec = tuple(tuple(a for a in dim if a not in axes) for dim in old.spec)
        local = tuple(
            -(-n // math.prod(axis_size(a, self.mesh) for a in dim)) for n, dim in zip(old.shape, spec, strict=True)
        )
        size = math.prod(local) * old.bytes / max(1, old.size)
        self.values.append(dataclasses.replace(old, spec=spec, local=local, bytes=size))
        return len(self.values) - 1

    def copy(self, value: int) -> int:
        self.values.append(self.values[value])
        return len(self.values) - 1

    def only_slice(self, node: Node) -> Node | None:
        """The slice that is the only use of an all_reduce."""
        if node.name != "all_reduce" or self.uses[node.outputs[0]] != 1:
            return None
        slices = self.slices.get(node.outputs[0], [])
        return slices[0] if slices and slices[0].outputs[0] not in self.dropped else None

    def dimensions(self, slice_: Node) -> int:
        """How many dimensions a slice cuts."""
        before, after = (self.values[v].spec for v in (slice_.inputs[0], slice_.outputs[0]))
        return sum(a != b for a, b in zip(before, after, strict=True))

    def scattered(self, node: Node) -> list[Node] | None:
        """The reduce_scatter (and all_reduce of what is left) that replaces an all_reduce and its slice, if it does."""
        slice_ = self.only_slice(node)
        if slice_ is None or not set(slice_.axes) <= set(node.axes) or self.dimensions(slice_) > 1:
            return None
        rest = tuple(a for a in node.axes if a not in slice_.axes)
        target = slice_.outputs[0]
        self.dropped.add(target)
        scatter = dataclasses.replace(node, name="reduce_scatter", axes=slice_.axes, outputs=(target,))
        if not rest:
            return [scatter]
        partial = self.copy(target)
        scatter = dataclasses.replace(scatter, outputs=(partial,))
        return [scatter, dataclasses.replace(node, inputs=(partial,), outputs=(target,), axes=rest)]


def simplify(values: list[Value], body: Body, mesh: Mapping[str, int]) -> Body:
    """The body with its collectives as XLA will emit them; values may be appended to.

    Raises PartitionError for a hand-written collective whose groups are not along mesh axes.
    """
    work = _Simplifier(values, mesh)
    body = work.clean(body, {})
    work.count(body)
    return work.fold(work.reassociate(body))


def payload(node: Node, values: Sequence[Value]) -> float:
    """Bytes per device of the full buffer of a collective (see `Collective.bytes`)."""
    if node.name in ("all_gather", "all_reduce"):
        return sum(values[v].bytes for v in node.outputs)
    if node.name in COLLECTIVES:
        return sum(values[v].bytes for v in node.inputs)
    raise PartitionError(f"{node.name} is not a collective")


def _united(axes: Axes) -> Axes:
    """Several parts of one mesh axis, or a part beside the whole, as the whole axis: a permutation moves within it."""
    names = [a.partition(":")[0] for a in axes]
    return tuple(dict.fromkeys(n if names.count(n) > 1 else a for n, a in zip(names, axes)))
