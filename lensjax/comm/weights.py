"""Weights that are split over slow links: gathered in few bytes, their gradients reduce-scattered.

ZeRO++ (Wang et al., arXiv:2306.10209) has three parts, all functions to be used inside a fully manual `shard_map`:
  qwZ  `gather_weight(w, axis, codec="int8")`: codes are gathered, not weights
  hpZ  `secondary_copy(w, slow)` then `gather_weight(copy, fast)`: the copy is split inside the node, so that a backward
       pass that gathers again does so inside the node only
  qgZ  `gradient="int4"`: the transpose of the gather is a reduce-scatter with a codec (exact unless one is named)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lensjax._errors import CodecError
from lensjax.comm import given
from lensjax.comm.codec import Codec, VectorCodec
from lensjax.comm.given import Axes
from lensjax.comm.group import Group, padded
from lensjax.comm.registry import parse_codec as parse
from lensjax.comm.scatter import kept, wide
from lensjax.comm.two_hop import coded, to_owner

# What `secondary_copy` gathered, by this name: jax.checkpoint_policies.save_only_these_names(SECONDARY) keeps it.
SECONDARY = "lensjax.secondary_copy"


def all_gather(x: jax.Array, axis: Axes, *, dimension: int = 0, codec: str | Codec = "int8") -> jax.Array:
    """x from all members of the axis, one after the other along `dimension`, each coded once by its owner.

    Off by the codec's `error_bound`; the same bits on every member, the owner included. Codes have no derivative: see
    `gather_weight`. Integers and complex numbers are gathered as they are.
    """
    return _gather(x, *_gatherable(x, axis, dimension, codec), "")


def reduce_scatter(
    x: jax.Array, axis: Axes, *, dimension: int = 0, codec: str | Codec = "int8", residual: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The sum over the members of the axis, each keeping its part of `dimension`; returns (part, residual).

    The first hop of the two-hop reduction alone: each value is rounded once by its sender, and summed in float32.
    `residual` (float32 zeros of `residual_size` at first) carries the codec's `feedback` from step to step. Integers
    and complex numbers are summed exactly, whatever the codec; a float64 beyond float32's range is not finite in any
    but "exact". It has no derivative, except by "exact".
    Raises CodecError for a codec with feedback without a residual, and for types that cannot be summed.
    """
    given.array(x, "x")
    given.summable(x.dtype, "x")
    dimension, group = given.dimension_of(x, dimension), Group(given.mapped_sizes(axis))
    made, members = _message_of(x, codec), group.members
    if x.shape[dimension] % members:
        raise CodecError(f"{members} members do not divide dimension {dimension} of {x.shape}")
    if made is not None and made.feedback and members > 1 and residual is None:
        raise CodecError(
            f"{made} remembers what it could not send, and no residual was given",
            hint="residual = jnp.zeros(lensjax.comm.residual_size(x.shape, members, codec)) at first; or feedback=0",
        )
    return _scatter(x, group, dimension, made, residual)


def _scatter(
    x: jax.Array, group: Group, dimension: int, made: VectorCodec | None, residual: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    members = group.members
    if made is None or members == 1:
        v = x.astype(wide(x.dtype))
        for name in group.axes:
            v = lax.psum_scatter(v, name, scatter_dimension=dimension, tiled=True)
        return v.astype(x.dtype), residual
    moved = jnp.moveaxis(x, dimension, 0)
    shape = (moved.shape[0] // members, *moved.shape[1:])
    rows = moved.reshape(members, -1).astype(jnp.float32)
    size = rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, padded(size, made.block) - size)))
    if residual is not None and (residual.shape, residual.dtype) != ((rows.size,), jnp.float32):
        raise CodecError(
            f"a residual of shape {residual.shape} and type {residual.dtype}",
            hint=f"this reduction's has the shape ({rows.size},) and the type float32",
        )
    owned, new = to_owner(rows.reshape(-1), made, group, residual)
    part = jnp.moveaxis(owned[:size].reshape(shape), 0, dimension).astype(x.dtype)
    return part, None if residual is None else kept(owned, new, residual, group.axes)


