"""The program of one device as kernels and collectives, with the bytes and operations of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lensjax.partition.data import Body, Collective, Node, Operation, Region
from lensjax.partition.flops import flops
from lensjax.partition.fusion import ALIASES, FREE, Fusion, Fusions, captured, sources
from lensjax.partition.simplify import COLLECTIVES, payload
from lensjax.partition.text import axis_size

_LOOPS = ("stablehlo.while",)
_BRANCHES = ("stablehlo.case", "stablehlo.if")
_MANUAL = "sdy.manual_computation"


def schedule(body: Body, fusions: Fusions, mesh: Mapping[str, int]) -> Region:
    """Kernels and collectives of a body in program order. Of a conditional's branches, the one that costs most."""
    return Worker(fusions, tuple(mesh.items())).region(body, trips=1, outer=1)


class Worker:
    def __init__(self, fusions: Fusions, mesh: tuple[tuple[str, int], ...]):
        self.fusions, self.values, self.mesh = fusions, fusions.values, mesh

    def region(self, body: Body, trips: int, outer: int, reads=(), writes=()) -> Region:
        model = self.fusions(body)
        items = [item for node in body.nodes for item in self.items(node, model, trips * outer)]
        return Region(trips, tuple(items), tuple(reads), tuple(writes))

    def items(self, node: Node, model: Fusion, trips: int) -> list[Operation | Collective | Region]:
        if node.name in ALIASES or node.name in FREE:
            return []
        if node.name == _MANUAL:
            return self.inlined(node, model, trips)
        if node.bodies:
            return [self.nested(node, model, trips)]
        if node.name in COLLECTIVES:
            return [self.collective(node, model, trips)]
        if node.outputs and not any(v in model.stored for v in node.outputs):
            return []
        return [self.operation(node, model, trips)]

    def nested(self, node: Node, model: Fusion, trips: int) -> Region:
        reads = {model.buffer(v) for v in node.inputs}.union(*(captured(b) for b in node.bodies))
        count = (1 if node.trips is None else node.trips) if node.name in _LOOPS else 1
        regions = [self.region(b, count, trips, sorted(reads), node.outputs) for b in node.bodies]
        region = max(regions, key=_weight)
        if node.name not in _LOOPS:
            return region
        copies = [c for b in node.bodies for c in self.copies(b, count * trips)]
        return dataclasses.replace(region, items=(*region.items, *copies))

    def copies(self, body: Body, trips: int) -> list[Operation]:
        """What a collective hands to the next trip is copied into the loop's own buffer: it arrives while the trip
        still reads what it was handed itself (xla/service/copy_insertion.cc)."""
        model, found = self.fusions(body), []
        for value in {model.buffer(v) for v in body.results}:
            made = model.maker.get(value)
            if made is not None and made.name in COLLECTIVES:
                v = self.values[value]
                found.append(
                    Operation("copy", 0.0, 2 * v.bytes, v.dtype, trips, made.op_name, made.source, reads=(value,))
                )
        return found

    def inlined(self, node: Node, model: Fusion, trips: int) -> list[Operation | Collective | Region]:
        """The work of a region that is manual over mesh axes: the compiler puts it among the work around it, so that it
        waits for what it reads alone."""
        (body,) = node.bodies
        inner, given = self.fusions(body), {a: model.buffer(v) for a, v in zip(body.arguments, node.inputs)}
        results: dict[int, tuple[int, ...]] = {}
        for v, out in zip(body.results, node.outputs):
            results[inner.buffer(v)] = (*results.get(inner.buffer(v), ()), out)
        return [
            dataclasses.replace(
                x,
                reads=tuple(given.get(v, v) for v in x.reads),
                writes=tuple(w for v in x.writes for w in (v, *results.get(v, ()))),
            )
            for x in self.region(body, trips=1, outer=trips).items
        ]

    def collective(self, node: Node, model: Fusion, trips: int) -> Collective:
        group = 1
        for axis in node.axes:
            group *= axis_size(axis, self.mesh)
        dtype = self.values[node.outputs[0]].dtype
        reads = tuple(sources(node, self.values, model))
        size = payload(node, self.values)
        return Collective(
            node.name, node.axes, group, size, dtype, trips, node.op_name, node.source, reads, node.outputs
        )

    def operation(self, node: Node, model: Fusion, trips: int) -> Operation:
        read = sources(node, self.values, model)
        moved = sum(read.values()) + sum(self.values[v].bytes for v in node.outputs)
        if node.name in ("stablehlo.dynamic_update_slice", "stablehlo.scatter"):
            moved = self.updated(node, read, model)
        name = node.name.partition(".")[2]
        if node.name == "stablehlo.custom_call":
            name = "custom_call:" + node.attributes.get("call_target_name", "").strip('"')
        elif node.name not in _NAMED:
            name = "fusion"
        return Operation(
            name,
            flops(node, self.values),
            moved,
            self.values[node.inputs[0]].dtype if node.inputs else "",
            trips,
            node.op_name,
            node.source,
            tuple(read),
            node.outputs,
            _precision(node),
        )

    def updated(self, node: Node, read: Mapping[int, float], model: Fusion) -> float:
        """Bytes of an update in place: the update is read, its place is written (and, for a scatter, read first)."""
        places = 1 if node.name == "stablehlo.dynamic_update_slice" else 2
        update = self.values[node.inputs[places if places == 2 else 1]].bytes
        target = model.buffer(node.inputs[0])
        return sum(b for v, b in read.items() if v != target) + places * update


_NAMED = frozenset(
    "stablehlo." + n
    for n in ("dot_general", "convolution", "scatter", "sort", "fft", "rng_bit_generator", "dynamic_update_slice")
)


def _precision(node: Node) -> str:
    """The most precise that either operand asks for."""
    text = node.attributes.get("precision_config", "")
    return "highest" if "HIGHEST" in text else "high" if "HIGH" in text else "default"


def _weight(region: Region) -> tuple[float, float]:
    work = sum(x.flops * x.trips for x in region.leaves() if isinstance(x, Operation))
    return work, sum(x.bytes * x.trips for x in region.leaves())
