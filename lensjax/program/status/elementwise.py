"""Rules of element-by-element operations, and of those that nobody knows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lensjax.program.edit import is_var
from lensjax.program.status.interpreter import Interpreter, Rule
from lensjax.program.status.lattice import ZERO, Status, part, partial, same, union, within
from lensjax.program.status.paired import Op

POINTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
    imag integer_pow is_finite le lgamma log log1p logistic lt max min mul mulhi ne neg nextafter not or
    population_count clz pow random_fold_in random_seed real reduce_precision regularized_incomplete_beta rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh threefry2x32 xor bessel_i0e bessel_i1e polygamma zeta igamma_grad_a random_gamma_grad eq_to lt_to
    le_to log2 one_minus_square""".split()
)
# Value in, value out, whatever it is.
IDENTITIES = frozenset("optimization_barrier name sharding_constraint pvary pcast".split())
# Linear algebra on the last dimensions: how many of them are mixed.
TRAILING = {"cholesky": 2, "eigh": 2, "eig": 2, "qr": 2, "geqrf": 2, "svd": 2, "lu": 2, "triangular_solve": 2,
            "householder_product": 2, "tridiagonal_solve": 1, "lu_pivots_to_permutation": 1}  # fmt: skip
# An index to which a number that depends on the batch size was added: it no longer points at the share's own example.
SHIFTED = "shifted"
_KEEPS_ZERO = frozenset("neg convert_element_type mul add sub add_any copy select_n real imag".split())


def pointwise(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    """All batch operands of one layout give that layout; partial sums stay partial where the operation is linear."""
    name, kinds = op.name, [s.kind for s in ins]
    if kinds[0] == "I" and (found := _index(op, ins, kinds)) is not None:
        return found
    if name == "select_n" and kinds[0] == "Z" and kinds[1] in "ICRB":
        return ins[1]
    if name in _KEEPS_ZERO and all(k == "Z" for k in kinds):
        return ZERO
    batched = bool(op.outs[0])
    if not batched:
        if name == "mul" and "Z" in kinds and not {"P", "M"} & set(kinds):
            return Status("Z", deps=union(ins))
        if any(k in "PM" for k in kinds) and (found := linear(an, op, ins, kinds)) is not None:
            return found
    ins = an.totals(op, ins)
    deps = union(ins)
    if not batched:
        return [same(deps)] * len(op.outs)
    parts = [s for s in ins if s.kind == "B"]
    if not parts:
        if not any(op.ins) and not all(s.kind == "Z" for s in ins):
            raise op.refuse(f"{name}: a result that has the batch from operands that do not")
        return [an.result(op, k, op.outs[0][0], None, deps) for k in range(len(op.outs))]
    dim, inner = an.layout(op, parts)
    return [an.result(op, k, dim, inner, deps) for k in range(len(op.outs))]


def _index(op: Op, ins: list[Status], kinds: list[str]) -> Status | None:
    """The wrap of a negative index, `select(i < 0, i + N, i)`: an index along the batch is never negative."""
    if op.name == "convert_element_type":
        to = jnp.dtype(op.outvars[0].aval.dtype)
        # Offsets are added in the type at hand: one that rounds or wraps gets the full index before.
        return ins[0] if jnp.issubdtype(to, jnp.integer) and to.itemsize >= 4 else None
    if op.name == "lt" and kinds[1] == "Z" and ins[0].op != SHIFTED:
        return ZERO
    if op.name == "add" and 1 in op.changed:
        return ins[0]._replace(op=SHIFTED)
    return None


def narrows(op: Op) -> bool:
    """Whether a cast loses precision: a sum must be total before."""
    a, b = op.invars[0].aval.dtype, op.outvars[0].aval.dtype
    if not jnp.issubdtype(a, jnp.inexact):
        return jnp.issubdtype(a, jnp.bool_) or (
            not jnp.issubdtype(b, jnp.inexact) and jnp.dtype(b).itemsize < jnp.dtype(a).itemsize
        )
    if not jnp.issubdtype(b, jnp.inexact):
        return True
    if jnp.issubdtype(a, jnp.complexfloating) and not jnp.issubdtype(b, jnp.complexfloating):
        return False
    return jnp.finfo(b).nmant < jnp.finfo(a).nmant or jnp.finfo(b).nexp < jnp.finfo(a).nexp


def linear(an: Interpreter, op: Op, ins: list[Status], kinds: list[str]) -> Status | None:
    """The result where the operation is linear in its partial operands; None where it needs their totals."""
    name = op.name
    where = [i for i, k in enumerate(kinds) if k in "PM"]
    of = union(ins[i] for i in where)
    rest = union(s for s in ins if s.kind not in "PM")
    deps = of | rest
    if any(kinds[i] == "M" for i in where):
        widens = name == "convert_element_type" and not narrows(op)
        return ins[0] if widens or name in ("copy", "copy_p", "stop_gradient") else None
    if name in ("copy", "copy_p", "neg", "real", "imag", "stop_gradient"):
        return partial(deps)
    if name == "convert_element_type":
        return None if narrows(op) else partial(deps)
    if name in ("add", "sub", "add_any"):
        if set(kinds) <= {"P", "Z"}:
            return partial(deps)
        if set(kinds) == {"P", "R"} and len(an.bodies) > 1 and within(rest, of):
            an.fixes["first", op, kinds.index("R")] = True
            return partial(deps)
    if name == "mul" and len(where) == 1 and within(rest, of):
        return partial(deps)
    if name == "div" and where == [0] and within(rest, of):
        return partial(deps)
    if name == "select_n" and kinds[0] in "RZ" and set(kinds[1:]) <= {"P", "Z"} and within(rest, of):
        return partial(deps)
    return None


def identity(an: Interpreter, op: Op, ins: list[Status]) -> list[Status]:
    return list(ins)


def trailing(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    """Linear algebra, one matrix after the other: the batch may stand in the leading dimensions."""
    ins = an.totals(op, ins)
    parts = [s for s in ins if s.kind == "B"]
    if not parts:
        return [same(union(ins))] * len(op.outs)
    dim, inner = an.layout(op, parts)
    mixed = len(op.params["fft_lengths"]) if op.name == "fft" else TRAILING[op.name]
    if dim >= len(op.invars[0].aval.shape) - mixed:
        raise op.refuse(f"{op.name} over the batch")
    return [an.result(op, k, dim, inner, union(ins)) for k in range(len(op.outs))]


def empty(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    return part(op.outs[0][0], None) if op.outs[0] else ZERO


def unknown(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    """A primitive without a rule: never with a batch; without one, totals go in and the same comes out everywhere."""
    if op.batched:
        raise op.refuse(f"{op.name} has no rule that says how a batch passes through it")
    if any(is_var(a) and s.kind in "IC" for a, s in zip(op.invars, ins)):
        raise op.refuse(f"{op.name}: indices of examples used as numbers")
    return [same(union(an.totals(op, ins)))] * len(op.outs)


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(IDENTITIES, identity),
    **dict.fromkeys((*TRAILING, "fft"), trailing),
    "empty": empty,
}
