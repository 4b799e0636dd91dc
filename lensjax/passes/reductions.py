"""Reductions whose parts XLA cannot put together, Fourier transforms and some scatters: whole along what they mix.

    a function of the user's   `lax.reduce` with an initial value that is not the function's neutral one is wrong: each
                               part begins with it. With a function that is no sum, product, minimum or maximum it does
                               not compile on CPU, and no GPU library has such an all-reduce.
    bits                       exclusive or, and and/or of integers, which do not compile on CPU either
    Fourier transforms         XLA:CPU gives operand or result the order in memory that a gather beside it likes, and
                               refuses any but the first while the step runs: the state is lost
    scattered values           whose number the devices do not divide: what XLA fills the last part up with is taken
                               for values of the user's

(Seen in jax 0.10.2 by plain shardings under plain `jit`.) So the axes that such an operation mixes are whole in its
operands, scattered values are split as the plan says, and a Fourier transform's arrays are in the order in which they
are written. All other axes are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from lensjax.passes.windows import Splits
from lensjax.program.edit import shape_of

_FREE = PartitionSpec.UNCONSTRAINED
_SCATTERS = frozenset(
    f"scatter{how}" for how in ("", "-add", "-sub", "-mul", "-max", "-min", "_add", "_sub", "_mul", "_max", "_min")
)


def whole_where_mixed(eqn: Any, devices: int, wanted: Callable[[Any], Sequence[Any]]) -> Splits | None:
    """(a spec of each operand or None, that of the result or None) for a mesh of so many devices; None where the
    operation is not of this kind. `wanted(value)`: how the plan splits each dimension of a value."""
    name, params = eqn.primitive.name, eqn.params
    if name in _SCATTERS:
        return _scattered(eqn, devices, wanted)
    rank = len(shape_of(eqn.invars[0])) if eqn.invars else 0
    if name == "fft":
        spec = _whole(rank, range(rank - len(params["fft_lengths"]), rank))
        return [spec], spec
    if name == "reduce":
        spec = _whole(rank, params["dimensions"])
        return [spec if len(shape_of(v)) == rank else None for v in eqn.invars], None
    bits = name == "reduce_xor" or (name in ("reduce_and", "reduce_or") and eqn.invars[0].aval.dtype != bool)
    return ([_whole(rank, params["axes"])], None) if bits else None


def _scattered(eqn: Any, devices: int, wanted: Callable[[Any], Sequence[Any]]) -> Splits | None:
    """The dimensions along which values are scattered split as the plan wants them, in indices and updates, unless the
    devices divide them: the plan's splits are even, others need not be."""
    _, indices, updates = eqn.invars
    windows, sizes = eqn.params["dimension_numbers"].update_window_dims, shape_of(updates)
    along = [d for d in range(len(sizes)) if d not in windows]
    odd = [i for i, d in enumerate(along) if sizes[d] % devices]
    if not odd:
        return None
    entries = list(wanted(updates))
    first, second = [_FREE] * len(shape_of(indices)), [_FREE] * len(sizes)
    for i in odd:
        first[i] = second[along[i]] = entries[along[i]]
    return [None, PartitionSpec(*first), PartitionSpec(*second)], None


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
