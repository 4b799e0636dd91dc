"""What one instruction of compiled HLO costs a device: floating-point operations and bytes of device memory.

Formulas follow XLA's HloCostAnalysis (xla/service/hlo_cost_analysis.cc): a dot is 2 x result x contracted, a
convolution counts the positions where kernel and input really meet (TPU writes matmuls as convolutions, so that
matters), a fusion reads its operands and writes its result, except that slices and updates in place touch only a part.
"""

from __future__ import annotations

import dataclasses
import math
import re
from functools import lru_cache

import numpy as np

from lensjax.verify.hlo import Computation, Instruction, Module, Shape

# They name or re-interpret a buffer; nothing runs.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier "
    "optimization-barrier add-dependency domain get-dimension-size".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations (FLOP), the HLO type they run in, and bytes of device memory read and written."""

    flops: float = 0.0
    dtype: str = ""
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        dtype = self.dtype if self.flops >= other.flops else other.dtype
        return Work(self.flops + other.flops, dtype, self.bytes + other.bytes)


def work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """The work of one instruction, without what loops, calls and branches run."""
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return Work()
    if instruction.opcode in ("while", "conditional", "call") or instruction.opcode.endswith("-start"):
        return Work()
    math_ = arithmetic(module, computation, instruction)
    return Work(math_.flops, math_.dtype, memory_bytes(module, computation, instruction))


def arithmetic(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """FLOP of the matmuls and convolutions of an instruction; those inside a fusion included."""
    if instruction.opcode == "fusion":
        total = Work()
        for name in instruction.called:
            inside = module.computations.get(name)
            for inner in inside.instructions if inside else ():
                total = total + arithmetic(module, inside, inner)
        return total
    operands = list(computation.operands(instruction))
    if not operands or not operands[0].shapes:
        return Work()
    dtype = operands[0].shapes[0].dtype
    if instruction.opcode == "dot":
        return Work(_dot(instruction, operands[0].shapes[0], instruction.attr("lhs_contracting_dims")), dtype)
    if instruction.opcode == "convolution":
        return Work(_convolution(instruction, operands[0].shapes[0], operands[1].shapes[0]), dtype)
    if instruction.opcode == "custom-call":
        return Work(_library(instruction, [o.shapes[0] for o in operands if o.shapes]), dtype)
    return Work()


def _dot(instruction: Instruction, lhs: Shape, contracting: str | None) -> float:
    dims = [int(d) for d in re.findall(r"\d+", contracting or "")]
    return 2.0 * instruction.shapes[0].elements * math.prod(lhs.dims[d] for d in dims if d < len(lhs.dims))


def _library(instruction: Instruction, operands: list[Shape]) -> float:
    """FLOP of a vendor library call: cuBLAS matmul, cuDNN convolution, cuDNN attention; 0 for the rest."""
    target = instruction.attr("custom_call_target") or ""
    if "matmul" in target or "gemm" in target:
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.tail)
        return _dot(instruction, operands[0], found.group(1) if found else "")
    if "conv" in target and len(operands) > 1 and instruction.attr("dim_labels"):
        return _cudnn_convolution(instruction, target, operands)
    if "fmha" in target or "attention" in target:
        return _attention(instruction, target, operands)
    return 0.0


def _cudnn_convolution(instruction: Instruction, target: str, operands: list[Shape]) -> float:
    # The three cuDNN calls of one convolution do the same number of multiplications, whatever is input and output.
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attr("dim_labels") or "")
    if labels is None:
        return 0.0
    result = instruction.shapes[0]
    if "BackwardInput" in target:
        outer, kernel = operands[0], operands[1]
    elif "BackwardFilter" in target:
        outer, kernel = operands[1], result
    else:
        outer, kernel = result, operands[1]
    out_features = kernel.dims[labels.group(2).index("o")] if "o" in labels.group(2) else 1
    return 2.0 * outer.elements * kernel.elements / max(out_features, 1)


def _attention(instruction: Instruction, target: str, operands: list[Shape]) -> float:
    """Two matmuls of [batch, heads, q, k] x head size forward, five backward (FlashAttention, arXiv:2205.14135)."""
    if len(operands) < 2 or len(operands[0].dims) < 4:
        return 0.0
    q, k = operands[0], operands[1]
    matmuls = 5 if "ackward" in target else 2
    # Queries and keys are [batch, sequence, heads, size] or [batch, heads, sequence, size]: the sequence of the keys is
    # their elements over batch, heads and size.
    return 2.0 * matmuls * q.elements * max(k.dims[1:3])


def _convolution(instruction: Instruction, lhs: Shape, rhs: Shape) -> float:
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attr("dim_labels") or "")
    if labels is None:
        return 0.0
    left, kernel, out = labels.groups()
    result = instruction.shapes[0]
    window = _window(instruction.attr("window") or "")
    meets = 1
    for number, digit in enumerate(d for d in sorted(kernel) if d.isdigit()):
        size = rhs.dims[kernel.index(digit)]
        fields = {k: v[number] if number < len(v) else "1" for k, v in window.items()}
        meets *= _positions(lhs.dims[left.index(digit)], size, result.dims[out.index(digit)], tuple(fields.items()))
    batch, features = result.dims[out.index("b")], result.dims[out.index("f")]
    return 2.0 * batch * features * rhs.dims[kernel.index("i")] * meets


def _window(text: str) -> dict[str, list[str]]:
    return {k: v.split("x") for k, v in re.findall(r"(\w+)=(\S+)", text)}


@lru_cache(maxsize=1024)
def _positions(size: int, kernel: int, out: int, fields: tuple[tuple[str, str], ...]) -> int:
    """Pairs (output, kernel) of positions along one spatial dimension that meet an element of the input."""
    get = dict(fields)
    stride, dilation, hole = (
        int(get.get("stride", "1")),
        int(get.get("rhs_dilate", "1")),
        int(get.get("lhs_dilate", "1")),
    )
    low = int(get["pad"].split("_")[0]) if "pad" in get and "_" in get["pad"] else 0
    if kernel * out > 4_000_000:
        return min(kernel * out, kernel * size)
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * dilation - low
    return int(((at >= 0) & (at < (size - 1) * hole + 1) & (at % hole == 0)).sum())


def memory_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes of device memory that an instruction reads and writes."""
    if instruction.opcode in _SLICES:
        return 2.0 * instruction.bytes
    operands = list(computation.operands(instruction))
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * (operands[1].bytes if len(operands) > 1 else 0)
    if instruction.opcode == "fusion":
        inside = [module.computations[c] for c in instruction.called if c in module.computations]
        if inside:
            return _fusion_bytes(inside[0], instruction, operands)
    workspace = 0.0
    if instruction.opcode == "custom-call" and instruction.is_tuple:
        workspace = sum(s.bytes for s in instruction.shapes if s.dtype in ("s8", "u8") and len(s.dims) == 1)
    return sum(o.bytes for o in operands) + instruction.bytes - workspace


