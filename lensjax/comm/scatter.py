"""Sums of stacked values of which every replica keeps its own part: the first hop of the reduction alone.

A fully sharded optimizer needs no more: nothing travels back, half of the two hops' bytes. The total of a leaf is split
over the slow axes inside one of its dimensions, behind whatever fast axes split that dimension (P(("gpu", "node"))), so
that what a device sends is cut from its own shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax._errors import CodecError
from lensjax.comm import given
from lensjax.comm.codec import Codec, VectorCodec
from lensjax.comm.given import Axes
from lensjax.comm.group import Group, padded
from lensjax.comm.layout import BUCKET, Codecs, buckets, codec_of
from lensjax.comm.two_hop import to_owner


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Leaves that are scattered together. `leaves`: (position in the flattened tree, the dimension that the slow axes
    split, local shape of the partial value), last first."""

    codec: Codec
    group: Group
    leaves: tuple[tuple[int, int, tuple[int, ...]], ...]

    @property
    def code(self) -> VectorCodec | None:
        """None: sums in float32 or wider."""
        return self.codec if isinstance(self.codec, VectorCodec) else None

    def rows(self) -> list[int]:
        """Values of each leaf's part, with the padding that starts the next one on a block."""
        block = self.code.block if self.code else 1
        return [padded(math.prod(shape) // self.group.members, block) for _, _, shape in self.leaves]

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends over the slow axes."""
        row = sum(self.rows())
        return (self.group.members - 1) * (self.code.message_bytes(row) if self.code else 4 * row)

    def init(self) -> Mapping[str, np.ndarray]:
        """One device's first state: what it could not send."""
        if self.code is None or not self.code.feedback:
            return {}
        return {"sent": np.zeros(self.group.members * sum(self.rows()), np.float32)}

    def run(
        self, values: list[jax.Array], state: Mapping[str, Any], everywhere: tuple[str, ...]
    ) -> tuple[list[jax.Array], Mapping[str, Any]]:
        """This device's parts of the totals, inside a region that is manual over all axes (`everywhere`)."""
        members, made = self.group.members, []
        for x, (_, d, _), n in zip(values, self.leaves, self.rows()):
            rows = jnp.moveaxis(x.astype(wide(x.dtype)), d, 0).reshape(members, -1)
            made.append(jnp.pad(rows, ((0, 0), (0, n - rows.shape[1]))))
        flat = jnp.concatenate(made, 1)
        if self.code is None:
            owned = lax.psum_scatter(flat, self.group.axes, scatter_dimension=0, tiled=True)[0]
        else:
            owned, left = to_owner(flat.reshape(-1), self.code, self.group, state.get("sent"))
            if state:
                state = {"sent": kept(owned, left, state["sent"], everywhere)}
        parts, at = [], 0
        for x, (_, d, shape), n in zip(values, self.leaves, self.rows()):
            moved = (shape[d] // members, *shape[:d], *shape[d + 1 :])
            part = owned[at : at + math.prod(moved)].reshape(moved)
            parts.append(jnp.moveaxis(part, 0, d).astype(x.dtype))
            at += n
        return parts, state


def kept(owned: jax.Array, new: jax.Array, old: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The next residual: the old one where any device's sum is not finite (the step will be skipped, and an error that
    holds a NaN would never leave). One number travels for it."""
    ok = lax.pmin(jnp.isfinite(owned).all().astype(jnp.float32), axes)
    return jnp.where(ok > 0, new, old)


def behind(spec: Any, axes: tuple[str, ...]) -> int | None:
    """The dimension that a spec splits over these axes, innermost and in their order; None where there is none such."""
    for d, entry in enumerate(spec):
        names = _names(entry)
        if names[-len(axes) :] == axes:
            return d
    return None


def scatter(
    x: Any, *, mesh: Any, spec: Any, axes: Axes, codec: Codecs = "int8", bucket: int = BUCKET
) -> tuple[Scatter, ...]:
    """What a `scatter_stacked` of totals `x` sends and remembers; arguments as there (x: shapes, not stacked)."""
    sizes, names = dict(mesh.shape), given.mesh_axes(mesh, axes)
    group = Group(tuple((a, sizes[a]) for a in names))
    found, leaves = [], given.leaves(x)
    for i, ((path, v), s) in enumerate(zip(leaves, given.specs(x, spec))):
        split = given.split_of(path, v.shape, s, sizes)
        d = behind(s, names)
        if d is None:
            raise CodecError(
                f"{path or 'the value'} is split by {s}; no dimension of it is split over {', '.join(names)} innermost",
                hint="as in P(('gpu', 'node')): the fast axes first",
            )
        local = tuple(n // math.prod(sizes[a] for a in part if a not in names) for n, part in zip(v.shape, split))
        found.append((i, d, local, codec_of(path, v, codec)))
    keys = [(c, wide(v.dtype)) for (_, _, _, c), (_, v) in zip(found, leaves)]
    limits = [math.prod(shape) * 4 for _, _, shape, _ in found]
    return tuple(Scatter(keys[b[0]][0], group, tuple(found[i][:3] for i in b)) for b in buckets(keys, limits, bucket))


def scatter_stacked(
    x: Any, *, mesh: Any, spec: Any, axes: Axes, codec: Codecs = "int8", state: Any = None, bucket: int = BUCKET
) -> tuple[Any, Any]:
    """The sum over the first dimension of arrays [replica, ...] that is split over slow axes, split over these axes
    itself; returns (total, state).

    x:     a tree of arrays, each sharded P(axes, *(spec without axes)): one partial sum a replica
    spec:  PartitionSpecs of the totals, each naming `axes` last in one of its dimensions
    codec: those that are no message (PowerSGD, "exact") sum in float32
    state, bucket: as in `reduce_stacked`; the state is what `scatter_state` has the shapes of

    Every value is rounded once, by its sender. It has no derivative, except by "exact". Raises CodecError for a spec
    that cannot be cut so.
    """
    given.not_mapped(mesh, "scatter_stacked", "reduce_scatter")
    names = given.mesh_axes(mesh, axes)
    whole = given.totals(x, math.prod(mesh.shape[a] for a in names))
    made = scatter(whole, mesh=mesh, spec=spec, axes=axes, codec=codec, bucket=bucket)
    specs, treedef = given.specs(whole, spec), jax.tree.structure(x)
    devices = P(tuple(mesh.axis_names))
    rows = tuple({} for _ in made) if state is None else state
    wanted = tuple(dict(m.init()) for m in made)
    if state is None and any(wanted):
        name = next(str(m.codec) for m, w in zip(made, wanted) if w)
        raise CodecError(
            f"{name} remembers what it could not send, and no state was given",
            hint="start with zeros of the shapes of lensjax.comm.scatter_state; or feedback=0",
        )
    given.same_state(rows, given.rows(wanted, mesh.size), "scatter_state")

    def local(values: list[Any], rows: Any) -> tuple[list[Any], Any]:
        out, new = list(values), []
        for m, row in zip(made, rows):
            parts, row = m.run(
                [values[i][0] for i, _, _ in m.leaves], {k: r[0] for k, r in row.items()}, mesh.axis_names
            )
            for (i, _, _), part in zip(m.leaves, parts):
                out[i] = part
            new.append({k: r[None] for k, r in row.items()})
        return out, tuple(new)

    stacked = [P(names, *(_without(entry, names) for entry in s)) for s in specs]
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(stacked, devices), out_specs=(specs, devices), check_vma=False
    )  # fmt: skip
    out, rows = run(jax.tree.leaves(x), rows)
    return jax.tree.unflatten(treedef, out), state if state is None else rows


def scatter_state(x: Any, *, mesh: Any, spec: Any, axes: Axes, codec: Codecs = "int8", bucket: int = BUCKET) -> Any:
    """The state of a `scatter_stacked` as ShapeDtypeStructs with shardings: a dictionary a bucket of arrays
    [devices, n]; arguments as in `scatter`."""
    made = scatter(x, mesh=mesh, spec=spec, axes=axes, codec=codec, bucket=bucket)
    sharding = NamedSharding(mesh, P(tuple(mesh.axis_names)))
    shape = lambda a: jax.ShapeDtypeStruct((mesh.size, *a.shape), a.dtype, sharding=sharding)
    return tuple(jax.tree.map(shape, dict(s.init())) for s in made)


def wide(dtype: Any) -> Any:
    """The type in which values of this one are summed."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(dtype)


def _without(entry: Any, axes: tuple[str, ...]) -> Any:
    return tuple(a for a in _names(entry) if a not in axes) or None


def _names(entry: Any) -> tuple[str, ...]:
    """The axes in an entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
