"""What a codec is: how partial sums become a total with few bytes between the replicas.

Two levels to write one's own:
  * `VectorCodec`: a vector of float32 becomes a message of bytes and back. The reduction (two hops, `two_hop.py`), the
    buckets, the error feedback and the state come with it.
  * `Codec`: the reduction itself, for methods that are not a message per replica (PowerSGD).
Codecs are frozen dataclasses: they compare by value, and `str(codec)` is the name that `registry.codec` reads back.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lensjax.comm.group import Group, pad, padded
from lensjax.comm.two_hop import two_hop

State = Mapping[str, jax.Array]
Shape = tuple[int, ...]
EPS = 2.0**-24  # half a unit in the last place of float32
TINY = float(np.finfo(np.float32).tiny)  # smaller numbers are zero: XLA flushes them on some backends


class Codec(abc.ABC):
    """How the leaves of one bucket are summed over the replicas of a group. All methods work on one device's shards."""

    name: ClassVar[str]
    precision: ClassVar[str] = "what its error_bound says"  # of one message, in words for a report

    def __str__(self) -> str:
        """The name that `registry.parse_codec` reads back; parameters only where they differ from the defaults."""
        words = [self.name]
        for f in dataclasses.fields(self) if dataclasses.is_dataclass(self) else ():
            value = getattr(self, f.name)
            if value != f.default:
                words.append(f"{f.name}={('on' if value else 'off') if isinstance(value, bool) else value}")
        return ":".join(words)

    def takes(self, shape: Shape) -> bool:
        """Whether a leaf of this (local) shape can be reduced by this codec; what cannot is reduced exactly."""
        return True

    def working_dtype(self, dtype: Any) -> Any:
        """The type that sums are kept in."""
        return jnp.dtype(jnp.float32)

    @abc.abstractmethod
    def reduce(self, leaves: Sequence[jax.Array], group: Group, state: State) -> tuple[list[jax.Array], State]:
        """The totals of the leaves (same shapes, in the working type) and the next state.

        Called inside a fully manual region. A non-finite number in any replica makes the total of its leaf non-finite
        on every replica, and then the state stays as it was.
        """

    @abc.abstractmethod
    def wire_bytes(self, shapes: Sequence[Shape], group: Group) -> int:
        """Bytes that one device sends over the slow axes in one `reduce`, exactly."""

    @abc.abstractmethod
    def fast_bytes(self, shapes: Sequence[Shape], group: Group) -> Mapping[str, int]:
        """Bytes that one device sends along each fast axis in one `reduce`, exactly."""

    @abc.abstractmethod
    def reduction_error(self, stack: jax.Array) -> jax.Array:
        """A bound on |reduced - exact sum| of each element of a leaf, for finite inputs. `stack`: [replica, ...], what
        each replica puts in (its residual, if it has one, added). The sum in float32 is part of it."""

    def init(self, shapes: Sequence[Shape], group: Group) -> Mapping[str, np.ndarray]:
        """The first state of one device, name -> array: zeros; empty for a codec without memory."""
        return {}


class Exact(Codec):
    """Sums in full precision: float32 for narrower floats, otherwise the leaf's own type."""

    name = "exact"
    precision = "float32"

    def __eq__(self, other: object) -> bool:
        return type(other) is Exact

    def __hash__(self) -> int:
        return hash(Exact)

    def working_dtype(self, dtype: Any) -> Any:
        return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(dtype)

    def reduce(self, leaves: Sequence[jax.Array], group: Group, state: State) -> tuple[list[jax.Array], State]:
        total = group.exact(jnp.concatenate([x.reshape(-1) for x in leaves]))
        return split(total, [x.shape for x in leaves], 1), state

    def _size(self, shapes: Sequence[Shape]) -> int:
        return sum(math.prod(s) for s in shapes)

    def wire_bytes(self, shapes: Sequence[Shape], group: Group, itemsize: int = 4) -> int:
        return group.exact_bytes(self._size(shapes), itemsize)

    def fast_bytes(self, shapes: Sequence[Shape], group: Group, itemsize: int = 4) -> Mapping[str, int]:
        return group.fast_bytes(padded(self._size(shapes), group.parts * group.members), itemsize)

    def reduction_error(self, stack: jax.Array) -> jax.Array:
        wide = jnp.finfo(self.working_dtype(stack.dtype))
        return (len(stack) - 1) * float(wide.eps) * jnp.abs(stack).sum(0) + len(stack) * float(wide.tiny)


