"""Roofline: an operation takes as long as its arithmetic or its memory traffic, whichever is longer.

    seconds = max(flops / achievable FLOP/s, bytes / (memory bandwidth * MEMORY_EFFICIENCY)) + LAUNCH

(Williams, Waterman and Patterson 2009). Achievable FLOP/s are a cluster's: dense peak times the measured fraction.
"""

from __future__ import annotations

from lensjax.partition.data import Operation
from lensjax.topology.cluster import Device

# Streaming kernels reach about nine tenths of HBM's rated bandwidth (BabelStream triad on A100-40GB: about 1.39 of
# 1.555 TB/s). A calibration on the machine replaces it.
MEMORY_EFFICIENCY = 0.9
# Gap between kernels that a command buffer replays on a GPU (NVIDIA, "Constant time launch for straight-line CUDA
# graphs": 1.5-2.5 us a node in earlier releases). A TPU and a CPU have one program and no such gap.
LAUNCH = {"cuda": 2e-6, "rocm": 2e-6}

_NAMES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "i8": "int8", "ui8": "int8",
    "i4": "int8", "complex<f32>": "float32", "complex<f64>": "float64",
}  # fmt: skip
_MATMULS = ("dot_general", "convolution", "ragged_dot")
# Passes of the matrix unit that a float32 matmul takes at JAX's precisions. GPUs: TF32 by default, 3xTF32 for "high"
# (jax.lax.Precision); TPUs: 1, 3 or 6 passes of bfloat16 (same page).
_TPU_PASSES = {"default": 1, "high": 3, "highest": 6}


def seconds(operation: Operation, device: Device) -> float:
    """Seconds of one execution on one device."""
    arithmetic = operation.flops / rate(operation, device) if operation.name in _MATMULS else 0.0
    traffic = operation.bytes / (device.memory_bandwidth * MEMORY_EFFICIENCY)
    return max(arithmetic, traffic) + LAUNCH.get(device.platform, 0.0)


def rate(operation: Operation, device: Device) -> float:
    """FLOP/s at which a device multiplies matrices of an operation's type and precision."""
    dtype, precision = operation.dtype, operation.precision
    name = "float8" if dtype.startswith("f8") else _NAMES.get(dtype, "float32")
    if name == "float32" and device.platform == "tpu":
        return device.achievable_flops("bfloat16") / _TPU_PASSES[precision]
    if name == "float32" and device.platform == "cuda" and precision != "highest" and "tensorfloat32" in device.peak:
        return device.achievable_flops("tensorfloat32") / (1 if precision == "default" else 3)
    return device.achievable_flops(name)
