"""What a reader of a plan should know: values that change their sharding on the way, and work that devices repeat."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lensjax.partition.data import Axes, Body, Node, Partitioned, Spec
from lensjax.partition.flops import flops
from lensjax.partition.simplify import payload
from lensjax.partition.text import axis_size

_RESHARDS = ("all_gather", "all_to_all", "collective_permute", "all_slice")
_MATMULS = ("stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot")


@dataclasses.dataclass(frozen=True)
class Reshard:
    """A value moved from one sharding to another between two operations.

    ops: the collectives it takes, in order. bytes: per device, of the largest of them (`Collective.bytes`).
    involuntary: from one split to another that no single collective reaches. XLA then replicates the value
    and splits it again ("involuntary full rematerialization").
    """

    ops: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    before: Spec
    after: Spec
    bytes: float
    trips: int
    op_name: str
    source: str

    @property
    def involuntary(self) -> bool:
        moves = [op for op in self.ops if op != "all_slice"]
        return any(self.before) and any(self.after) and (len(moves) > 1 or "collective_permute" in moves)


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A matmul that is done over and over: its operands are not split over `axes`, so `times` devices compute the same.

    flops: on one device, of all trips.
    """

    axes: Axes
    times: int
    flops: float
    op_name: str
    source: str


def reshards(p: Partitioned) -> tuple[Reshard, ...]:
    """All changes of sharding that communicate, in program order; the collectives of one change together."""
    found: list[Reshard] = []
    for body, trips in _bodies(p.body, 1):
        chain: dict[int, list[Node]] = {}
        for node in body.nodes:
            if node.name in _RESHARDS:
                chain[node.outputs[0]] = [*chain.pop(node.inputs[0], []), node]
        found += [_reshard(p, nodes, trips) for nodes in chain.values() if any(n.name != "all_slice" for n in nodes)]
    return tuple(found)


def _reshard(p: Partitioned, nodes: list[Node], trips: int) -> Reshard:
    first, last = p.values[nodes[0].inputs[0]], p.values[nodes[-1].outputs[0]]
    size = max(payload(n, p.values) for n in nodes if n.name != "all_slice")
    names = tuple(n.name for n in nodes)
    at = nodes[-1]
    return Reshard(names, first.shape, first.dtype, first.spec, last.spec, size, trips, at.op_name, at.source)


def repeated(p: Partitioned) -> tuple[Repeated, ...]:
    """Matmuls that several devices compute alike, in program order.

    In a plan that splits the batch, a batch axis among `axes` means that the batch was lost there.
    """
    mesh = tuple(p.mesh.items())
    found = []
    for body, trips in _bodies(p.body, 1):
        for node in body.nodes:
            if node.name not in _MATMULS:
                continue
            used = {a.partition(":")[0] for v in node.inputs for dim in p.values[v].spec for a in dim}
            axes = tuple(a for a, n in mesh if n > 1 and a not in used)
            times = 1
            for axis in axes:
                times *= axis_size(axis, mesh)
            if axes:
                found.append(Repeated(axes, times, flops(node, p.values) * trips, node.op_name, node.source))
    return tuple(found)


def _bodies(body: Body, trips: int) -> Iterator[tuple[Body, int]]:
    yield body, trips
    for node in body.nodes:
        for inner in node.bodies:
            yield from _bodies(inner, trips * (1 if node.trips is None else node.trips))
