"""Blocks of a vector with one scale each, and how codes and scales become one message.

A scale travels as bfloat16 (two bytes a block). Values are coded against the scale as it arrives, not as it was
computed. `lax.reduce_precision` rounds it: a conversion to bfloat16 and back is removed by XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lensjax.comm.codec import TINY

LARGEST = float(np.finfo(np.float32).max)


def bf16_bits(x: jax.Array) -> jax.Array:
    """float32 -> the 16 bits of the nearest bfloat16. A finite number stays finite (the largest ones saturate)."""
    top = np.uint32(0x7F7F0000).view(np.float32)
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -top, top), x)
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return (lax.bitcast_convert_type(rounded, jnp.uint32) >> 16).astype(jnp.uint16)


def from_bf16_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def blocks(x: jax.Array, size: int) -> jax.Array:
    """[..., n] -> [..., n / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def largest(x: jax.Array, axis: int | tuple[int, ...] = -1, keepdims: bool = False) -> jax.Array:
    """The largest absolute value of each block; NaN for one that holds a NaN or an infinity anywhere.

    Asked apart: XLA:CPU's maximum over rows loses a NaN that is not in the last place.
    """
    finite = jnp.isfinite(x).all(axis, keepdims=keepdims)
    return jnp.where(finite, jnp.abs(x).max(axis, keepdims=keepdims), jnp.nan)


def scale_bits(top: jax.Array, levels: float) -> jax.Array:
    """The scale of each block, as bfloat16 bits, such that `top` is `levels` steps, and decoding cannot overflow.

    top: what `largest` finds, NaN for a block that holds a NaN or an infinity: all of it then decodes to NaN. A block
    of zeros (or of numbers too small for a scale) has the scale 1.
    """
    limit = np.float32(LARGEST / levels)
    limit = (limit.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # a bfloat16 that is not larger
    scale = jnp.where(jnp.isfinite(top), jnp.minimum(top / levels, limit), jnp.nan)
    return bf16_bits(jnp.where(scale < TINY, 1.0, scale))


def join(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """uint8 codes [..., blocks, m] and scale bits [..., blocks] -> one message, [..., blocks * (m + 2)]."""
    tail = lax.bitcast_convert_type(scales, jnp.uint8)
    flat = lambda x: x.reshape(*x.shape[:-2], -1)
    return jnp.concatenate([flat(codes), flat(tail)], axis=-1)


def part(message: jax.Array, code_bytes: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of `join`: codes [..., blocks, code_bytes] and scales, float32 [..., blocks]."""
    count = message.shape[-1] // (code_bytes + 2)
    codes, tail = message[..., : count * code_bytes], message[..., count * code_bytes :]
    bits = lax.bitcast_convert_type(tail.reshape(*tail.shape[:-1], count, 2), jnp.uint16)
    return codes.reshape(*codes.shape[:-1], count, code_bytes), from_bf16_bits(bits)
