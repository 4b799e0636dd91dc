"""Rules of products: matrix products and convolutions.

A product contracted over the batch on both sides is a partial sum: that is what gradients are. A product of every
example with every other one would need all of them in each share.
"""

from __future__ import annotations

from typing import Any

from lensjax.program.edit import shape_of
from lensjax.program.status.interpreter import Interpreter, Rule
from lensjax.program.status.lattice import ZERO, Status, part, partial, same, union, within
from lensjax.program.status.paired import Op


def _without_batch(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    """Bilinear in operands without a batch: partial in one of them, where the other knows no more totals than it."""
    left, right = ins
    if left.kind == "P" and right.kind == "P":
        return same(union(an.totals(op, ins)))
    if left.kind == "P" and not within(right.deps, left.deps):
        return same(union(an.totals(op, ins)))
    if right.kind == "P" and not within(left.deps, right.deps):
        return same(union(an.totals(op, ins)))
    return partial(union(ins)) if "P" in (left.kind, right.kind) else same(union(ins))


def dot_general(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    left, right = ins[0], ins[1]
    if "Z" in (left.kind, right.kind) and not op.outs[0]:
        return ZERO
    if left.kind in "IMC" or right.kind in "IMC":
        left, right = an.totals(op, [left, right])
    if left.kind != "B" and right.kind != "B":
        if op.outs[0]:  # a zero whose batch nobody knows
            return part(op.outs[0][0], None, union(an.totals(op, [left, right])))
        return _without_batch(an, op, [left, right])
    left, right = an.totals(op, [left, right])
    deps = left.deps | right.deps
    if left.kind == "B" and right.kind == "B":
        if left.dim in lc and right.dim == rc[lc.index(left.dim)]:
            an.layout(op, [left._replace(dim=0), right._replace(dim=0)])
            return partial(deps)
        if left.dim in lb and right.dim == rb[lb.index(left.dim)]:
            _, inner = an.layout(op, [left._replace(dim=0), right._replace(dim=0)])
            return an.result(op, 0, lb.index(left.dim), inner, deps)
        raise op.refuse("mixes examples: a product of every example with every example of the batch")
    side = 0 if left.kind == "B" else 1
    s, other = (left, right) if side == 0 else (right, left)
    contracted, batch = ((lc, lb), (rc, rb))[side]
    if s.dim in contracted or s.dim in batch:
        if other.kind == "Z":
            return ZERO if s.dim in contracted else an.result(op, 0, batch.index(s.dim), s.inner, deps)
        raise op.refuse("a product of the batch with values that have none")
    free = [d for d in range(len(shape_of(op.invars[side]))) if d not in contracted and d not in batch]
    before = 0 if side == 0 else len(shape_of(op.invars[0])) - len(lc) - len(lb)
    return an.result(op, 0, len(batch) + before + free.index(s.dim), s.inner, deps)


def convolution(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    numbers = op.params["dimension_numbers"]
    left, right = ins
    if "Z" in (left.kind, right.kind) and not op.outs[0] and "B" not in (left.kind, right.kind):
        return ZERO
    if left.kind in "IMC" or right.kind in "IMC":
        left, right = an.totals(op, ins)
    if left.kind != "B" and right.kind != "B":
        if op.outs[0]:
            return part(op.outs[0][0], None, union(an.totals(op, [left, right])))
        return _without_batch(an, op, [left, right])
    left, right = an.totals(op, [left, right])
    deps = left.deps | right.deps
    grouped = op.params["feature_group_count"] != 1 or op.params["batch_group_count"] != 1
    examples, features = numbers.lhs_spec[0], numbers.lhs_spec[1]
    out, into = numbers.rhs_spec[0], numbers.rhs_spec[1]
    if left.kind == "B" and right.kind == "B":
        # Groups of the left side's examples (a depthwise convolution's weight gradient) leave its features whole.
        if left.dim == features and right.dim == into and op.params["feature_group_count"] == 1:
            an.layout(op, [left._replace(dim=0), right._replace(dim=0)])
            return partial(deps)
        raise op.refuse("a convolution that mixes examples")
    if left.kind == "B" and left.dim == examples and op.params["batch_group_count"] == 1:
        return an.result(op, 0, numbers.out_spec[0], left.inner, deps)
    if right.kind == "B" and right.dim == out and not grouped:
        return an.result(op, 0, numbers.out_spec[1], right.inner, deps)
    raise op.refuse("a convolution over the batch")


def ragged_dot(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    """Rows sorted by group: which rows are whose depends on every example, unless no batch is in it at all."""
    if op.batched:
        raise op.refuse(f"mixes examples: {op.name} over rows of the whole batch that are sorted by group")
    return same(union(an.totals(op, ins)))


RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "ragged_dot": ragged_dot,
    "ragged_dot_general": ragged_dot,
}
