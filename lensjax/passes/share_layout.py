"""How the batch lies while its shares are computed apart, and how their results become the step's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lensjax.passes.shardings import batch_axes
from lensjax.passes.share_sizes import Sizes
from lensjax.plan.plan import Plan, Spec
from lensjax.program.status.lattice import Status

SMALL = 64 * 1024  # bytes of float32: below, cutting a value up costs more latency than it saves bytes


def stack(x: Any, s: Status, z: Sizes) -> Any:
    """[.., outer * N * inner, ..] -> [.., outer, groups, local, inner, ..]."""
    return x.reshape((*x.shape[: s.dim], -1, z.groups, z.local, s.inner or 1, *x.shape[s.dim + 1 :]))


def take(x: Any, d: int, start: Any, size: int) -> Any:
    """[.., outer, local, inner, ..] -> [.., outer * size * inner, ..]: one share's part; `local` stands at d."""
    x = jax.lax.dynamic_slice_in_dim(x, start, size, d) if x.shape[d] != size else x
    return x.reshape((*x.shape[: d - 1], math.prod(x.shape[d - 1 : d + 2]), *x.shape[d + 2 :]))


def own(x: Any, mesh: Any, axes: tuple[str, ...]) -> Any:
    """[groups, ..], the same in every group and split over `axes` -> [..]. Each device takes the row of its group: the
    first row for all, which is the same, would be sent to the others."""
    if not axes:
        return x[0]
    row = jax.shard_map(
        lambda x: x[0],
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
        check_vma=False,
    )
    return row(x)


def join(pieces: Sequence[Any], s: Status, z: Sizes) -> Any:
    """Results of all shares, [shares, groups, .., outer * size * inner, ..] for each size of share, as the step's:
    [.., outer * N * inner, ..]."""
    d, found = s.dim, []
    for x, size in zip(pieces, (z.share, z.rest) if z.full else (z.rest,)):
        length = x.shape[2 + d]
        inner = s.inner if s.inner is not None else length // (size * z.outer)
        outer = length // (size * inner)
        x = x.reshape((*x.shape[: 2 + d], outer, size, inner, *x.shape[3 + d :]))
        x = jnp.moveaxis(x, (1, 0), (d + 1, d + 2))  # [.., outer, groups, shares, size, inner, ..]
        found.append(x.reshape((*x.shape[: d + 2], -1, *x.shape[d + 4 :])))
    x = found[0] if len(found) == 1 else jnp.concatenate(found, d + 2)
    return x.reshape((*x.shape[:d], math.prod(x.shape[d : d + 4]), *x.shape[d + 4 :]))


def without(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """`spec` as it is along the other axes."""
    return tuple(tuple(a for a in entry if a not in axes) for entry in spec)


def spread(plan: Plan, z: Sizes, shape: tuple[int, ...], spec: Spec) -> Spec:
    """`spec` with the fast axes of the batch added that it does not name, each where the largest part is left to cut:
    a sum over them is then scattered, and slower axes move parts."""
    if 4 * math.prod(shape) < SMALL:
        return spec
    sizes, entries = plan.mesh.shape, list(spec)
    for axis in batch_axes(plan):
        if axis in z.slow or sizes[axis] == 1 or any(axis in axes for axes in entries):
            continue
        left = [n // math.prod(sizes[a] for a in axes) for n, axes in zip(shape, entries)]
        if fits := [d for d, n in enumerate(left) if n % sizes[axis] == 0]:
            d = max(fits, key=lambda d: (left[d], d))
            entries[d] = (*entries[d], axis)
    return tuple(entries)
