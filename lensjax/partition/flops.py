"""Floating point operations of one device, from the local shapes of an operation's operands.

Matmuls and convolutions are exact (a multiply-add is two; positions that fall into padding or between dilated elements
are not counted, as in xla/service/hlo_cost_analysis.cc). Everything else is one for each output element, which only
tells that it is bound by memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from lensjax.partition.data import Node, Value
from lensjax.partition.text import integers, named_list


def flops(node: Node, values: Sequence[Value]) -> float:
    """Operations of one execution on one device."""
    if node.name == "stablehlo.dot_general":
        return _dot(node, values)
    if node.name == "stablehlo.convolution":
        return _convolution(node, values)
    if node.name == "chlo.ragged_dot":
        # Each row meets one group's matrix: rows x columns x contracted (the last dimension of the left operand).
        return 2.0 * sum(values[v].size for v in node.outputs) * values[node.inputs[0]].local[-1]
    if node.name in ("stablehlo.reduce", "stablehlo.scatter"):
        return float(sum(values[v].size for v in node.inputs))
    return float(sum(values[v].size for v in node.outputs))


def _dot(node: Node, values: Sequence[Value]) -> float:
    contracted = named_list("lhs_contracting_dimensions", node.attributes["dot_dimension_numbers"])
    left = values[node.inputs[0]].local
    return 2.0 * values[node.outputs[0]].size * math.prod(left[d] for d in contracted)


def _convolution(node: Node, values: Sequence[Value]) -> float:
    image, kernel, result = (values[v] for v in (*node.inputs[:2], node.outputs[0]))
    sides = re.findall(r"\[([^\]]*)\]", node.attributes["dimension_numbers"])
    image_dims, kernel_dims, result_dims = (side.replace(" ", "").split(",") for side in sides[:3])
    spatial = sorted((d for d in kernel_dims if d.isdigit()), key=int)
    pairs = 1.0
    for i, d in enumerate(spatial):
        sizes = tuple(
            v.local[dims.index(d)] for v, dims in ((image, image_dims), (kernel, kernel_dims), (result, result_dims))
        )
        pairs *= _valid_pairs(*sizes, *_window(node, i, len(spatial)))
    inputs = kernel.local[kernel_dims.index("i")]
    features = result.local[result_dims.index("f")]
    # With batch groups a result feature sees only its group's share of the batch, and `b` of the result is that share.
    return 2.0 * pairs * inputs * features * result.local[result_dims.index("b")]


def _window(node: Node, i: int, rank: int) -> tuple[int, int, int, int, int]:
    def at(key: str, default: int) -> int:
        found = integers(node.attributes.get(key, ""))
        return found[i] if len(found) == rank else found[0] if len(found) == 1 else default

    padding = integers(node.attributes.get("padding", ""))
    low, high = (padding[2 * i], padding[2 * i + 1]) if len(padding) == 2 * rank else (padding * 2)[:2] or (0, 0)
    return at("window_strides", 1), low, high, at("lhs_dilation", 1), at("rhs_dilation", 1)


def _valid_pairs(image: int, kernel: int, result: int, stride: int, low: int, high: int, lhs: int, rhs: int) -> int:
    """(result, kernel) positions along one dimension that meet an element of the image rather than padding or a gap.

    `high` padding follows from the sizes; it is named for completeness.
    """
    del high
    at = np.arange(result)[:, None] * stride + np.arange(kernel)[None] * rhs - low
    return int(((at >= 0) & (at % lhs == 0) & (at // lhs < image)).sum())
