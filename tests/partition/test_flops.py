"""Operations counted from shapes, against direct counts and against XLA's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from lensjax.partition import Node, Value, partition
from lensjax.partition.flops import flops


def counted(fn, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    traced = jax.jit(fn).trace(*args)
    ours = sum(
        o.flops * o.trips
        for o in partition(traced.lower(lowering_platforms=("cpu",))).operations
        if o.name in ("dot_general", "convolution")
    )
    return ours, traced.lower().compile().cost_analysis()["flops"]


CONVOLUTIONS = {
    "valid": dict(window_strides=(1, 1), padding="VALID"),
    "same": dict(window_strides=(1, 1), padding="SAME"),
    "strided": dict(window_strides=(2, 2), padding="SAME"),
    "dilated": dict(window_strides=(1, 1), padding="SAME", rhs_dilation=(2, 2)),
    "transposed": dict(window_strides=(1, 1), padding=((1, 2), (1, 2)), lhs_dilation=(2, 2)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_as_xla_counts_them(name):
    def fn(x, w):
        return jax.lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **CONVOLUTIONS[name])

    ours, xla = counted(fn, (4, 16, 16, 8), (3, 3, 8, 12))
    assert ours == pytest.approx(xla, rel=0.02)


def test_grouped_convolution():
    def fn(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
        )

    ours, _ = counted(fn, (2, 10, 10, 8), (3, 3, 2, 12))
    assert ours == 2 * (2 * 8 * 8 * 12) * (3 * 3 * 2)


def test_gradients_of_a_convolution():
    def loss(w, x):
        return (
            jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2
        ).sum()

    ours, xla = counted(jax.grad(loss, argnums=(0, 1)), (3, 3, 8, 12), (4, 16, 16, 8))
    assert ours == pytest.approx(xla, rel=0.05)


def test_batched_matmul():
    ours, _ = counted(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (5, 6, 7), (5, 7, 8))
    assert ours == 2 * 5 * 6 * 7 * 8


def test_fused_attention_counts_its_matmuls():
    value = Value((2, 128, 4, 64), "bf16", ((),) * 4, (2, 128, 4, 64), 131072.0)
    full = 2 * 2 * 2 * 4 * 128 * 128 * 64

    def node(target, config=""):
        return Node("stablehlo.custom_call", (0, 0, 0), (0,), "", "",
                    attributes={"call_target_name": f'"{target}"', "backend_config": config})  # fmt: skip

    assert flops(node("__cudnn$fmhaSoftmax"), [value]) == full
    assert flops(node("__cudnn$fmhaSoftmaxBackward", '"mask_type": "CAUSAL"'), [value]) == full * 2.5 / 2
