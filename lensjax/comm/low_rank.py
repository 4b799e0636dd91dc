"""PowerSGD: a gradient matrix is sent as two thin factors (Vogels et al., arXiv:1905.13727, algorithms 1 and 2).

One step of power iteration from the last step's factor (warm start), the factors summed exactly, and the error kept
for the next step (feedback). The factors are the same on every replica, bit for bit, since they come from totals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lensjax._errors import CodecError
from lensjax.comm.codec import EPS, TINY, Codec, Shape, State, split
from lensjax.comm.group import Group, padded
from lensjax.comm.scales import largest
from lensjax.comm.two_hop import keep

_FULL = lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class PowerSGD(Codec):
    """Rank-`rank` factors in float32. "powersgd:4", "powersgd:16:feedback=off", "powersgd:8:stacked=1".

    A leaf is a matrix: its first `stacked` dimensions count matrices (layers that are scanned over), the others are
    split in two where the factors are smallest. Leaves that would not become `least` times smaller are reduced exactly.
    There is no useful bound in advance: the error is the part of the total outside the factors' space, at most the norm
    of the total itself. Use exact sums for the first hundred steps or so; low ranks suit SGD with momentum better than
    Adam.
    """

    name: ClassVar[str] = "powersgd"
    precision: ClassVar[str] = "what is outside of the rank, which is sent later"
    rank: int = 4
    feedback: bool = True
    stacked: int = 0
    least: float = 2.0

    def __post_init__(self):
        if self.rank < 1 or self.stacked < 0 or self.least < 1:
            raise CodecError(
                f"powersgd: rank {self.rank}, stacked {self.stacked}, least {self.least}",
                hint="rank is at least 1, stacked at least 0, least at least 1",
            )

    def matrix(self, shape: Shape) -> tuple[int, int, int]:
        """(matrices, rows, columns) that a leaf is taken for; rows + columns is smallest."""
        count, rest = math.prod(shape[: self.stacked]), shape[self.stacked :]
        pairs = [(math.prod(rest[:i]), math.prod(rest[i:])) for i in range(1, len(rest))] or [(math.prod(rest), 1)]
        return (count, *min(pairs, key=sum))

    def takes(self, shape: Shape) -> bool:
        _, rows, columns = self.matrix(shape)
        fits = self.rank <= min(rows, columns)
        return fits and rows * columns >= self.least * self.rank * (rows + columns)

    def reduce(self, leaves: Sequence[jax.Array], group: Group, state: State) -> tuple[list[jax.Array], State]:
        sizes = [self.matrix(x.shape) for x in leaves]
        given = jnp.concatenate([x.reshape(-1) for x in leaves])
        if group.members == 1:
            return split(group.exact(given), [x.shape for x in leaves], 1), state
        wanted = given + state["residual"] if self.feedback else given
        matrices = split(wanted, sizes, 1)
        old = split(state["right"], [(c, n, self.rank) for c, _, n in sizes], 1)
        # A direction that caught nothing (or the first state) is zero, and would never catch anything again.
        old = [jnp.where(largest(q, 1, keepdims=True) > TINY, _unit(q), _start(q.shape)) for q in old]
        left = [jnp.matmul(m, q, precision=_FULL) for m, q in zip(matrices, old)]
        left = [orthonormal(p) for p in _exact(left, group)]
        right = [_transposed(m, p) for m, p in zip(matrices, left)]
        right = _exact(right, group)
        totals = [jnp.matmul(p, q.swapaxes(1, 2), precision=_FULL) for p, q in zip(left, right)]
        total = jnp.concatenate([t.reshape(-1) for t in totals])
        new = {"right": jnp.concatenate([q.reshape(-1) for q in right])}
        if self.feedback:
            new["residual"] = wanted - total / group.replicas
        return split(total, [x.shape for x in leaves], 1), keep(jnp.isfinite(total).all(), new, state)

    def _factors(self, shapes: Sequence[Shape]) -> tuple[int, int]:
        sizes = [self.matrix(s) for s in shapes]
        return sum(c * m for c, m, _ in sizes) * self.rank, sum(c * n for c, _, n in sizes) * self.rank

    def wire_bytes(self, shapes: Sequence[Shape], group: Group) -> int:
        return sum(group.exact_bytes(size, 4) for size in self._factors(shapes))

    def fast_bytes(self, shapes: Sequence[Shape], group: Group) -> Mapping[str, int]:
        sent = self._factors(shapes) if group.members > 1 else [sum(math.prod(s) for s in shapes)]
        both = [group.fast_bytes(padded(n, group.parts * group.members), 4) for n in sent]
        return {name: sum(b[name] for b in both) for name, _ in group.fast}

    def init(self, shapes: Sequence[Shape], group: Group) -> Mapping[str, np.ndarray]:
        if group.members == 1:
            return {}
        right = np.zeros(self._factors(shapes)[1], np.float32)
        residual = np.zeros(sum(math.prod(s) for s in shapes), np.float32)
        return {"right": right, "residual": residual} if self.feedback else {"right": right}

    def reduction_error(self, stack: jax.Array) -> jax.Array:
        total = stack.astype(jnp.float32).sum(0)
        top = jnp.abs(stack).max(initial=TINY)
        norm = top * jnp.sqrt(jnp.square(total / top).sum())
        rounding = 64 * EPS * total.size * len(stack) * top
        return jnp.broadcast_to(norm + rounding, total.shape)


def _exact(matrices: Sequence[jax.Array], group: Group) -> list[jax.Array]:
    return split(group.exact(jnp.concatenate([m.reshape(-1) for m in matrices])), [m.shape for m in matrices], 1)


def _transposed(m: jax.Array, p: jax.Array) -> jax.Array:
    """Each matrix of m, transposed, times that of p: [count, columns, rank]."""

    def one_by_one(m: jax.Array, p: jax.Array) -> jax.Array:
        return lax.map(lambda x: jnp.matmul(x[1].T, x[0], precision=_FULL), (m, p)).swapaxes(1, 2)

    def batched(m: jax.Array, p: jax.Array) -> jax.Array:
        return jnp.matmul(m.swapaxes(1, 2), p, precision=_FULL)

    # XLA:CPU has no fast kernel for the batched one: it takes twenty times as long as each by itself.
    return lax.platform_dependent(m, p, cpu=one_by_one, default=batched)


def _unit(q: jax.Array) -> jax.Array:
    """The columns at length one: the factor carries the gradient's size, and its square would leave float32."""
    q = q / jnp.maximum(largest(q, 1, keepdims=True), TINY)
    return q / jnp.maximum(jnp.sqrt(jnp.square(q).sum(1, keepdims=True)), TINY)


