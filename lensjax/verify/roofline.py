"""Seconds of one instruction on one device: the larger of arithmetic and memory traffic, and a gap between kernels."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lensjax.verify.work import Work

if TYPE_CHECKING:
    from lensjax.topology.cluster import Device

# HLO type -> the name under which a device lists its peak.
DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "s8": "int8", "u8": "int8",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e4m3": "float8_e4m3", "f8e4m3fnuz": "float8_e4m3fnuz",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """How far a device falls short of its datasheet, before any calibration.

    `memory`: fraction of the memory bandwidth that a streaming kernel reaches: BabelStream triad on A100 and H100
    reaches 0.89-0.93 (Deakin et al., https://github.com/UoB-HPC/BabelStream); fusions with several streams less.
    `gap`: seconds between kernels: 3.8 us per kernel of 2.9 us when launched back to back
    (https://developer.nvidia.com/blog/cuda-graphs/).
    Matmuls take the device's own `achievable` fraction.
    """

    memory: float = 0.85
    gap: float = 0.9e-6


def seconds(work: Work, device: Device, efficiency: Efficiency) -> float:
    """Roofline time (Williams et al., doi:10.1145/1498765.1498785) of an instruction; 0 for one that does nothing."""
    if not work.flops and not work.bytes:
        return 0.0
    arithmetic = work.flops / rate(device, work.dtype) if work.flops else 0.0
    return max(arithmetic, work.bytes / (device.memory_bandwidth * efficiency.memory)) + efficiency.gap


def rate(device: Device, dtype: str) -> float:
    """FLOP/s that a large matmul of an HLO type reaches. float32 runs as tensorfloat32 where the device has it: JAX's
    default precision allows that on NVIDIA GPUs from Ampere on."""
    name = DTYPES.get(dtype, "float32")
    if name == "float32" and "tensorfloat32" in device.peak:
        name = "tensorfloat32"
    return device.achievable_flops(name)
