"""Copies that a GPU's compiler makes since a gather wants its dimension first in memory.

NCCL lays the parts of an all-gather one after the other, so XLA's layout assignment makes the gathered dimension the
major one of operand and result (xla/service/gpu/transforms/layout_assignment.cc). Arguments and results of a step keep
the order of their dimensions. Where those meet, the whole buffer is copied: a result that is gathered along an inner
dimension is transposed into its place, and a stack of weights that a loop slices and gathers so is transposed once,
before the loop. A reduce-scatter wants its operand so too; cuDNN writes its results with their channels last, so that
what a convolution made is copied first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lensjax.partition.data import Body, Node, Value
from lensjax.partition.fusion import ALIASES, captured

_SAME_LAYOUT = ALIASES | {"stablehlo.convert", "stablehlo.dynamic_slice", "stablehlo.slice"}


def inner_gather(node: Node, values: Sequence[Value]) -> bool:
    """Whether a node gathers along a dimension that is not the first of its result."""
    if node.name != "all_gather" or not node.inputs:
        return False
    before, after = values[node.inputs[0]], values[node.outputs[0]]
    grown = [d for d, (b, a) in enumerate(zip(before.local, after.local)) if a > b]
    return any(after.local[d] > 1 for d in range(min(grown, default=0)))


def inner_scatter(before: Value, after: Value) -> bool:
    """Whether a reduce-scatter from one value to another divides a dimension that is not the first."""
    shrunk = [d for d, (b, a) in enumerate(zip(before.local, after.local)) if a < b]
    return any(before.local[d] > 1 for d in range(min(shrunk, default=0)))


def transposed_stacks(loop: Node, values: Sequence[Value]) -> set[int]:
    """Values from outside of a loop that it slices and gathers along an inner dimension."""
    return {v for body in loop.bodies for v in _from_outside(body, values)}


def _from_outside(body: Body, values: Sequence[Value]) -> Iterator[int]:
    made = {v: n for n in body.nodes for v in n.outputs}
    outer = captured(body)
    for node in body.nodes:
        if not inner_gather(node, values):
            continue
        value = node.inputs[0]
        while value in made and made[value].name in _SAME_LAYOUT:
            node = made[value]
            value = node.inputs[node.outputs.index(value)]  # a barrier passes several values
        if value in outer:
            yield value