def _start(shape: Shape) -> jax.Array:
    """Fixed numbers in [-1, 1) without a pattern, the same everywhere (the finaliser of MurmurHash3)."""
    bits = lax.iota(jnp.uint32, math.prod(shape)) + jnp.uint32(1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return (bits.astype(jnp.float32) * 2.0**-31 - 1).reshape(shape)


def orthonormal(p: jax.Array) -> jax.Array:
    """Orthonormal columns with the span of p, [count, rows, rank]; a column inside the others' span becomes zero.

    Gram-Schmidt, each column twice ("twice is enough", Giraud et al. 2005): no LAPACK, the same bits on every replica.
    """
    p = p / jnp.maximum(largest(p, (1, 2), keepdims=True), TINY)

    def column(j: jax.Array, basis: jax.Array) -> jax.Array:
        v = given = lax.dynamic_slice_in_dim(p, j, 1, axis=2)
        for _ in range(2):
            inside = jnp.matmul(basis.swapaxes(1, 2), v, precision=_FULL)
            v = v - jnp.matmul(basis, inside, precision=_FULL)
        length, before = (jnp.sqrt(jnp.square(x).sum(1, keepdims=True)) for x in (v, given))
        # Below rounding the direction is noise. Written so that a NaN stays one.
        v = jnp.where(length <= 4 * EPS * before, 0.0, v / jnp.maximum(length, TINY))
        return lax.dynamic_update_slice_in_dim(basis, v, j, axis=2)

    return lax.fori_loop(0, p.shape[2], column, p * 0)
