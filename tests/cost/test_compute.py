"""Roofline: which bound holds, and what precision costs."""

from __future__ import annotations

import dataclasses

import pytest

from lensjax.cost.compute import LAUNCH, MEMORY_EFFICIENCY, rate, seconds
from lensjax.partition.data import Operation
from lensjax.topology.cluster import Cluster

H100 = Cluster.parse("dgx-h100:1").device
MATMUL = Operation("dot_general", 1e12, 1e6, "bf16", 1, "", "")


def test_a_large_matmul_is_bound_by_arithmetic():
    assert seconds(MATMUL, H100) == pytest.approx(1e12 / H100.achievable_flops("bfloat16") + LAUNCH["cuda"])


def test_a_fused_chain_is_bound_by_memory_whatever_its_flops():
    chain = Operation("fusion", 1e12, 1e9, "f32", 1, "", "")
    assert seconds(chain, H100) == pytest.approx(1e9 / (H100.memory_bandwidth * MEMORY_EFFICIENCY) + LAUNCH["cuda"])


def test_float32_uses_tf32_unless_more_is_asked_for():
    f32 = dataclasses.replace(MATMUL, dtype="f32")
    speeds = [rate(dataclasses.replace(f32, precision=p), H100) for p in ("default", "high", "highest")]
    assert rate(MATMUL, H100) > speeds[0] > speeds[1] > speeds[2]
    assert speeds[2] == H100.achievable_flops("float32")


def test_float32_on_a_tpu_takes_passes_of_bfloat16():
    chip = Cluster.parse("tpu-v5e:2x4").device
    f32 = dataclasses.replace(MATMUL, dtype="f32")
    bf16 = rate(MATMUL, chip)
    found = [rate(dataclasses.replace(f32, precision=p), chip) for p in ("default", "high", "highest")]
    assert found == pytest.approx([bf16, bf16 / 3, bf16 / 6])


def test_eight_bit_matmuls_are_faster():
    assert rate(dataclasses.replace(MATMUL, dtype="f8E4M3FN"), H100) > rate(MATMUL, H100)
