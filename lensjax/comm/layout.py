"""What a reduction does, worked out from shapes alone: its buckets, the bytes it sends, the state it keeps."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lensjax._errors import CodecError
from lensjax.comm.codec import Codec, Exact, Shape
from lensjax.comm.given import summable
from lensjax.comm.group import Group
from lensjax.comm.policy import Policy
from lensjax.comm.registry import parse_codec as parse

BUCKET = 32 * 2**20
# What says how each leaf is reduced: one codec for all, or a function of its path ("decoder/kernel") and its shape.
Codecs = str | Codec | Callable[[str, jax.ShapeDtypeStruct], "str | Codec"]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that travel together over a group, and the type that their sums are kept in.

    leaves: positions in the flattened tree, last first
    shapes: one device's shards of them
    """

    codec: Codec
    dtype: Any
    group: Group
    leaves: tuple[int, ...]
    shapes: tuple[Shape, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends over the slow axes, per reduction."""
        return self.codec.wire_bytes(self.shapes, self.group, *self._itemsize())

    @property
    def fast_bytes(self) -> Mapping[str, int]:
        """Bytes that one device sends along each fast axis, per reduction."""
        return self.codec.fast_bytes(self.shapes, self.group, *self._itemsize())

    def _itemsize(self) -> tuple[int, ...]:
        return (jnp.dtype(self.dtype).itemsize,) if isinstance(self.codec, Exact) else ()

    def init(self) -> Mapping[str, np.ndarray]:
        """One device's first state."""
        return self.codec.init(self.shapes, self.group)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A reduction of the leaves of a tree: what is sent together, how, and what is remembered."""

    buckets: tuple[Bucket, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends over the slow axes, per reduction (ring factors included)."""
        return sum(b.wire_bytes for b in self.buckets)

    @property
    def fast_bytes(self) -> Mapping[str, int]:
        """Bytes that one device sends along each fast axis, per reduction."""
        total: collections.Counter[str] = collections.Counter()
        for b in self.buckets:
            total.update(b.fast_bytes)
        return dict(total)

    def init(self) -> tuple[Mapping[str, np.ndarray], ...]:
        """One device's first state, a dictionary a bucket."""
        return tuple(b.init() for b in self.buckets)


def buckets(keys: Sequence[Hashable], sizes: Sequence[int], limit: int = BUCKET) -> tuple[tuple[int, ...], ...]:
    """Positions of leaves, grouped into buckets of equal keys and at most `limit` bytes, last leaves first.

    The backward pass finishes with the first layers, so the last leaves are ready first. A leaf larger than the limit
    has a bucket of its own. `sizes`: bytes.
    """
    done: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for i in reversed(range(len(keys))):
        bucket, used = open_.get(keys[i], ([], 0))
        if bucket and used + sizes[i] > limit:
            bucket, used = [], 0
        if not bucket:
            done.append(bucket)
        bucket.append(i)
        open_[keys[i]] = bucket, used + sizes[i]
    return tuple(tuple(b) for b in done)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf to be reduced: its path, its whole shape and type, one device's shard of it, and who sums it."""

    path: str
    whole: jax.ShapeDtypeStruct
    local: Shape
    group: Group


def layout(leaves: Sequence[Leaf], codecs: Codecs = "int8", limit: int = BUCKET) -> Layout:
    """The buckets of leaves: equal codec, type and group, at most `limit` bytes of float32.

    A codec that cannot take a leaf leaves it to an exact sum; so is what is not a real floating point number. Empty
    leaves are in no bucket. Raises CodecError for types that cannot be summed or sent.
    """
    if limit < 1:
        raise CodecError(f"buckets of {limit} bytes", hint="a bucket is at least one byte; the default is 32 MiB")
    if isinstance(codecs, Policy) and any(leaf.path for leaf in leaves):
        codecs.check([leaf.path for leaf in leaves])
    full = [(i, leaf) for i, leaf in enumerate(leaves) if math.prod(leaf.local)]
    keys = [(_codec(leaf, codecs), jnp.dtype(leaf.whole.dtype), leaf.group) for _, leaf in full]
    sizes = [math.prod(leaf.local) * max(4, key[1].itemsize) for (_, leaf), key in zip(full, keys)]
    made = []
    for positions in buckets(keys, sizes, limit):
        codec, dtype, group = keys[positions[0]]
        which, shapes = tuple(full[p][0] for p in positions), tuple(full[p][1].local for p in positions)
        made.append(Bucket(codec, codec.working_dtype(dtype), group, which, shapes))
    return Layout(tuple(made))


def codec_of(path: str, whole: jax.ShapeDtypeStruct, codecs: Codecs) -> Codec:
    """The codec that a leaf was given; exact for what is no floating point number. Raises CodecError for types that
    cannot be summed."""
    summable(whole.dtype, path or "the value")
    fixed: Any = codecs
    made = parse(fixed if isinstance(codecs, str | Codec | type) or not callable(codecs) else codecs(path, whole))
    return made if jnp.issubdtype(whole.dtype, jnp.floating) else Exact()


def _codec(leaf: Leaf, codecs: Codecs) -> Codec:
    made = codec_of(leaf.path, leaf.whole, codecs)
    return made if made.takes(leaf.local) else Exact()
