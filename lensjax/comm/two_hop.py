"""The quantised all-reduce: every replica sends a row of codes to each owner, the owners sum in float32 and send codes
of the total back to all.

Never summed on the wire and never twice: each value is rounded once by its sender and once by its owner, whatever the
number of replicas, and all replicas decode the same bytes, so that they stay equal bit for bit. This is the shape of
ZeRO++'s qgZ (Wang et al., arXiv:2306.10209, section 4.3) and of the all-to-all reduce-scatter that keeps bf16 from
being rounded at each hop of a ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from lensjax.comm.derivative import no_derivative

if TYPE_CHECKING:
    from lensjax.comm.codec import State, VectorCodec
    from lensjax.comm.group import Group


def two_hop(vector: jax.Array, codec: VectorCodec, group: Group, state: State) -> tuple[jax.Array, State]:
    """The total over the slow axes of a float32 vector, [replicas x n], and the next residuals.

    A residual stays as it was where the total is not finite anywhere in this vector: the step will be skipped, and an
    error that holds a NaN would never leave.
    """
    first, second = codec, codec.second
    owned, sent = to_owner(vector, first, group, state.get("sent"))
    if "owned" in state:
        owned = owned + state["owned"]
    message = coded(owned, second)
    total = second.decode(gather_codes(message, group.axes)).reshape(-1)
    if not state:
        return total, state
    back = residual(state["owned"], owned, second.decode(message), codec.feedback)
    return total, keep(jnp.isfinite(total).all(), {"sent": sent, "owned": back}, state)


def to_owner(
    vector: jax.Array, codec: VectorCodec, group: Group, residue: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The first hop: [replicas x n] -> the sum of the row that this replica owns, [n], and the next residual."""
    if residue is not None:
        vector = vector + residue
    message = coded(vector.reshape(group.members, -1), codec)
    arrived = exchange_codes(message, group.axes)
    owned = codec.decode(arrived).sum(0)
    if residue is None:
        return owned, vector
    return owned, residual(residue, vector, codec.decode(message).reshape(-1), codec.feedback)


def coded(x: jax.Array, codec: VectorCodec) -> jax.Array:
    """The message of x."""
    return no_derivative(codec.encode, codec)(x)


# XLA may move a conversion over a collective, and send what was decoded: the barriers keep the codes on the wire.


def exchange_codes(message: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Row i of each replica's message to replica i."""
    message = lax.optimization_barrier(message)
    return lax.optimization_barrier(lax.all_to_all(message, axes, split_axis=0, concat_axis=0, tiled=True))


def gather_codes(message: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All replicas' messages, [replicas, m], the same on each."""
    message = lax.optimization_barrier(message)
    return lax.optimization_barrier(lax.all_gather(message, axes, axis=0, to="invarying"))


def residual(old: jax.Array, wanted: jax.Array, got: jax.Array, feedback: float) -> jax.Array:
    """The moving average of what was lost. Sums telescope: sum(got) = sum(given) - (last - first residual) / feedback,
    where wanted = given + old."""
    return (1 - feedback) * old + feedback * (wanted - got) if feedback < 1 else wanted - got


def keep(ok: jax.Array, new: State, old: State) -> State:
    """The new state where `ok`, else the old one."""
    return {name: jnp.where(ok, new[name], old[name]) for name in old}