def residual_size(shape: Sequence[int], members: int, codec: str | Codec) -> int:
    """Numbers in the residual of a `reduce_scatter` of an array of this (local) shape."""
    made = _message(codec)
    return members * padded(math.prod(shape) // members, made.block) if made else 0


def gather_weight(
    shard: jax.Array, axis: Axes, *, dimension: int = 0, codec: str | Codec = "int8", gradient: str | Codec = "exact"
) -> jax.Array:
    """The weight whose shards along `dimension` are on the members of `axis`, gathered as codes.

    Its gradient is the reduce-scatter of the cotangent (straight through the rounding), exact or by the codec
    `gradient`, which keeps no residual here. Integers and complex numbers are gathered as they are, and their gradients
    summed exactly. Raises CodecError for a scalar, and for booleans and what is narrower than a byte.
    """
    return _gathered(shard, *_gatherable(shard, axis, dimension, codec), _plain(shard, gradient), "")


def secondary_copy(
    shard: jax.Array, slow: Axes, *, dimension: int = 0, codec: str | Codec = "int8", gradient: str | Codec = "exact"
) -> jax.Array:
    """The weight gathered over the slow axis alone: what is left is split over the fast axis, inside the node.

    The weight is split P((fast, slow)) along `dimension`, fast major. `gather_weight(copy, fast)` makes it whole.
    Made outside a `jax.checkpoint`, or inside one whose policy keeps the name SECONDARY, the codes of the copy stay in
    memory from forward to backward and no weight crosses the slow axis twice.
    """
    return _gathered(shard, *_gatherable(shard, slow, dimension, codec, "slow"), _plain(shard, gradient), SECONDARY)


def gather_bytes(size: int, members: int, codec: str | Codec, itemsize: int = 4) -> int:
    """Bytes that a device sends when shards of `size` numbers are gathered. `itemsize`: of the numbers, for "exact"."""
    made = _message(codec)
    return (members - 1) * (made.message_bytes(padded(size, made.block)) if made else size * itemsize)


def scatter_bytes(size: int, members: int, codec: str | Codec) -> int:
    """Bytes that a device sends when `size` numbers are reduce-scattered (float32 for "exact")."""
    made, row = _message(codec), size // members
    return (members - 1) * (made.message_bytes(padded(row, made.block)) if made else row * 4)


def _message(codec: str | Codec) -> VectorCodec | None:
    """The codec of one message; None for exact."""
    made = parse(codec)
    if made == parse("exact"):
        return None
    if not isinstance(made, VectorCodec):
        raise CodecError(f"{made.name} is not a code of one message", hint="int8, int4, fp8, bf16 or exact")
    return made


def _message_of(x: jax.Array, codec: str | Codec) -> VectorCodec | None:
    """The codec of an array's message; None where it travels as it is."""
    made = _message(codec)
    return made if jnp.issubdtype(x.dtype, jnp.floating) else None


def _gatherable(
    x: jax.Array, axis: Axes, dimension: int, codec: str | Codec, argument: str = "axis"
) -> tuple[tuple[str, ...], int, VectorCodec | None]:
    """(axes, dimension, codec) of a gather, looked at."""
    given.array(x, "the shard")
    given.sendable(x.dtype, "the shard")
    axes = tuple(a for a, _ in given.mapped_sizes(axis, argument))
    return axes, given.dimension_of(x, dimension, "a shard"), _message_of(x, codec)


def _plain(x: jax.Array, codec: str | Codec) -> VectorCodec | None:
    """The codec without feedback."""
    made = _message_of(x, codec)
    known = {f.name for f in dataclasses.fields(made)} if made and dataclasses.is_dataclass(made) else ()
    return dataclasses.replace(made, feedback=0.0) if made and "feedback" in known else made  # pyright: ignore


def _gather(x: jax.Array, axes: tuple[str, ...], dimension: int, codec: VectorCodec | None, name: str) -> jax.Array:
    members = math.prod(lax.axis_size(a) for a in axes)
    if members == 1:
        return x
    moved = jnp.moveaxis(x, dimension, 0)
    if codec is None:
        whole = checkpoint_name(lax.all_gather(moved, axes, axis=0), name)
    else:
        flat = moved.reshape(-1).astype(jnp.float32)
        message = coded(jnp.pad(flat, (0, padded(flat.size, codec.block) - flat.size)), codec)
        message = lax.optimization_barrier(message)
        codes = checkpoint_name(lax.optimization_barrier(lax.all_gather(message, axes, axis=0)), name)
        whole = codec.decode(codes)[:, : flat.size].astype(x.dtype)
    return jnp.moveaxis(whole.reshape(members * moved.shape[0], *moved.shape[1:]), 0, dimension)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _gathered(shard, axes, dimension, codec, gradient, name):
    return _gather(shard, axes, dimension, codec, name)


def _forward(shard, axes, dimension, codec, gradient, name):
    return _gather(shard, axes, dimension, codec, name), None


def _backward(axes, dimension, codec, gradient, name, _, cotangent):
    return (_scatter(cotangent, Group(given.mapped_sizes(axes)), dimension, gradient)[0],)


_gathered.defvjp(_forward, _backward)
