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

# Prefix of the targets of jax/_src/cudnn/fused_attention_stablehlo.py.
FUSED_ATTENTION = "__cudnn$fmha"


def flops(node: Node, values: Sequence[Value]) -> float:
    """Operations of one execution on one device."""
    if node.name == "stablehlo.dot_general":
        return _dot(node, values)
    if node.name == "stablehlo.convolution":
        return _convolution(node, values)
    if node.name == "chlo.ragged_dot":
        # Each row meets one group's matrix: rows x columns x contracted (the last dimension of the left operand).
        return 2.0 * sum(values[v].size for v in node.outputs) * values[node.inputs[0]].local[-1]
    if FUSED_ATTENTION in node.attributes.get("call_target_name", ""):
        return _attention(node, values)
    if node.name in ("stablehlo.reduce", "stablehlo.scatter"):
        return float(sum(values[v].size for v in node.inputs))
    return float(sum(values[v].size for v in node.outputs))


def _attention(node: Node, values: Sequence[Value]) -> float:
    """cuDNN's fused attention on [batch, seq, heads, head] operands: two matmuls forward, five backward (it recomputes
    the scores; FlashAttention-2, Dao 2023, section 3.1), half of each under a causal mask, where blocks are skipped."""
    batch, queries, heads, head = values[node.inputs[0]].local
    keys = values[node.inputs[1]].local[1]
    matmuls = 5 if "Backward" in node.attributes["call_target_name"] else 2
    causal = 0.5 if "CAUSAL" in node.attributes.get("backend_config", "") else 1.0
    return 2.0 * matmuls * causal * batch * heads * queries * keys * head


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
        at = (image.local[image_dims.index(d)], kernel.local[kernel_dims.index(d)], result.local[result_dims.index(d)])
        pairs *= _valid_pairs(at, _window(node, i, len(spatial)))
    inputs = kernel.local[kernel_dims.index("i")]
    features = result.local[result_dims.index("f")]
    # With batch groups a result feature sees only its group's share of the batch, and `b` of the result is that share.
    return 2.0 * pairs * inputs * features * result.local[result_dims.index("b")]


def _window(node: Node, i: int, rank: int) -> tuple[int, int, int, int]:
    """Stride, low padding, dilation of the image and dilation of the kernel along one spatial dimension."""

    def at(key: str, default: int) -> int:
        found = integers(node.attributes.get(key, ""))
        return found[i] if len(found) == rank else found[0] if len(found) == 1 else default

    padding = integers(node.attributes.get("padding", ""))
    low = padding[2 * i] if len(padding) == 2 * rank else padding[0] if padding else 0
    return at("window_strides", 1), low, at("lhs_dilation", 1), at("rhs_dilation", 1)


def _valid_pairs(sizes: tuple[int, int, int], window: tuple[int, int, int, int]) -> int:
    """(result, kernel) positions along one dimension that meet an element of the image, not padding and not a gap.

    sizes: of image, kernel and result.
    """
    image, kernel, result = sizes
    stride, low, image_dilation, kernel_dilation = window
    at = np.arange(result)[:, None] * stride + np.arange(kernel)[None] * kernel_dilation - low
    return int(((at >= 0) & (at % image_dilation == 0) & (at // image_dilation < image)).sum())
