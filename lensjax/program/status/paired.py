"""Two traces of a step, read as one: every operation with its parameters at both batch sizes.

The dimensions that differ are the batch. What differs in any other way (a parameter that is no shape, a size that is
not proportional to the batch) makes the step one whose share is not known, and is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lensjax import _jax
from lensjax.program.edit import bodies, is_var, shape_of
from lensjax.program.status.lattice import SAME, ZERO, Refused, Status

# Parameters that hold sizes, by (primitive, parameter): they may differ between the two traces, in proportion.
SIZES = frozenset(
    {
        ("reshape", "new_sizes"), ("broadcast_in_dim", "shape"), ("iota", "shape"), ("empty", "shape"),
        ("slice", "start_indices"), ("slice", "limit_indices"), ("pad", "padding_config"), ("split", "sizes"),
        ("random_bits", "shape"), ("random_split", "shape"), ("gather", "slice_sizes"), ("scan", "length"),
        ("dynamic_slice", "slice_sizes"), ("tile", "reps"),
    }
)  # fmt: skip
_BODIES = frozenset({"jaxpr", "branches", "cond_jaxpr", "body_jaxpr", "ctx_mesh"})
_DIMS: Any = ()


class Op:
    """One equation. `params` and `small`: its parameters at the full size and at that of the second trace; `changed`:
    operands that are literals of another value there; `ins`, `outs`: the batch dimensions of operands and results;
    `batched`: whether anything in it, bodies included, has a batch dimension. Compares by identity."""

    __slots__ = ("batched", "bodies", "changed", "eqn", "ins", "invars", "name", "outs", "outvars", "params", "small")

    def __init__(self, eqn: Any, small: Any, subs: tuple[Body, ...], dims: Mapping[Any, tuple[int, ...]]):
        self.eqn, self.name = eqn, eqn.primitive.name
        self.invars, self.outvars = eqn.invars, eqn.outvars
        self.params, self.small = eqn.params, small.params
        self.bodies = subs
        self.ins: list[tuple[int, ...]] = [dims.get(a, _DIMS) if is_var(a) else _DIMS for a in eqn.invars]
        self.outs: list[Sequence[int]] = [dims.get(v, _DIMS) for v in eqn.outvars]
        self.changed = _changed(eqn, small)
        self.batched = any(self.ins) or any(self.outs) or any(b.batched for b in subs)

    @property
    def line(self) -> str:
        return _jax.user_line(self.eqn, own=True)

    def refuse(self, reason: str) -> Refused:
        return Refused(reason, self.line)


class Body:
    """A jaxpr of the pair: `ops`, `invars`, `outvars`; the atoms of the full trace. Compares by identity."""

    def __init__(self, invars: Any, ops: list[Op], outvars: Any, batched: bool):
        self.invars, self.ops, self.outvars, self.batched = invars, ops, outvars, batched


def literal_status(atom: Any) -> Status:
    """Z for a literal that is zero everywhere, else R."""
    value = atom.val
    if isinstance(value, bool | int | float):
        return ZERO if value == 0 else SAME
    try:
        return SAME if np.any(np.asarray(value)) else ZERO
    except (TypeError, ValueError):  # keys and other types that numpy does not know
        return SAME


def pair(full: Any, small: Any, dims: Mapping[Any, tuple[int, ...]], sizes: tuple[int, int]) -> Body:
    """The full trace with what differs in the small one. `dims`: the batch dimensions of each variable; `sizes`: the
    batch at both. Raises Refused."""
    a, b = _jax.open_jaxpr(full), _jax.open_jaxpr(small)
    ops = [_op(e, f, dims, sizes) for e, f in zip(a.eqns, b.eqns, strict=True)]
    for x, y in zip((*a.invars, *a.outvars), (*b.invars, *b.outvars), strict=True):
        _proportional(x, y, sizes, None)
    batched = any(o.batched for o in ops) or any(dims.get(v) for v in a.invars)
    return Body(a.invars, ops, a.outvars, batched)


def _op(e: Any, f: Any, dims: Mapping[Any, tuple[int, ...]], sizes: tuple[int, int]) -> Op:
    if e.effects:
        # A print inside of a share would show the share's values, a callback would run once for each.
        raise Refused(f"{e.primitive.name} has effects, which are never split", _jax.user_line(e, own=True))
    subs = tuple(pair(p, q, dims, sizes) for p, q in zip(bodies(e), bodies(f), strict=True))
    op = Op(e, f, subs, dims)
    if op.batched:
        for x, y in zip((*e.invars, *e.outvars), (*f.invars, *f.outvars), strict=True):
            _proportional(x, y, sizes, op)
    if e.params is not f.params:
        for k, value in e.params.items():
            other = f.params[k]
            if value is other or k in _BODIES or (op.name, k) in SIZES or _jax.is_jaxpr(value) or callable(value):
                continue
            if not _equal(value, other) and op.name != "integer_pow":
                raise op.refuse(f"the parameter {k!r} of {op.name} depends on the batch size")
    return op


def _proportional(x: Any, y: Any, sizes: tuple[int, int], op: Op | None) -> None:
    s, t = shape_of(x), shape_of(y)
    if s == t:
        return
    if not is_var(x):
        raise Refused("an array written into the program has a size that depends on the batch", op.line if op else "")
    for m, n in zip(s, t):
        if m != n and m * sizes[1] != n * sizes[0]:
            raise Refused(
                f"a dimension is {m} at batch {sizes[0]} and {n} at batch {sizes[1]}: not in proportion",
                op.line if op else "",
            )


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)  # NaN parameters
    except Exception:  # a parameter without an order or with arrays in it
        return str(a) == str(b)


def _changed(e: Any, f: Any) -> frozenset[int]:
    pairs = enumerate(zip(e.invars, f.invars, strict=True))
    return frozenset(i for i, (x, y) in pairs if not is_var(x) and differs(x, y))


def differs(x: Any, y: Any) -> bool:
    """Whether two literals have different values."""
    if x.val is y.val:
        return False
    try:
        a, b = np.asarray(x.val), np.asarray(y.val)
        return not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    except (TypeError, ValueError):  # keys and other types that numpy does not know
        return str(x.val) != str(y.val)
