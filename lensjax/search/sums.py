"""What meets what in an operation: which dimensions of operands and result are one, and which are summed over.

Matmuls, convolutions, reductions and lookups as `Contraction`s, so that what a rule set makes them send follows from
one consideration (`rules`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from lensjax.partition.axes import Dimension
from lensjax.partition.data import Node, Value
from lensjax.partition.text import integers, named_list

Dims = tuple[Dimension, ...]
# Operands, for each of them operand dimension -> result dimension, and the dimensions of each that are summed over.
Met = tuple[tuple[int, ...], tuple[dict[int, int], ...], tuple[tuple[int, ...], ...]]

# Operations in which dimensions meet and are summed over: these have mappings of their own. And values of fewer bytes
# than this are moved at no price.
NOT_PASSING = frozenset(
    ["stablehlo.dot_general", "stablehlo.convolution", "stablehlo.reduce", "chlo.ragged_dot", "stablehlo.gather",
     "stablehlo.scatter", "stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"]
)  # fmt: skip
MOVED = 2**20
MATMULS = ("stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot")


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A matmul or the like: how dimensions of operands and result meet.

    `pairs[k]`: dimension of operand k -> dimension of the result; `summed[k]`: dimensions of operand k that are summed
    over, in the order in which they meet. `weight`: it makes a weight's gradient (its partial sums are the group's).
    `passes`: nothing meets: a value changes its shape, and a dimension may end (a pad of what experts return).
    `total`: the value in which its partial sums become a total: the result, or what it is added to other matmuls'
    results in, which XLA sums first (`lensjax.partition.simplify`). `times`: how often the step has it.
    """

    operands: tuple[int, ...]
    result: int
    pairs: tuple[dict[int, int], ...]
    summed: tuple[tuple[int, ...], ...]
    region: int
    weight: bool
    passes: bool = False
    total: int = -1
    times: int = 1


def _dot(node: Node, values: Sequence[Value], dims: Sequence[Dims]) -> Met | None:
    text = node.attributes["dot_dimension_numbers"]
    lb, rb, lc, rc = (
        named_list(f"{side}_{kind}_dimensions", text) for kind in ("batching", "contracting") for side in ("lhs", "rhs")
    )
    left, right = node.inputs
    lf = [d for d in range(len(values[left].shape)) if d not in lb and d not in lc]
    rf = [d for d in range(len(values[right].shape)) if d not in rb and d not in rc]
    n = len(lb)
    lp = {d: i for i, d in enumerate(lb)} | {d: n + i for i, d in enumerate(lf)}
    rp = {d: i for i, d in enumerate(rb)} | {d: n + len(lf) + i for i, d in enumerate(rf)}
    return (left, right), (lp, rp), (tuple(lc), tuple(rc))


def _convolution(node: Node, values: Sequence[Value], dims: Sequence[Dims]) -> Met | None:
    sides = re.findall(r"\[([^\]]*)\]", node.attributes["dimension_numbers"])
    image, kernel, out = (side.replace(" ", "").split(",") for side in sides[:3])
    groups = (node.attributes.get(k, "1").split()[0] for k in ("batch_group_count", "feature_group_count"))
    if any(g != "1" for g in groups):
        return None  # what meets what is not a sum over one dimension
    lp = {image.index("b"): out.index("b")}
    rp = {kernel.index("o"): out.index("f")}
    return tuple(node.inputs[:2]), (lp, rp), ((image.index("f"),), (kernel.index("i"),))


def _reduce(node: Node, values: Sequence[Value], dims: Sequence[Dims]) -> Met | None:
    gone = integers(node.attributes.get("dimensions", ""))
    source = node.inputs[0]
    left = [d for d in range(len(values[source].shape)) if d not in gone]
    return (source,), ({d: i for i, d in enumerate(left)},), (tuple(gone),)


def _ragged(node: Node, values: Sequence[Value], dims: Sequence[Dims]) -> Met | None:
    left, right = node.inputs[:2]
    if len(values[right].shape) != 3 or len(values[left].shape) != 2:
        return None
    return (left, right), ({0: 0}, {2: 1}), ((1,), (1,))


def _lookup(node: Node, values: Sequence[Value], dims: Sequence[Dims]) -> Met | None:
    """A lookup in a table: the dimensions of the table that are not in the result are summed over (each device looks up
    its own rows, and the results are added)."""
    table, result = node.inputs[0], node.outputs[0]
    pairs = {}
    for d, dim in enumerate(dims[table]):
        at = [o for o, own in enumerate(dims[result]) if own == dim and dim]
        if at:
            pairs[d] = at[-1]
    gone = tuple(d for d, dim in enumerate(dims[table]) if dim and d not in pairs)
    return (table,), (pairs,), (gone,)


def _lookup_backward(node: Node, values: Sequence[Value], dims: Sequence[Dims]) -> Met | None:
    """Updates added into a table: summed over what the table does not have."""
    updates, result = node.inputs[-1], node.outputs[0]
    pairs = {d: list(dims[result]).index(dim) for d, dim in enumerate(dims[updates]) if dim and dim in dims[result]}
    gone = tuple(d for d, dim in enumerate(dims[updates]) if dim and d not in pairs)
    return (updates,), (pairs,), (gone,)


SUMS: dict[str, Callable[[Node, Sequence[Value], Sequence[Dims]], Met | None]] = {
    "stablehlo.dot_general": _dot,
    "stablehlo.convolution": _convolution,
    "stablehlo.reduce": _reduce,
    "chlo.ragged_dot": _ragged,
    "stablehlo.gather": _lookup,
    "stablehlo.scatter": _lookup_backward,
}
