"""Who sums with whom, inside a fully manual region: the slow axes, and the fast axes between which a value is parted.

The hierarchy is in `scatter` and `gather`: each member of the fast axes takes its own part of a vector (a sum in full
precision where the members hold partial sums), sends only that part over the slow axes, and the parts are put together
again. BlueConnect (Cho et al., MLSys 2019) has the decomposition; one collective an axis, innermost first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Group:
    """slow:  (axis, size), outermost first: each replica over them holds a partial sum
    fast:  (axis, size), innermost first: the axes between which a vector is parted
    whole: True where all members of the fast axes hold the same values, False where they hold partial sums too
    """

    slow: tuple[tuple[str, int], ...]
    fast: tuple[tuple[str, int], ...] = ()
    whole: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.slow)

    @property
    def members(self) -> int:
        """Replicas over the slow axes."""
        return math.prod(size for _, size in self.slow)

    @property
    def parts(self) -> int:
        """Parts that a vector is cut into over the fast axes."""
        return math.prod(size for _, size in self.fast)

    @property
    def replicas(self) -> int:
        """Partial sums that make one total."""
        return self.members * (1 if self.whole else self.parts)

    def scatter(self, vector: jax.Array) -> jax.Array:
        """This member's part of a vector whose length `parts` divides."""
        for name, size in self.fast:
            if self.whole:
                part = vector.shape[0] // size
                vector = lax.dynamic_slice_in_dim(vector, lax.axis_index(name) * part, part)
            else:
                vector = lax.psum_scatter(vector, name, scatter_dimension=0, tiled=True)
        return vector

    def gather(self, part: jax.Array) -> jax.Array:
        """The vector from all members' parts; the inverse of `scatter`."""
        for name, _ in reversed(self.fast):
            part = lax.all_gather(part, name, axis=0, tiled=True, to="invarying")
        return part

    def exact(self, vector: jax.Array) -> jax.Array:
        """The total of a vector in its own type. It has the derivative of `jax.lax.psum`."""
        return _exact(self, vector)

    def exact_bytes(self, size: int, itemsize: int) -> int:
        """Bytes that a device sends over the slow axes in `exact`: 2(K-1)/K of its part (ring)."""
        part = padded(size, self.parts * self.members) // self.parts
        return 2 * (self.members - 1) * (part // self.members) * itemsize

    def fast_bytes(self, size: int, itemsize: int) -> Mapping[str, int]:
        """Bytes that a device sends along each fast axis for a padded vector (ring)."""
        sent = {}
        for name, members in self.fast:
            size //= members
            sent[name] = (members - 1) * size * itemsize * (1 if self.whole else 2)
        return sent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _exact(group: Group, vector: jax.Array) -> jax.Array:
    size = vector.shape[0]
    part = group.scatter(pad(vector, group.parts * group.members))
    return group.gather(lax.psum(part, group.axes) if group.members > 1 else part)[:size]


@_exact.defjvp
def _exact_derivative(group: Group, given: tuple[jax.Array], change: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # Not left to JAX: a gather's transpose is psum's only where JAX follows what varies (check_vma=True).
    summed = group.axes if group.whole else (*group.axes, *(name for name, _ in group.fast))
    return _exact(group, *given), lax.psum(*change, summed)


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pad(vector: jax.Array, multiple: int) -> jax.Array:
    """The vector with zeros after it, up to a multiple."""
    return jnp.pad(vector, (0, padded(vector.shape[0], multiple) - vector.shape[0]))
