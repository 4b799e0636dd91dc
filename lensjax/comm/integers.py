"""Codecs with symmetric integers and a scale a block: eight bits, and four bits packed two to a byte."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lensjax._errors import CodecError
from lensjax.comm.codec import TINY, VectorCodec
from lensjax.comm.floats import check
from lensjax.comm.scales import LARGEST, blocks, from_bf16_bits, join, largest, part, scale_bits


@dataclasses.dataclass(frozen=True)
class Int8(VectorCodec):
    """-127..127 with a bfloat16 scale a block. "int8", "int8:256".

    Off by at most 1/252 of the block's largest value, each hop.
    """

    name: ClassVar[str] = "int8"
    precision: ClassVar[str] = "up to 1/252 of the largest value of its block"
    block: int = 128
    feedback: float = 0.0

    def __post_init__(self):
        check(self)

    def encode(self, x: jax.Array) -> jax.Array:
        codes, bits = quantise(blocks(x, self.block), 127)
        return join(lax.bitcast_convert_type(codes, jnp.uint8), bits)

    def decode(self, message: jax.Array) -> jax.Array:
        codes, scales = part(message, self.block)
        values = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32) * scales[..., None]
        return values.reshape(*values.shape[:-2], -1)

    def message_bytes(self, n: int) -> int:
        return n + 2 * (n // self.block)

    def error_bound(self, x: jax.Array) -> jax.Array:
        return step_bound(blocks(x, self.block), 127).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Int4(VectorCodec):
    """-7..7, two to a byte, with a bfloat16 scale a block. "int4", "int4:32:hadamard", "int4:feedback=0:back=int8".

    Off by at most 1/13.9 of the block's largest value, each hop. Half of each error is carried into the next step
    (`feedback`), as LoCo does (arXiv:2407.04480).
    `hadamard` rotates each block first: a large value is then spread over its block instead of setting the scale for
    it. The bound is larger, since a rotation spreads errors too; the block must be a power of two.
    `back="int8"` sends the totals back in eight bits.
    """

    name: ClassVar[str] = "int4"
    precision: ClassVar[str] = "up to 1/13.9 of the largest value of its block, what is lost being sent later in part"
    block: int = 128
    feedback: float = 0.5
    hadamard: bool = False
    back: str = "int4"

    def __post_init__(self):
        check(self)
        if self.hadamard and self.block & (self.block - 1):
            raise CodecError(f"int4: a rotation of {self.block} values", hint="with hadamard, block is a power of two")
        if self.back not in ("int4", "int8"):
            raise CodecError(f"int4: totals sent back as {self.back!r}", hint="back is int4 or int8")

    @property
    def second(self) -> VectorCodec:
        return self if self.back == "int4" else Int8(self.block)

    def encode(self, x: jax.Array) -> jax.Array:
        x = blocks(x, self.block)
        codes, bits = quantise(x, 7) if not self.hadamard else self._rotated(x)
        low, high = jnp.split((codes + 8).astype(jnp.uint8), 2, axis=-1)
        return join(low | (high << 4), bits)

    def _rotated(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Of small numbers and by signs / n, not signs / sqrt(n): nothing can overflow, and decoding needs no root.
        unit = _unit(x)
        y = rotate(x / unit) / self.block
        top = largest(y)
        finite = jnp.minimum(top, LARGEST / unit[..., 0]) * unit[..., 0]
        bits = scale_bits(jnp.where(jnp.isfinite(top), finite, jnp.nan), 7)
        step = from_bf16_bits(bits)[..., None] / unit
        return jnp.clip(jnp.round(y / step), -7, 7).astype(jnp.int8), bits

    def decode(self, message: jax.Array) -> jax.Array:
        packed, scales = part(message, self.block // 2)
        codes = jnp.concatenate([packed & 15, packed >> 4], axis=-1).astype(jnp.float32) - 8
        if not self.hadamard:
            values = codes * scales[..., None]
        else:
            values = rotate(codes) * scales[..., None]
            values = jnp.where(jnp.isfinite(scales)[..., None], jnp.clip(values, -LARGEST, LARGEST), values)
        return values.reshape(*values.shape[:-2], -1)

    def message_bytes(self, n: int) -> int:
        return n // 2 + 2 * (n // self.block)

    def error_bound(self, x: jax.Array) -> jax.Array:
        x = blocks(x, self.block)
        if not self.hadamard:
            bound = step_bound(x, 7)
        else:
            # Half a step in each of n rotated elements, which rotating back adds up; a step is at most the largest
            # rotated element over 7, and that is at most |block|_2 / sqrt(n).
            unit = _unit(x)
            norm = jnp.sqrt(jnp.square(x / unit).sum(-1, keepdims=True))
            half = (0.5 + 2.0**-6) / 7 * self.block**0.5
            bound = jnp.broadcast_to(jnp.minimum(half * norm, LARGEST / unit) * unit, x.shape)
            bound = bound + 16 * self.block * TINY
        return bound.reshape(*bound.shape[:-2], -1)


def quantise(x: jax.Array, levels: int) -> tuple[jax.Array, jax.Array]:
    """int8 codes of blocks [..., blocks, n], and the bits of their scales."""
    bits = scale_bits(largest(x), levels)
    codes = jnp.round(x / from_bf16_bits(bits)[..., None])
    return jnp.clip(codes, -levels, levels).astype(jnp.int8), bits


def step_bound(x: jax.Array, levels: int) -> jax.Array:
    """Half a step: the block's largest value over `levels`, with the scale's rounding (2^-8 of it), plus what a block
    too small for a scale loses."""
    top = jnp.abs(x).max(-1, keepdims=True)
    return jnp.broadcast_to(top * ((0.5 + 2.0**-8) / levels) + 2 * levels * TINY, x.shape)


def _unit(x: jax.Array) -> jax.Array:
    """What to divide each block by; NaN for one that is not finite. At most 2^125: XLA multiplies by the inverse, which
    must not be subnormal."""
    top = largest(x, keepdims=True)
    return jnp.where(top < TINY, 1.0, jnp.where(top > 2.0**125, 2.0**125, top))


def hadamard_matrix(n: int) -> np.ndarray:
    """The symmetric Hadamard matrix of a power of two (Sylvester's construction): signs; its square is n times one."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rotate(x: jax.Array) -> jax.Array:
    """The last dimension times the Hadamard matrix. In full float32: TF32 would lose more than the code does."""
    return jnp.matmul(x, hadamard_matrix(x.shape[-1]), precision=lax.Precision.HIGHEST)
