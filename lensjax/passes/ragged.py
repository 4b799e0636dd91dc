"""The rows of a ragged matmul: tokens that were sorted by expert.

Sorting mixes the examples, so their rows belong to no example and propagation leaves them whole: every device would do
the matmuls of all tokens. Each row is still worked on by itself, so the rows may be split like the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from lensjax.passes.windows import Splits
from lensjax.program.edit import shape_of


class Rows(NamedTuple):
    """`operands`: the dimension of rows of each operand, or None; `result`: that of the result, None where the rows are
    summed over; `count` of them; `groups`: (variable, dimension) of the groups' weights, or of their gradient."""

    operands: tuple[int | None, ...]
    result: int | None
    count: int
    groups: tuple[Any, int]


def ragged_rows(eqn: Any) -> Rows | None:
    """None where `eqn` is no ragged matmul, or its groups lie along a batch dimension."""
    if eqn.primitive.name != "ragged_dot_general":
        return None
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_sum, rhs_sum), (lhs_batch, _) = numbers.dot_dimension_numbers
    (row,) = numbers.lhs_ragged_dimensions
    rest = (None,) * (len(eqn.invars) - 2)
    count = shape_of(eqn.invars[0])[row]
    if row in lhs_batch:
        return None
    if row in lhs_sum:  # the gradient of the groups' weights: groups come first in the result
        return Rows((row, rhs_sum[list(lhs_sum).index(row)], *rest), None, count, (eqn.outvars[0], 0))
    free = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in lhs_sum and d not in lhs_batch]
    (group,) = numbers.rhs_group_dimensions
    return Rows((row, None, *rest), len(lhs_batch) + free.index(row), count, (eqn.invars[1], group))


def split_rows(eqn: Any, rows: Rows, axes: Sequence[str]) -> Splits:
    """(a spec of each operand or None, that of the result or None): rows split over these mesh axes, the rest free."""

    def spec(value: Any, row: int) -> PartitionSpec:
        free = PartitionSpec.UNCONSTRAINED
        return PartitionSpec(*(tuple(axes) if d == row else free for d in range(len(shape_of(value)))))

    operands = [None if row is None else spec(v, row) for v, row in zip(eqn.invars, rows.operands)]
    return operands, None if rows.result is None else spec(eqn.outvars[0], rows.result)
