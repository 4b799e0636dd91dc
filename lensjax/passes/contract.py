"""Matmuls that sum over three dimensions or more: both operands are split alike along these.

XLA's partitioner sums wrongly, or does not compile, where a mesh axis splits one summed dimension of the left operand
and another one of the right operand, the dimensions stand in another order in each, and there are three (seen in jax
0.10.2 by plain shardings under plain `jit`). With one or two summed dimensions, every random case that was tried is
right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from lensjax.passes.windows import Splits
from lensjax.program.edit import shape_of

_FREE = PartitionSpec.UNCONSTRAINED


def agreeing_splits(eqn: Any, entries: Callable[[Any], Sequence[Any]]) -> Splits | None:
    """Specs of both operands that agree on the summed dimensions and leave the others free; None where `eqn` is no such
    matmul. `entries(value)`: how the plan splits each of its dimensions. Where the two differ, a dimension is whole."""
    if eqn.primitive.name != "dot_general":
        return None
    summed, _ = eqn.params["dimension_numbers"]
    if len(summed[0]) < 3:
        return None
    wanted = [entries(v) for v in eqn.invars]
    specs: list[list[Any]] = [[_FREE] * len(shape_of(v)) for v in eqn.invars]
    for left, right in zip(*summed):
        a, b = wanted[0][left] or None, wanted[1][right] or None
        agreed = a if a == b else _FREE if _FREE in (a, b) else None
        specs[0][left] = specs[1][right] = agreed
    return [PartitionSpec(*s) for s in specs], None
