"""Nets under compressed training: are all replicas still the same, and is a step to be skipped?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lensjax.comm.given import mapped_sizes

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def checksum(tree: Any) -> jax.Array:
    """A uint32 of the bits of a tree of arrays: a sum, weighted by position, modulo 2^32. Equal bits, equal sums."""
    total = jnp.uint32(0)
    for n, leaf in enumerate(jax.tree.leaves(tree)):
        x = jnp.asarray(leaf)
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        words = lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).reshape(-1).astype(jnp.uint32)
        # Odd weights are invertible modulo 2^32: a change of one word always shows.
        place = (jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(2654435761)) | jnp.uint32(1)
        total = total * jnp.uint32(31) + (words * place).sum(dtype=jnp.uint32) + jnp.uint32(n)
    return total


def replicas_agree(tree: Any, axis: str | Sequence[str]) -> jax.Array:
    """Inside a `shard_map`: whether a tree has the same bits on all members of the axis. One number crosses it."""
    names = tuple(name for name, _ in mapped_sizes(axis))
    mine = checksum(tree)
    return lax.pmax(mine, names) == lax.pmin(mine, names)


def keep_if(ok: jax.Array, new: Any, old: Any) -> Any:
    """`new` where `ok` (a scalar), else `old`: what a skipped step does to its state, the codecs' state included."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def differing(array: jax.Array) -> list[str]:
    """Devices whose copy of a replicated array has other bits than the first copy of the same shard; on the host."""
    first: dict[str, np.ndarray] = {}
    out = []
    for shard in array.addressable_shards:
        bits = np.asarray(shard.data)
        if bits.tobytes() != first.setdefault(str(shard.index), bits).tobytes():
            out.append(str(shard.device))
    return out
