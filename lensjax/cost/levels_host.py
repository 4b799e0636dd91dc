"""Values in the host's memory: what a program that offloads holds there, and what it moves over the host link.

The program says where single values go (JAX's `annotate_device_placement`); XLA then keeps every buffer that they are
written into, slice by slice, on the same side (xla/hlo/transforms/host_offloader.cc). The same is done here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from lensjax.partition.data import Body, Node, Partitioned

_TARGET = "annotate_device_placement"
_VIEWS = frozenset(["stablehlo.reshape", "stablehlo.dynamic_slice", "stablehlo.slice", "stablehlo.transpose",
                    "stablehlo.broadcast_in_dim"])  # fmt: skip


class Host(NamedTuple):
    """`program`: the partitioned program with host values at zero device bytes; `bytes`: held in host memory, per
    device; `moved`: over the host link in the busier direction, per device and step, beside everything else; `waited`:
    in both directions, one after the other and after everything else (state that waits there between steps)."""

    program: Partitioned
    bytes: float
    moved: float
    waited: float = 0.0


def off_device(p: Partitioned) -> Host:
    """What of a program lies on the host. The same program where nothing does."""
    find = _Find()
    while find.body(p.body, 1):
        pass
    if not find.host:
        return Host(p, 0.0, 0.0)
    state = [i for i, v in enumerate(p.body.arguments) if v in find.host]
    here = {p.body.arguments[i] for i in state}
    maker = {v: n for n in p.body.nodes for v in n.outputs}
    again = {find.source(maker, p.body.results[p.donated[i]]) for i in state if i in p.donated}
    kept = sum(p.values[v].bytes for v in (*here, *(find.buffers - again - here)))
    out = sum(p.values[v].bytes * n for v, n in find.out.items() if v not in again)
    back = sum(p.values[v].bytes * n for v, n in find.back.items() if find.source(maker, v) not in here)
    waited = sum(p.values[v].bytes for v in (*here, *again))
    values = tuple(dataclasses.replace(x, bytes=0.0) if i in find.host else x for i, x in enumerate(p.values))
    return Host(dataclasses.replace(p, values=values), kept, max(out, back), waited)


def _written(body: Body) -> set[int]:
    """Values that are written into a larger one, as they are or seen differently."""
    maker = {v: n for n in body.nodes for v in n.outputs}
    found = set()
    for node in body.nodes:
        value = node.inputs[1] if node.name == "stablehlo.dynamic_update_slice" else None
        while value is not None:
            found.add(value)
            made = maker.get(value)
            value = made.inputs[0] if made is not None and made.name in _VIEWS else None
    return found


class _Find:
    """Marks host values until nothing changes (a loop's carry is on the host when its result is)."""

    def __init__(self):
        self.host: set[int] = set()
        self.buffers: set[int] = set()
        self.out: dict[int, int] = {}
        self.back: dict[int, int] = {}

    def source(self, maker: Mapping[int, Node], value: int) -> int:
        """Where a value comes from, through barriers and copies back to the device. `maker`: value -> node."""
        while (node := maker.get(value)) is not None:
            if node.name == "stablehlo.optimization_barrier":
                value = node.inputs[node.outputs.index(value)]
            elif _TARGET in node.attributes.get("call_target_name", "") and value not in self.out:
                value = node.inputs[0]
            else:
                break
        return value

    def mark(self, value: int) -> bool:
        new = value not in self.host
        self.host.add(value)
        return new

    def body(self, body: Body, trips: int) -> bool:
        changed = False
        written = _written(body)
        for node in body.nodes:
            changed |= self.node(node, trips, written)
        return changed

    def node(self, node: Node, trips: int, written: set[int]) -> bool:
        if _TARGET in node.attributes.get("call_target_name", ""):
            value = node.outputs[0]
            if "host" not in node.attributes.get("mhlo.frontend_attributes", ""):
                self.back[value] = trips
                return self.mark(node.inputs[0])
            if node.inputs[0] in self.host:  # there already (JAX says so once more of a step's results)
                return self.mark(value)
            self.out[value] = trips
            if value not in written:
                self.buffers.add(value)  # written into a stack, it is part of that stack
            return self.mark(value)
        if node.name == "stablehlo.optimization_barrier":
            pairs = [v for both in zip(node.inputs, node.outputs) if self.host.intersection(both) for v in both]
            return any([self.mark(v) for v in pairs])
        if node.name in _VIEWS and node.inputs[0] in self.host:
            return self.mark(node.outputs[0])
        if node.name == "stablehlo.dynamic_update_slice" and (
            node.inputs[1] in self.host or node.inputs[0] in self.host
        ):
            return any([self.mark(node.inputs[0]), self.mark(node.outputs[0])])
        if node.name == "stablehlo.while":
            return self.loop(node, trips)
        return False

    def loop(self, node: Node, trips: int) -> bool:
        inner = node.bodies[0]
        changed = self.body(inner, trips * (node.trips or 1))
        for k, (given, argument, result) in enumerate(zip(node.inputs, inner.arguments, inner.results)):
            if not {given, argument, result, node.outputs[k]} & self.host:
                continue
            made = given not in self.host
            changed |= any([self.mark(v) for v in (given, argument, result, node.outputs[k])])
            if made:
                self.buffers.add(node.outputs[k])
        return changed
