"""What a caller gave, looked at before anything is built of it: axes, leaves, specs. All raise CodecError."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from lensjax._errors import CodecError

Axes = str | Sequence[str]


def axis_names(axes: Any, argument: str = "axis") -> tuple[str, ...]:
    """The axes that an argument names, each once."""
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple | list) or not all(isinstance(a, str) for a in names):
        raise CodecError(
            f"{argument} is {axes!r}",
            hint=f"{argument} is the name of a mesh axis, or a tuple of names: {argument}='x'",
        )
    if repeated := [a for i, a in enumerate(names) if a in names[:i]]:
        raise CodecError(f"{argument} names {repeated[0]!r} twice: {names}", hint="each axis is summed over once")
    return tuple(names)


def apart(slow: Sequence[str], fast: Sequence[str]) -> None:
    """Refuses axes that are both slow and fast."""
    if both := [a for a in fast if a in slow]:
        raise CodecError(
            f"inner names {both[0]!r}, which is a slow axis here ({', '.join(slow)}): it would be summed over twice",
            hint="inner holds the other axes that x is a partial sum over: the fast ones",
        )


def mapped_sizes(axes: Any, argument: str = "axis") -> tuple[tuple[str, int], ...]:
    """(name, size) of axes that a `jax.shard_map` around the caller maps over."""
    found = []
    for name in axis_names(axes, argument):
        try:
            found.append((name, lax.axis_size(name)))
        except NameError:
            manual = jax.sharding.get_abstract_mesh().manual_axes
            raise CodecError(
                f"{argument} names {name!r}, and "
                + (f"the shard_map here is over {', '.join(manual)}" if manual else "no shard_map is around this call"),
                hint="call it inside a jax.shard_map whose mesh has that axis; outside of one, on values stacked over "
                "the replicas, reduce_stacked and scatter_stacked sum",
            ) from None
    return tuple(found)


def mesh_axes(mesh: Any, axes: Any, argument: str = "axes") -> tuple[str, ...]:
    """The axes of a mesh that an argument names."""
    names = axis_names(axes, argument)
    for a in names:
        if a not in mesh.shape:
            raise CodecError(f"the mesh has no axis {a!r}", hint=f"axes: {', '.join(mesh.shape)}")
    return names


def either(axes: Any, axis: Any) -> Any:
    """The slow axes, given as `axes` or as `axis`."""
    if (axes is None) == (axis is None):
        found = "neither axes nor axis is given" if axes is None else f"axes is {axes!r} and axis is {axis!r}"
        raise CodecError(found, hint="name the slow axes once: axes='node', or axis='node' as in all_reduce")
    return axis if axes is None else axes


def not_mapped(mesh: Any, what: str, instead: str) -> None:
    """Refuses a call inside a `jax.shard_map` over axes of the mesh."""
    if manual := [a for a in jax.sharding.get_abstract_mesh().manual_axes if a in mesh.shape]:
        raise CodecError(
            f"{what} is called inside a shard_map over {', '.join(manual)}: it makes one of its own",
            hint=f"inside a shard_map use lensjax.comm.{instead}, or call {what} outside of it",
        )


def leaves(x: Any, what: str = "x") -> list[tuple[str, Any]]:
    """(path, array) of each leaf of a tree of arrays or ShapeDtypeStructs."""
    found = [(jax.tree_util.keystr(p, simple=True, separator="/"), v) for p, v in jax.tree.flatten_with_path(x)[0]]
    for path, v in found:
        array(v, path or what)
    return found


def totals(x: Any, members: int) -> Any:
    """The shapes of the totals of a tree of stacked values, whose first dimension is one for each of `members`
    replicas. Raises CodecError where it is not."""
    for path, v in leaves(x):
        if not v.ndim or v.shape[0] != members:
            raise CodecError(
                f"{path or 'x'} has the shape {v.shape}",
                hint=f"its first dimension is one for each of {members} replicas",
            )
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), x)


def array(v: Any, what: str) -> None:
    """Refuses what is no array of numbers."""
    if not hasattr(v, "shape") or not hasattr(v, "dtype"):
        raise CodecError(
            f"{what} is {v!r}, of the type {type(v).__name__}, and not an array",
            hint=f"jnp.asarray({what.rpartition('/')[2]}) makes one of a number; leave the rest out of the tree",
        )
    if jnp.issubdtype(v.dtype, jax.dtypes.extended):
        raise CodecError(
            f"{what} has the type {v.dtype}: PRNG keys are no numbers",
            hint="leave it out of the tree; jax.random.key_data(key) has its bits",
        )


def summable(dtype: Any, what: str) -> None:
    """Refuses types that collectives do not sum."""
    tiny = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16
    if _narrow(dtype) or tiny:
        raise CodecError(
            f"{what} has the type {_named(dtype)}, which cannot be summed between devices",
            hint="reduce gradients in 16 bits or more; XLA aborts on, or rounds, collectives in fewer",
        )


def sendable(dtype: Any, what: str) -> None:
    """Refuses types that collectives do not carry."""
    if _narrow(dtype):
        raise CodecError(
            f"{what} has the type {_named(dtype)}, which is not gathered between devices",
            hint="gather weights in 8 bits or more; XLA aborts on, or rounds, collectives in fewer",
        )


def _narrow(dtype: Any) -> bool:
    """Whether a type has less than a byte a value."""
    if dtype == jax.dtypes.float0 or dtype == jnp.bool_:
        return True
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits < 8


def _named(dtype: Any) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def dimension_of(v: Any, dimension: Any, what: str = "x") -> int:
    """A dimension of an array, counted from the front."""
    if not isinstance(dimension, int) or not -v.ndim <= dimension < v.ndim:
        has = f"dimensions 0 to {v.ndim - 1}" if v.ndim else "none: it is a scalar"
        raise CodecError(
            f"dimension is {dimension!r}, and {what} of the shape {v.shape} has {has}",
            hint="dimension is the one that the members of the axis have parts of",
        )
    return dimension % v.ndim


def specs(x: Any, spec: Any) -> list[P]:
    """A spec for each leaf of x, from a prefix of its tree."""
    is_spec = lambda s: isinstance(s, P) or plain(s)
    try:
        spread = jax.tree.map(lambda s, part: jax.tree.map(lambda _: P(*s), part), spec, x, is_leaf=is_spec)
    except (ValueError, TypeError, KeyError) as e:
        raise CodecError(
            f"spec does not fit x: spec is {spec!r}, x is {jax.tree.structure(x)}",
            hint="spec is one PartitionSpec for all leaves, or a tree of them like x (or like the top of it)",
        ) from e
    return jax.tree.leaves(spread, is_leaf=lambda s: isinstance(s, P))


def plain(spec: Any) -> bool:
    """Whether this is a spec as a plan writes it: a tuple with None, an axis or a tuple of axes for each dimension."""
    axes = lambda d: d is None or isinstance(d, str) or (type(d) is tuple and all(isinstance(a, str) for a in d))
    return type(spec) is tuple and all(axes(d) for d in spec)


def split_of(path: str, shape: Sequence[int], spec: P, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The mesh axes that split each dimension of a leaf."""
    what = path or "the value"
    if len(spec) > len(shape):
        raise CodecError(
            f"{what} of the shape {tuple(shape)} has {len(shape)} dimensions, and its spec {spec} has {len(spec)}",
            hint="spec says how the total is split, a dimension an entry; it has no entry for the replicas",
        )
    split = [() if part is None else axis_names(part, f"the spec of {what}") for part in spec]
    for a in (a for part in split for a in part):
        if a not in sizes:
            raise CodecError(
                f"{what} is split by {spec}, and the mesh has no axis {a!r}", hint=f"axes: {', '.join(sizes)}"
            )
    split += [()] * (len(shape) - len(spec))
    for d, (size, axes) in enumerate(zip(shape, split)):
        parts = math.prod(sizes[a] for a in axes)
        if size % parts:
            raise CodecError(f"{what}: {parts} shards do not divide dimension {d} of {tuple(shape)}")
    return split


def rows(state: Any, devices: int) -> Any:
    """The shapes of a state of so many devices, a row each, from that of one."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((devices, *a.shape), a.dtype), state)


def same_state(state: Any, expected: Any, maker: str) -> None:
    """Refuses a state of other shapes or types than expected (a tree of ShapeDtypeStructs)."""
    told = lambda a: f"{a.dtype}{list(a.shape)}" if hasattr(a, "shape") and hasattr(a, "dtype") else repr(a)
    found, wanted = (jax.tree.map(told, tree) for tree in (state, expected))
    if found != wanted:
        raise CodecError(
            f"the state is not this reduction's: it is {found}, expected {wanted}",
            hint=f"the codec, the mesh, the bucket size and the leaves are those that {maker} was called with",
        )
