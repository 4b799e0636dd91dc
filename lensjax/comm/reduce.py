"""Summing gradients over slow links: by hand inside a `shard_map`, or of values stacked over the replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax._errors import CodecError
from lensjax.comm import given
from lensjax.comm.codec import Exact
from lensjax.comm.derivative import no_derivative
from lensjax.comm.given import Axes
from lensjax.comm.group import Group
from lensjax.comm.layout import BUCKET, Bucket, Codecs, Layout, Leaf, layout


def all_reduce(
    x: Any, axis: Axes, *, codec: Codecs = "int8", inner: Axes = (), state: Any = None, bucket: int = BUCKET
) -> tuple[Any, Any]:
    """The sum of a tree of arrays over mesh axes, inside a fully manual `jax.shard_map`; returns (total, state).

    axis:   the slow axis, or several whose product is one group: the only ones that codes cross
    codec:  a codec, its name ("int8:256", "exact"), or a function (path, shape) -> codec such as `Policy()`
    inner:  fast axes over which x is a partial sum too, innermost first: summed in full precision, before (each member
            keeps a part) and gathered after, so that 1/size of the bytes crosses the slow axis per device
    state:  of codecs with memory: the local part of what `init_state` made ([1, n] a leaf); None for the others
    bucket: bytes (of float32) that travel together

    Every replica gets the same bits. A NaN or an infinity in any replica is non-finite on all of them, and then the
    state of its bucket stays as it was. Sums are kept in float32 (float64 only by "exact"), results have x's types:
    a float64 beyond float32's range is an infinity to any other codec, and its total not finite. Integers and complex
    numbers are summed exactly, whatever the codec.
    It is for gradients, and has no derivative itself: differentiating through it raises CodecError ("exact" has one,
    that of `jax.lax.psum`).
    Under `check_vma=True` differentiate with respect to parameters that vary over the axes (`lax.pcast`): the gradient
    of a replicated one is summed already, and this would multiply it by the number of replicas.
    Raises CodecError for unknown codecs and axes, axes that are both slow and fast, a missing or foreign state, what is
    no array, and types that cannot be summed.
    """
    group = Group(given.mapped_sizes(axis), given.mapped_sizes(inner, "inner"))
    given.apart(group.axes, [a for a, _ in group.fast])
    leaves = [Leaf(path, _struct(v), v.shape, group) for path, v in given.leaves(x)]
    return _run(x, layout(leaves, codec, bucket), state)


def reduce_stacked(
    x: Any, *, mesh: Any, spec: Any, axes: Axes, codec: Codecs = "int8", inner: Axes = (), state: Any = None,
    bucket: int = BUCKET,
) -> tuple[Any, Any]:  # fmt: skip
    """The sum over the first dimension of arrays [replica, ...] that is split over slow axes; returns (total, state).

    x:      a tree of arrays, each sharded P(axes, *spec): one partial sum a replica
    mesh:   the mesh (every axis is manual in here: each device sends its own shard, nothing is gathered first)
    spec:   a PartitionSpec of the total (or a plan's tuple of tuples), or a tree of them (a prefix of x's tree)
    axes:   the slow axis or axes; x.shape[0] is the product of their sizes
    inner:  fast axes, innermost first. Where a leaf is the same on all of them (its spec does not name them) each
            member sends a part of it, and the parts are gathered in full precision.
    codec, state, bucket: as in `all_reduce`; the state is what `init_state` made with the same arguments

    Returns totals sharded by `spec`, the same bits on every replica. Not inside a `jax.shard_map`: `all_reduce` is for
    there. Like it this has no derivative.
    """
    given.not_mapped(mesh, "reduce_stacked", "all_reduce")
    names = given.mesh_axes(mesh, axes)
    whole = given.totals(x, math.prod(mesh.shape[a] for a in names))
    made = reduction(whole, mesh=mesh, spec=spec, axes=axes, inner=inner, codec=codec, bucket=bucket)
    if state is not None:
        given.same_state(state, given.rows(made.init(), mesh.size), "init_state")
    specs = given.specs(whole, spec)
    devices = P(tuple(mesh.axis_names))
    treedef = jax.tree.structure(x)
    stacked = jax.tree.unflatten(treedef, [P(names, *s) for s in specs])

    def local(x: Any, state: Any) -> tuple[Any, Any]:
        return _run(jax.tree.map(lambda v: v[0], x), made, state)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(stacked, devices), out_specs=(jax.tree.unflatten(treedef, specs), devices),
        check_vma=False,
    )  # fmt: skip
    return run(x, state)


def reduction(
    x: Any, *, mesh: Any, spec: Any, axes: Axes | None = None, codec: Codecs = "int8", inner: Axes = (),
    bucket: int = BUCKET, partial: bool = False, axis: Axes | None = None,
) -> Layout:  # fmt: skip
    """What a reduction of the tree `x` (of arrays or ShapeDtypeStructs: totals, not stacked) sends and remembers.

    The other arguments are those of `reduce_stacked`; `axes` may be called `axis`, as in `all_reduce`. With
    `partial=True` it describes an `all_reduce` by hand, where x is a partial sum over `inner` too (`spec`: how
    one replica's values are split over the other axes). Raises CodecError.
    """
    sizes = dict(mesh.shape)
    names, fast = given.mesh_axes(mesh, given.either(axes, axis)), given.mesh_axes(mesh, inner, "inner")
    given.apart(names, fast)
    leaves = []
    for (path, v), s in zip(given.leaves(x), given.specs(x, spec)):
        split = given.split_of(path, v.shape, s, sizes)
        used = {a for part in split for a in part}
        if clash := used & set(names) or (used & set(fast) if partial else set()):
            raise CodecError(
                f"{path or 'the value'} is split by {s}, which names {', '.join(sorted(clash))}: it is summed over it",
                hint="a total that is split over its replicas is a reduce-scatter (lensjax.comm.reduce_scatter)",
            )
        local = tuple(n // math.prod(sizes[a] for a in part) for n, part in zip(v.shape, split))
        group = Group(
            tuple((a, sizes[a]) for a in names), tuple((a, sizes[a]) for a in fast if a not in used), not partial
        )
        leaves.append(Leaf(path, _struct(v), local, group))
    return layout(leaves, codec, bucket)


def state_shapes(
    x: Any, *, mesh: Any, spec: Any, axes: Axes | None = None, codec: Codecs = "int8", inner: Axes = (),
    bucket: int = BUCKET, partial: bool = False, axis: Axes | None = None,
) -> Any:  # fmt: skip
    """The state of a reduction as ShapeDtypeStructs with shardings, for checkpoints; arguments as in `reduction`.

    A tuple with a dictionary for each bucket (empty for a codec without memory), of arrays [devices, n] split over all
    axes of the mesh: each device has a row of its own.
    """
    how = dict(spec=spec, axes=axes, codec=codec, inner=inner, bucket=bucket, partial=partial, axis=axis)
    made, sharding = reduction(x, mesh=mesh, **how), NamedSharding(mesh, P(tuple(mesh.axis_names)))
    shape = lambda a: jax.ShapeDtypeStruct((mesh.size, *a.shape), a.dtype, sharding=sharding)
    return jax.tree.map(shape, made.init())


def init_state(
    x: Any, *, mesh: Any, spec: Any, axes: Axes | None = None, codec: Codecs = "int8", inner: Axes = (),
    bucket: int = BUCKET, partial: bool = False, axis: Axes | None = None,
) -> Any:  # fmt: skip
    """The first state of a reduction, sharded from birth; arguments as in `reduction`."""
    how = dict(spec=spec, axes=axes, codec=codec, inner=inner, bucket=bucket, partial=partial, axis=axis)
    made = reduction(x, mesh=mesh, **how).init()
    sharding = NamedSharding(mesh, P(tuple(mesh.axis_names)))

    def rows(a: Any) -> jax.Array:
        shape = (mesh.size, *a.shape)
        return jax.make_array_from_callback(shape, sharding, lambda index: np.broadcast_to(a, shape)[index])

    return jax.tree.map(rows, made)


def wire_bytes(
    x: Any, *, mesh: Any, spec: Any, axes: Axes | None = None, codec: Codecs = "int8", inner: Axes = (),
    bucket: int = BUCKET, partial: bool = False, axis: Axes | None = None,
) -> int:  # fmt: skip
    """Bytes that one device sends over the slow axes per reduction; arguments as in `reduction`."""
    how = dict(spec=spec, axes=axes, codec=codec, inner=inner, bucket=bucket, partial=partial, axis=axis)
    return reduction(x, mesh=mesh, **how).wire_bytes


def _run(x: Any, made: Layout, state: Any) -> tuple[Any, Any]:
    """The reduction itself, in a fully manual region."""
    leaves, treedef = jax.tree.flatten(x)
    out = [jnp.zeros_like(v) if not v.size else v for v in leaves]
    rows = _local_state(made, state)
    new = []
    for bucket, row in zip(made.buckets, rows):
        values = [leaves[i].astype(bucket.dtype) for i in bucket.leaves]
        totals, row = _reduced(bucket, values, row)
        for i, total in zip(bucket.leaves, totals):
            out[i] = total.astype(leaves[i].dtype)
        new.append({name: a[None] for name, a in row.items()})
    total = jax.tree.unflatten(treedef, out)
    return total, state if state is None else tuple(new)


def _reduced(bucket: Bucket, values: list[jax.Array], row: Mapping[str, Any]) -> tuple[list[jax.Array], Any]:
    run = lambda values, row: bucket.codec.reduce(values, bucket.group, row)
    return (run if isinstance(bucket.codec, Exact) else no_derivative(run, bucket.codec))(values, row)


def _local_state(made: Layout, state: Any) -> list[dict[str, jax.Array]]:
    wanted = made.init()
    if state is None:
        if any(wanted):
            name = next(str(b.codec) for b, w in zip(made.buckets, wanted) if w)
            raise CodecError(
                f"{name} remembers what it could not send, and no state was given",
                hint="state = lensjax.comm.init_state(shapes, mesh=..., spec=..., axes=..., codec=...); or feedback=0",
            )
        return [{} for _ in wanted]
    given.same_state(state, given.rows(made.init(), 1), "init_state")
    return [{name: a[0] for name, a in row.items()} for row in state]


def _struct(v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.shape, v.dtype)