class VectorCodec(Codec):
    """A codec that turns a float32 vector into one message of unsigned integers and back.

    A subclass gives `encode`, `decode`, `message_bytes` and `error_bound`, and may set
      block:    vectors are encoded in multiples of it; a leaf always starts on a block of its own
      feedback: what part of the error of each message is kept and added to the next one (0: none, 1: all of it;
                between: a moving average, as LoCo has it, arXiv:2407.04480). Both hops keep one.
      second:   the codec of the way back from the owner; itself unless given
    Non-finite values must decode to non-finite values (`scales.largest` finds them, a plain maximum loses NaNs on
    XLA:CPU). Encoding must depend on nothing but the values.
    """

    block: int = 1
    feedback: float = 0.0

    @property
    def second(self) -> VectorCodec:
        return self

    @abc.abstractmethod
    def encode(self, x: jax.Array) -> jax.Array:
        """float32 [..., n], `block` divides n -> the message: an unsigned integer array [..., m]."""

    @abc.abstractmethod
    def decode(self, message: jax.Array) -> jax.Array:
        """The message [..., m] -> float32 [..., n]."""

    @abc.abstractmethod
    def message_bytes(self, n: int) -> int:
        """Bytes of the message of n values."""

    @abc.abstractmethod
    def error_bound(self, x: jax.Array) -> jax.Array:
        """A bound on |decode(encode(x)) - x|, element by element, for every finite x. It must not shrink when an
        element's absolute value grows: sums are bounded with it."""

    def _padded(self, shapes: Sequence[Shape], group: Group) -> int:
        aligned = sum(padded(math.prod(s), self.alignment) for s in shapes)
        return padded(aligned, group.parts * group.members * self.alignment)

    @property
    def alignment(self) -> int:
        """Values between starts of leaves: the blocks of both hops."""
        return math.lcm(self.block, self.second.block)

    def reduce(self, leaves: Sequence[jax.Array], group: Group, state: State) -> tuple[list[jax.Array], State]:
        flat = jnp.concatenate([pad(x.reshape(-1), self.alignment) for x in leaves])
        part = group.scatter(pad(flat, group.parts * group.members * self.alignment))
        if group.members == 1:
            return split(group.gather(part), [x.shape for x in leaves], self.alignment), state
        total, state = two_hop(part, self, group, state)
        return split(group.gather(total), [x.shape for x in leaves], self.alignment), state

    def wire_bytes(self, shapes: Sequence[Shape], group: Group) -> int:
        row = self._padded(shapes, group) // group.parts // group.members
        return (group.members - 1) * (self.message_bytes(row) + self.second.message_bytes(row))

    def fast_bytes(self, shapes: Sequence[Shape], group: Group) -> Mapping[str, int]:
        return group.fast_bytes(self._padded(shapes, group), 4)

    def init(self, shapes: Sequence[Shape], group: Group) -> Mapping[str, np.ndarray]:
        if not self.feedback or group.members == 1:
            return {}
        size = self._padded(shapes, group) // group.parts
        return {"sent": np.zeros(size, np.float32), "owned": np.zeros(size // group.members, np.float32)}

    def reduction_error(self, stack: jax.Array) -> jax.Array:
        shape, rows = stack.shape[1:], stack.reshape(len(stack), -1).astype(jnp.float32)
        size = rows.shape[1]
        rows = jnp.pad(rows, ((0, 0), (0, padded(size, self.alignment) - size)))
        first = self.error_bound(rows).sum(0)
        rounding = len(stack) * (2 * EPS * (jnp.abs(rows).sum(0) + first) + TINY)
        second = self.second.error_bound(jnp.abs(rows.sum(0)) + first + rounding)
        return ((first + rounding + second) * (1 + 8 * EPS))[:size].reshape(shape)


def split(vector: jax.Array, shapes: Sequence[Shape], alignment: int) -> list[jax.Array]:
    """The leaves that were laid one after the other, each on a multiple of `alignment`."""
    out, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        out.append(vector[at : at + size].reshape(shape))
        at += padded(size, alignment)
    return out
