"""What every device along a mesh axis does alike: the operations that a plan does not split along it."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator

from lensjax.partition import Body, Node, Partitioned, partition
from lensjax.partition.flops import flops
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.report.units import size

_MATMULS = ("stablehlo.dot_general", "stablehlo.convolution")
# They split nothing and compute nothing: data that is made in place, control, and what the partitioner put in.
_APART = frozenset(
    """constant iota while case if optimization_barrier custom_call return all_gather all_reduce all_slice all_to_all
    collective_permute reduce_scatter reshape broadcast_in_dim""".split()
)

# What a pass put in stands at no line of the user's.
_PASSES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "passes", "")


@dataclasses.dataclass(frozen=True)
class Alike:
    """Along `axis` (`devices` of them): `operations` that are the same on every device, `matmuls` of them, their part
    of a device's arithmetic, the bytes of the largest value, and the user's lines that most of them come from."""

    axis: str
    devices: int
    operations: int
    matmuls: int
    part: float
    largest: float
    lines: tuple[str, ...]

    def __str__(self) -> str:
        count = f"{self.operations} operation{'s' if self.operations > 1 else ''}"
        sums = f", {self.matmuls} of them matmuls ({self.part:.1%} of a device's arithmetic)" if self.matmuls else ""
        where = f"; most at {', '.join(self.lines)}" if self.lines else ""
        return (
            f"done alike on all {self.devices} devices along {self.axis!r}, since nothing in them is split along it: "
            f"{count}{sums}, on tensors of at most {size(self.largest)}{where}"
        )


def alike(program: Program, plan: Plan) -> list[Alike]:
    """One entry for each mesh axis along which something is done alike. Scalars are left out."""
    if plan.mesh.size == 1:
        return []
    parts = partition(lower(emit(program, plan, abstract_mesh(plan)), "cpu"))
    work = list(_walk(parts.body, 1))
    total = sum(times * flops(n, parts.values) for n, times in work if n.name in _MATMULS) or 1.0
    found = []
    for axis, devices in parts.mesh.items():
        same = [(n, times) for n, times in work if devices > 1 and counts(parts, n) and not splits(parts, n, axis)]
        if not same:
            continue
        matmuls = [(n, times) for n, times in same if n.name in _MATMULS]
        lines = collections.Counter(n.source for n, _ in same if n.source and not n.source.startswith(_PASSES))
        found.append(
            Alike(
                axis, devices, len(same), len(matmuls),
                sum(times * flops(n, parts.values) for n, times in matmuls) / total,
                max(parts.values[v].bytes for n, _ in same for v in n.outputs),
                tuple(line for line, _ in lines.most_common(3)),
            )
        )  # fmt: skip
    return found


def counts(parts: Partitioned, node: Node) -> bool:
    """Whether an operation has a rule of how to split it, and something to split."""
    plain = node.name.rpartition(".")[2] not in _APART
    return plain and any(len(parts.values[v].shape) for v in (*node.inputs, *node.outputs)) and bool(node.outputs)


def splits(parts: Partitioned, node: Node, axis: str) -> bool:
    """Whether an operand or a result of the operation is split along a mesh axis."""
    values = [parts.values[v] for v in (*node.inputs, *node.outputs)]
    return any(a.partition(":")[0] == axis for v in values for axes in v.spec for a in axes)


def _walk(body: Body, times: int) -> Iterator[tuple[Node, int]]:
    for node in body.nodes:
        yield node, times
        for inner in node.bodies:
            yield from _walk(inner, times * (node.trips or 1))
