"""How the batch lies while its shares are computed apart, and how their results become the step's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lensjax.passes.share_sizes import Sizes
from lensjax.program.status.lattice import Status


def stack(x: Any, s: Status, z: Sizes) -> Any:
    """[.., outer * N * inner, ..] -> [.., outer, groups, local, inner, ..]."""
    return x.reshape((*x.shape[: s.dim], -1, z.groups, z.local, s.inner or 1, *x.shape[s.dim + 1 :]))


def take(x: Any, d: int, start: Any, size: int) -> Any:
    """[.., outer, local, inner, ..] -> [.., outer * size * inner, ..]: one share's part; `local` stands at d."""
    x = jax.lax.dynamic_slice_in_dim(x, start, size, d) if x.shape[d] != size else x
    return x.reshape((*x.shape[: d - 1], math.prod(x.shape[d - 1 : d + 2]), *x.shape[d + 2 :]))


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
