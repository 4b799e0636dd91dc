"""From Shardy's module to data: the only place that walks partitioned MLIR.

Every value gets the mesh axes that Shardy gave it; a value inside a loop takes those of the loop's operand. Collectives
that Shardy left as `sdy` operations and those that a user's `shard_map` wrote as `stablehlo` ones become the same
nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lensjax.partition.data import Body, Node, Spec, Value, element_bytes
from lensjax.partition.inline import main_function
from lensjax.partition.text import axes_in, axis_size, integers, location, shardings, tensor_type

# Attributes that analyses read, kept as text; every other attribute is left behind in MLIR.
KEPT = {
    "stablehlo.dot_general": ("dot_dimension_numbers", "precision_config"),
    "stablehlo.convolution": (
        "dimension_numbers", "window_strides", "padding", "lhs_dilation", "rhs_dilation",
        "feature_group_count", "batch_group_count",
    ),
    "stablehlo.custom_call": ("call_target_name", "backend_config", "mhlo.frontend_attributes"),
    "stablehlo.compare": ("comparison_direction",),
    "stablehlo.reduce": ("dimensions",),
    "stablehlo.scatter": ("scatter_dimension_numbers",),
    "stablehlo.transpose": ("permutation",),
    "stablehlo.all_reduce": ("replica_groups",),
    "stablehlo.all_gather": ("replica_groups",),
    "stablehlo.reduce_scatter": ("replica_groups",),
    "stablehlo.all_to_all": ("replica_groups",),
    "stablehlo.collective_permute": ("source_target_pairs",),
    "sdy.all_gather": ("gathering_axes",),
    "sdy.all_slice": ("slicing_axes",),
    "sdy.all_reduce": ("reduction_axes",),
    "sdy.all_to_all": ("params",),
    "sdy.reduce_scatter": ("reduce_scatter_axes",),
}  # fmt: skip

_CONSTANTS = ("stablehlo.constant", "sdy.constant")
_LOOPS = ("stablehlo.while",)
_BRANCHES = ("stablehlo.case", "stablehlo.if")
_MANUAL = "sdy.manual_computation"


class Reader:
    """Walks one module. Not data: it lives while `read` runs."""

    def __init__(self, mesh: Mapping[str, int], places: dict[Any, tuple[str, str]] | None = None):
        self.mesh = tuple(mesh.items())
        # Location -> what it says. Its text is long (a whole call stack) and takes longer than all the rest.
        self.places = {} if places is None else places
        self.kinds: dict[tuple[Any, Spec], Value] = {}  # type and spec -> the value, of which programs have few
        self.values: list[Value] = []
        self.ids: dict[Any, int] = {}
        self.scalars: dict[int, int] = {}  # value -> integer constant, for trip counts
        self.manual: set[str] = set()

    def add(self, value: Any, spec: Spec) -> int:
        key = value.type, spec
        if key not in self.kinds:
            self.kinds[key] = self.value(*key)
        self.values.append(self.kinds[key])
        self.ids[value] = len(self.values) - 1
        return self.ids[value]

    def value(self, kind: Any, spec: Spec) -> Value:
        shape, dtype = tensor_type(str(kind))
        spec = spec or ((),) * len(shape)
        local = tuple(-(-n // self.parts(axes)) for n, axes in zip(shape, spec, strict=True))
        size = element_bytes(dtype)
        for n in local:
            size *= n
        return Value(shape, dtype, spec, local, size)

    def parts(self, axes: tuple[str, ...]) -> int:
        n = 1
        for axis in axes:
            n *= axis_size(axis, self.mesh)
        return n

    def function(self, main: Any) -> Body:
        block = main.regions[0].blocks[0]
        attributes = list(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else []
        specs = [_argument_spec(a) for a in attributes] or [()] * len(block.arguments)
        return self.body(block, specs)

    def body(self, block: Any, specs: list[Spec]) -> Body:
        arguments = tuple(self.add(a, s) for a, s in zip(block.arguments, specs, strict=True))
        *operations, terminator = list(block)
        nodes = [node for op in operations if (node := self.node(op.operation)) is not None]
        return Body(arguments, tuple(nodes), tuple(self.ids[v] for v in terminator.operation.operands))

    def node(self, op: Any) -> Node | None:
        name, attributes = op.name, op.attributes
        specs = self.result_specs(name, attributes, len(op.results))
        outputs = tuple(self.add(r, s) for r, s in zip(op.results, specs, strict=True))
        if name in _CONSTANTS:
            value = self.values[outputs[0]]
            # Only whole numbers are asked for (trip counts); the bindings cannot even hand out complex ones.
            if (
                not value.shape
                and value.dtype.startswith(("i", "ui"))
                and (found := integers(str(attributes["value"])))
            ):
                self.scalars[outputs[0]] = found[0]
            name = "stablehlo.constant"
        inputs = tuple(self.ids[v] for v in op.operands)
        kept = {key: str(attributes[key]) for key in KEPT.get(name, ()) if key in attributes}
        op_name, source = self.place(op.location)
        bodies, trips = self.regions(op, name, specs, inputs)
        return Node(name, inputs, outputs, op_name, source, bodies, trips, attributes=kept)

    def place(self, at: Any) -> tuple[str, str]:
        key = at.attr
        if key not in self.places:
            self.places[key] = location(str(at))
        return self.places[key]

    def result_specs(self, name: str, attributes: Any, count: int) -> list[Spec]:
        for key in ("sdy.sharding", "out_sharding", "out_shardings", "sharding"):
            if key in attributes:
                found = shardings(str(attributes[key]))
                manual = self.manual
                if manual:
                    found = [tuple(tuple(a for a in d if a not in manual) for d in s) for s in found]
                return [*found][:count]  # a callback has a sharding and no result
        return [()] * count

    def regions(self, op: Any, name: str, specs: list[Spec], inputs: tuple[int, ...]) -> tuple[tuple[Body, ...], Any]:
        if name in _LOOPS:
            condition, body = (self.body(r.blocks[0], specs) for r in op.regions)
            return (body,), _trips(condition, body, inputs, self.scalars)
        if name in _BRANCHES:
            return tuple(self.body(r.blocks[0], []) for r in op.regions), 1
        if name == _MANUAL:
            return (self.manual_body(op),), 1
        return (), 1  # reducers and comparators: scalar programs that belong to their operation

    def manual_body(self, op: Any) -> Body:
        before = self.manual
        self.manual = before | set(axes_in(str(op.attributes["manual_axes"])))
        found = shardings(str(op.attributes["in_shardings"]))
        specs = [tuple(tuple(a for a in d if a not in self.manual) for d in spec) for spec in found]
        body = self.body(op.regions[0].blocks[0], specs)
        self.manual = before
        return body


def _argument_spec(attribute: Any) -> Spec:
    return shardings(str(attribute["sdy.sharding"]))[0] if "sdy.sharding" in attribute else ()


def _trips(condition: Body, body: Body, inputs: tuple[int, ...], scalars: Mapping[int, int]) -> int | None:
    """Trip count of `for i in range(start, stop, step)`, the loop that `lax.scan` and `fori_loop` emit; else None."""
    test = _maker(condition, 0)
    if test is None or test.name != "stablehlo.compare":
        return None
    left, right = test.inputs
    direction = re.search(r"comparison_direction (\w+)", test.attributes["comparison_direction"])
    if left not in condition.arguments or right not in scalars or not direction or direction[1] not in ("LT", "LE"):
        return None
    index = condition.arguments.index(left)
    start = scalars.get(inputs[index])
    bump = _maker(body, index)
    if start is None or bump is None or bump.name != "stablehlo.add":
        return None
    step = next((scalars[v] for v in bump.inputs if v in scalars), None)
    if not step or body.arguments[index] not in bump.inputs:
        return None
    span = scalars[right] - start + (direction[1] == "LE")
    return max(0, -(-span // step))


def _maker(body: Body, result: int) -> Node | None:
    """The operation that makes a result. (A callback makes nothing.)"""
    return next((n for n in body.nodes if body.results[result] in n.outputs), None)


def read(
    module: Any, mesh: Mapping[str, int], places: dict[Any, tuple[str, str]] | None = None
) -> tuple[list[Value], Body]:
    """Values and body of the `main` of a partitioned module operation. `places`: locations that were read before, of
    modules in the same MLIR context; those of this one are added."""
    reader = Reader(mesh, places)
    body = reader.function(main_function(module))
    return reader.values, body


def donations(main: Any) -> dict[int, int]:
    """Argument position -> the result position that takes its buffer."""
    attributes = list(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else []
    found = {}
    for i, entry in enumerate(attributes):
        if "tf.aliasing_output" in entry:
            found[i] = int(str(entry["tf.aliasing_output"]).split(":")[0])
    return found