def _fusion_bytes(inside: Computation, fusion: Instruction, operands: list[Instruction]) -> float:
    written = _updates(inside)
    total = written if written is not None else float(fusion.bytes)
    parameters = [i for i in inside.instructions if i.opcode == "parameter"]
    for parameter in parameters:
        number = int(parameter.literal) if parameter.literal.strip().isdigit() else -1
        full = operands[number].bytes if 0 <= number < len(operands) else parameter.bytes
        total += min(touched(inside, parameter), full)
    return total


def _updates(inside: Computation) -> float | None:
    """Bytes written by a fusion that updates slices in place; None for any other."""
    root = inside.root
    while root is not None and root.opcode in ("bitcast", "copy", "convert") and root.operands:
        root = inside.by_name.get(root.operands[0])
    if root is None:
        return None
    ends = list(inside.operands(root)) if root.opcode == "tuple" else [root]
    if not any(e.opcode == "dynamic-update-slice" for e in ends):
        return None
    return float(sum(_update(inside, e) if e.opcode == "dynamic-update-slice" else e.bytes for e in ends))


def _update(inside: Computation, instruction: Instruction) -> int:
    operands = list(inside.operands(instruction))
    return operands[1].bytes if len(operands) > 1 else instruction.bytes


def touched(inside: Computation, parameter: Instruction) -> float:
    """Bytes that a fusion reads of a parameter: slices where it only slices, nothing where it only updates in place."""
    total, todo, seen = 0.0, [parameter], set()
    while todo:
        at = todo.pop()
        for user in inside.users.get(at.name, ()):
            if user.opcode in _SLICES and user.operands[0] == at.name:
                total += user.bytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == at.name:
                continue
            elif user.opcode == "bitcast":
                if user.name not in seen:
                    seen.add(user.name)
                    todo.append(user)
            else:
                return float(parameter.bytes)
    return total
