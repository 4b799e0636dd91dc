"""Codecs that keep a floating point format: bfloat16, and eight bits with a scale a block."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from lensjax._errors import CodecError
from lensjax.comm.codec import TINY, VectorCodec
from lensjax.comm.scales import bf16_bits, blocks, from_bf16_bits, join, largest, part, scale_bits


@dataclasses.dataclass(frozen=True)
class BFloat16(VectorCodec):
    """bfloat16, sent as uint16 (XLA:CPU widens bfloat16 on the wire) and summed in float32. "bf16".

    Each hop is off by at most 2^-8 of a value.
    """

    name: ClassVar[str] = "bf16"
    precision: ClassVar[str] = "up to 2^-8 of itself"

    def encode(self, x: jax.Array) -> jax.Array:
        return bf16_bits(x)

    def decode(self, message: jax.Array) -> jax.Array:
        return from_bf16_bits(message)

    def message_bytes(self, n: int) -> int:
        return 2 * n

    def error_bound(self, x: jax.Array) -> jax.Array:
        return 2.0**-8 * jnp.abs(x) + TINY


# format -> (JAX's type, largest finite number, 2^-(bits of the mantissa + 1), half of the smallest number)
_FORMATS = {
    "e4m3": (jnp.float8_e4m3fn, 448.0, 2.0**-4, 2.0**-10),
    "e5m2": (jnp.float8_e5m2, 57344.0, 2.0**-3, 2.0**-17),
}


@dataclasses.dataclass(frozen=True)
class Float8(VectorCodec):
    """Eight-bit floats with a bfloat16 scale a block, sent as uint8. "fp8", "fp8:e5m2", "fp8:block=64".

    `form`: "e4m3" (3 bits of mantissa; the default) or "e5m2" (2).
    """

    name: ClassVar[str] = "fp8"
    precision: ClassVar[str] = "up to 2^-4 (e5m2: 2^-3) of itself"
    form: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 128
    feedback: float = 0.0

    def __post_init__(self):
        check(self)
        if self.form not in _FORMATS:
            raise CodecError(f"fp8 has no format {self.form!r}", hint=f"formats: {', '.join(_FORMATS)}")

    def encode(self, x: jax.Array) -> jax.Array:
        kind, top, _, _ = _FORMATS[self.form]
        x = blocks(x, self.block)
        bits = scale_bits(largest(x), top)
        scaled = jnp.clip(x / from_bf16_bits(bits)[..., None], -top, top)
        return join(lax.bitcast_convert_type(scaled.astype(kind), jnp.uint8), bits)

    def decode(self, message: jax.Array) -> jax.Array:
        codes, scales = part(message, self.block)
        values = lax.bitcast_convert_type(codes, _FORMATS[self.form][0]).astype(jnp.float32) * scales[..., None]
        return values.reshape(*values.shape[:-2], -1)

    def message_bytes(self, n: int) -> int:
        return n + 2 * (n // self.block)

    def error_bound(self, x: jax.Array) -> jax.Array:
        _, top, relative, smallest = _FORMATS[self.form]
        x = jnp.abs(blocks(x, self.block))
        # 2^-9 more for the scale's own rounding and for compilers that convert by way of float16.
        bound = relative * (1 + 2.0**-5) * x + (smallest * (1 + 2.0**-7) / top) * x.max(-1, keepdims=True)
        return (bound + 2 * top * TINY).reshape(*x.shape[:-2], -1)


def check(codec: VectorCodec) -> None:
    """Raises CodecError unless the block and the feedback make sense."""
    if codec.block < 1 or codec.block % 2:
        raise CodecError(f"{codec.name}: a block of {codec.block} values", hint="a block is an even number of values")
    if not 0 <= codec.feedback <= 1:
        raise CodecError(f"{codec.name}: feedback {codec.feedback}", hint="feedback is between 0 (none) and 1 (all)")
