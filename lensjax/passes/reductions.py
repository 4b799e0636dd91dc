"""Reductions whose parts XLA cannot put together, and Fourier transforms: whole along what they mix.

    a function of the user's   `lax.reduce` with an initial value that is not the function's neutral one is wrong: each
                               part begins with it. With a function that is no sum, product, minimum or maximum it does
                               not compile on CPU, and no GPU library has such an all-reduce.
    bits                       exclusive or, and and/or of integers, which do not compile on CPU either
    Fourier transforms         XLA:CPU gives operand or result the order in memory that a gather beside it likes, and
                               refuses any but the first while the step runs: the state is lost

(Seen in jax 0.10.2 by plain shardings under plain `jit`.) So the axes that such an operation mixes are whole in its
operands, all others are free, and a Fourier transform's arrays are in the order in which they are written.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from lensjax.passes.windows import Splits
from lensjax.program.edit import shape_of

_FREE = PartitionSpec.UNCONSTRAINED


def whole_where_mixed(eqn: Any) -> Splits | None:
    """(a spec of each operand or None, that of the result or None); None where the operation is not of this kind."""
    name, params = eqn.primitive.name, eqn.params
    rank = len(shape_of(eqn.invars[0])) if eqn.invars else 0
    if name == "fft":
        spec = _whole(rank, range(rank - len(params["fft_lengths"]), rank))
        return [spec], spec
    if name == "reduce":
        spec = _whole(rank, params["dimensions"])
        return [spec if len(shape_of(v)) == rank else None for v in eqn.invars], None
    bits = name == "reduce_xor" or (name in ("reduce_and", "reduce_or") and eqn.invars[0].aval.dtype != bool)
    return ([_whole(rank, params["axes"])], None) if bits else None


def has_order(eqn: Any) -> bool:
    """Whether operands and result must be `in_order`."""
    return eqn.primitive.name == "fft"


@jax.custom_batching.custom_vmap
def in_order(x: Any) -> Any:
    """`x` in memory with its last axis fastest."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@in_order.def_vmap
def _in_order_batched(size: int, batched: Any, x: Any) -> Any:
    # A batch comes first here. JAX's own rule leaves it where it stands, and the transform moves it to the front after.
    return in_order(x), True


def _whole(rank: int, dimensions: Any) -> PartitionSpec:
    held = set(dimensions)
    return PartitionSpec(*(None if d in held else _FREE for d in range(rank)))
