"""A share's part of the full batch's random draw, bit for bit.

Element j of a partitionable threefry draw is threefry2x32(key, j), j a 64-bit counter over the flattened draw. A share
counts from its own first element, so that nothing is drawn twice and nothing is thrown away.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

_WORD = 1 << 32


@dataclasses.dataclass(frozen=True)
class Draw:
    """`(key, offset) -> bits` of a draw of shape `full`, of which dimension `dim` is kept from offset * `unit` on,
    `size` long. `width`: bits of an element, 8, 16, 32 or 64."""

    full: tuple[int, ...]
    dim: int
    unit: int
    size: int
    width: int

    def __call__(self, key, offset):
        before, after = self.full[: self.dim], self.full[self.dim + 1 :]
        tail = math.prod(after)
        rows, length = math.prod(before), self.size * tail
        # Counters: row * (full length of a row) + offset * unit * tail + position, in two words.
        start = np.arange(rows, dtype=np.uint64) * np.uint64(self.full[self.dim] * tail)
        high = jnp.asarray((start >> np.uint64(32)).astype(np.uint32))[:, None]
        low = jnp.asarray((start & np.uint64(_WORD - 1)).astype(np.uint32))[:, None]
        high, low = _add((high, low), _times(offset.astype(jnp.uint32), self.unit * tail))
        position = jax.lax.broadcasted_iota(jnp.uint32, (rows, length), 1)
        high, low = _add((high, low), (jnp.zeros_like(position), position))
        one, two = jax.random.key_data(key)
        # Keys of the counters' shape: under vmap, JAX does not lower the primitive with keys that are not batched.
        a, b = threefry2x32_p.bind((low ^ low) | one, (low ^ low) | two, high, low)
        a, b = (x.reshape((*before, self.size, *after)) for x in (a, b))
        if self.width == 64:
            return (a.astype(jnp.uint64) << np.uint64(32)) | b.astype(jnp.uint64)
        return (a ^ b).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[self.width])


@dataclasses.dataclass(frozen=True)
class Take:
    """`(x, offset) -> x` from offset * `unit` on, `size` long, along `dim`."""

    dim: int
    unit: int
    size: int

    def __call__(self, x, offset):
        return jax.lax.dynamic_slice_in_dim(x, offset * self.unit, self.size, self.dim)


def _add(a, b):
    """The sum of two 64-bit numbers, each (high, low) words."""
    low = a[1] + b[1]
    carry = (low < a[1]).astype(jnp.uint32)
    return a[0] + b[0] + carry, low


def _times(x, factor: int):
    """x * factor as (high, low) words, from 16-bit halves; x is uint32."""
    half = np.uint32(0xFFFF)
    total = (jnp.zeros_like(x), jnp.zeros_like(x))
    for place in range(4):
        digit = np.uint32(factor >> 16 * place & 0xFFFF)
        if not digit:
            continue
        for side, part in ((0, x & half), (1, x >> np.uint32(16))):
            shift = 16 * (place + side)
            product = part * digit
            if shift < 32:
                up = product >> np.uint32(32 - shift) if shift else jnp.zeros_like(x)
                total = _add(total, (up, product << np.uint32(shift)))
            elif shift < 64:
                total = _add(total, (product << np.uint32(shift - 32), jnp.zeros_like(x)))
    return total
