"""How single equations carry the dimensions of their operands: what must hold to compute them some rows at a time.

A *group* is dimensions of operands and results that run together: row i of one is computed from row i of the others.
A contraction runs over a group and sums it up; what mixes its members in another way (a maximum over them, a position
among them) can only be computed whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lensjax.program.edit import is_var, shape_of

ELEMENTWISE = frozenset(
    """abs add add_any and atan2 ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul name ne neg not one_minus_square or pow
    reduce_precision rem round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh xor""".split()
)
ALIKE, SUMMED, MIXED = "alike", "summed", "mixed"


class Slot(NamedTuple):
    """A dimension of operand (`result` False) or result number `at`."""

    result: bool
    at: int
    dim: int

    def of(self, eqn: Any) -> Any:
        return (eqn.outvars if self.result else eqn.invars)[self.at]


class Group(NamedTuple):
    slots: tuple[Slot, ...]
    kind: str = ALIKE


def groups(eqn: Any) -> tuple[Group, ...] | None:
    """The groups of an equation; None where nothing is known about it. A dimension in no group (of size one, or merged
    with others) cannot be computed in parts."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(eqn)
    if name.startswith("reduce_") or name in ("argmax", "argmin"):
        return _reduction(eqn)
    found = _KNOWN.get(name)
    return tuple(found(eqn)) if found is not None else None


def _elementwise(eqn: Any) -> tuple[Group, ...] | None:
    """Operands are scalars, or of the result's shape with some dimensions of size one."""
    shape = shape_of(eqn.outvars[0])
    sizes = {k: shape_of(a) for k, a in enumerate(eqn.invars) if shape_of(a)}
    if len(eqn.outvars) != 1 or any(len(n) != len(shape) for n in sizes.values()):
        return None
    full = lambda d: (Slot(False, k, d) for k, n in sizes.items() if n[d] == shape[d])
    return tuple(Group((Slot(True, 0, d), *full(d))) for d in range(len(shape)))


def _reduction(eqn: Any) -> tuple[Group, ...] | None:
    axes = eqn.params.get("axes")
    if axes is None or len(eqn.invars) != 1:
        return None
    rank = len(shape_of(eqn.invars[0]))
    kept = [d for d in range(rank) if d not in axes]
    kind = SUMMED if eqn.primitive.name == "reduce_sum" else MIXED
    return (
        *(Group((Slot(False, 0, d), Slot(True, 0, k))) for k, d in enumerate(kept)),
        *(Group((Slot(False, 0, d),), kind) for d in axes),
    )


def _broadcast(eqn: Any) -> Iterator[Group]:
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    read = {int(d): k for k, d in enumerate(eqn.params["broadcast_dimensions"]) if before[k] == after[int(d)]}
    for d in range(len(after)):
        yield Group((Slot(True, 0, d), *([Slot(False, 0, read[d])] if d in read else [])))


def _dot(eqn: Any) -> Iterator[Group]:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    out = 0
    for a, b in zip(left_batch, right_batch):
        yield Group((Slot(False, 0, a), Slot(False, 1, b), Slot(True, 0, out)))
        out += 1
    for k, (contracted, batch) in enumerate(((left, left_batch), (right, right_batch))):
        for d in range(len(shape_of(eqn.invars[k]))):
            if d not in contracted and d not in batch:
                yield Group((Slot(False, k, d), Slot(True, 0, out)))
                out += 1
    for a, b in zip(left, right):
        yield Group((Slot(False, 0, a), Slot(False, 1, b)), SUMMED)


def _reshape(eqn: Any) -> Iterator[Group]:
    if eqn.params.get("dimensions") is not None:
        return
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    i = j = 0
    while i < len(before) and j < len(after):
        if before[i] == after[j]:
            yield Group((Slot(False, 0, i), Slot(True, 0, j)))
            i, j = i + 1, j + 1
        elif before[i] == 1:
            i += 1
        elif after[j] == 1:
            j += 1
        else:  # dimensions come together or apart: the shortest stretches of equal size
            a, b = before[i], after[j]
            i, j = i + 1, j + 1
            while a != b:
                if a < b:
                    a, i = a * before[i], i + 1
                else:
                    b, j = b * after[j], j + 1


def _transpose(eqn: Any) -> Iterator[Group]:
    for k, d in enumerate(eqn.params["permutation"]):
        yield Group((Slot(False, 0, int(d)), Slot(True, 0, k)))


def _squeeze(eqn: Any) -> Iterator[Group]:
    gone = {d % len(shape_of(eqn.invars[0])) for d in eqn.params["dimensions"]}
    kept = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in gone]
    for k, d in enumerate(kept):
        yield Group((Slot(False, 0, d), Slot(True, 0, k)))


def _iota(eqn: Any) -> Iterator[Group]:
    for d in range(len(shape_of(eqn.outvars[0]))):
        yield Group((Slot(True, 0, d),), MIXED if d == eqn.params["dimension"] else ALIKE)


def _gather(eqn: Any) -> Iterator[Group]:
    n = eqn.params["dimension_numbers"]
    operand, indices, out = (shape_of(a) for a in (*eqn.invars[:2], eqn.outvars[0]))
    rows = [d for d in range(len(out)) if d not in n.offset_dims]  # of the indices, but for their last dimension
    batch = dict(zip(n.start_indices_batching_dims, n.operand_batching_dims))
    for d, k in zip(range(len(indices) - 1), rows):
        whole = [Slot(False, 0, batch[d])] if d in batch else []
        yield Group((Slot(False, 1, d), Slot(True, 0, k), *whole))
    window = [d for d in range(len(operand)) if d not in (*n.collapsed_slice_dims, *n.operand_batching_dims)]
    for d, k in zip(window, n.offset_dims):
        if eqn.params["slice_sizes"][d] == operand[d] and d not in n.start_index_map:
            yield Group((Slot(False, 0, d), Slot(True, 0, k)))


def _scatter(eqn: Any) -> Iterator[Group]:
    n = eqn.params["dimension_numbers"]
    operand, indices, updates = (shape_of(a) for a in eqn.invars)
    rows = [d for d in range(len(updates)) if d not in n.update_window_dims]
    batch = dict(zip(n.scatter_indices_batching_dims, n.operand_batching_dims))
    for d, k in zip(range(len(indices) - 1), rows):
        if d in batch:
            slots = Slot(False, 1, d), Slot(False, 2, k), Slot(False, 0, batch[d]), Slot(True, 0, batch[d])
            yield Group(slots)
    window = [d for d in range(len(operand)) if d not in (*n.inserted_window_dims, *n.operand_batching_dims)]
    for d, k in zip(window, n.update_window_dims):
        if updates[k] == operand[d] and d not in n.scatter_dims_to_operand_dims:
            yield Group((Slot(False, 0, d), Slot(False, 2, k), Slot(True, 0, d)))
    for d in n.inserted_window_dims:  # addressed by number, counted over the whole
        yield Group((Slot(False, 0, d), Slot(True, 0, d)), MIXED)


_KNOWN = {
    "broadcast_in_dim": _broadcast, "dot_general": _dot, "reshape": _reshape, "transpose": _transpose,
    "squeeze": _squeeze, "iota": _iota, "gather": _gather, "scatter-add": _scatter,
}  # fmt: skip


class Mixes(Exception):
    """An equation that cannot be computed some rows at a time: `eqn` and why."""

    def __init__(self, eqn: Any, why: str):
        super().__init__(why)
        self.eqn, self.why = eqn, why


def rows_of(eqns: Sequence[Any], start: Any, dim: int) -> tuple[dict[Any, int], set[Any]]:
    """(variable -> the dimension of it that runs with dimension `dim` of `start`, results that are sums over it) in
    these equations. Raises Mixes for one that has the rows but does not keep them apart."""
    rows: dict[Any, int] = {start: dim}
    known = [(e, groups(e)) for e in eqns]
    before = 0
    while before != len(rows):
        before = len(rows)
        for eqn, found in known:
            for group in found or ():
                _spread(eqn, group, rows)
    sums: set[Any] = set()
    for eqn, found in known:
        _check(eqn, found, rows, sums)
    for eqn, _ in known:
        if any(is_var(a) and a in sums for a in eqn.invars):
            raise Mixes(eqn, "needs a sum over all rows")
    return rows, sums


def _spread(eqn: Any, group: Group, rows: dict[Any, int]) -> None:
    if not any(is_var(s.of(eqn)) and rows.get(s.of(eqn)) == s.dim for s in group.slots):
        return
    for s in group.slots:
        v = s.of(eqn)
        if is_var(v) and rows.setdefault(v, s.dim) != s.dim:
            raise Mixes(eqn, "reads the positions in two dimensions of one value")


def _check(eqn: Any, found: Sequence[Group] | None, rows: dict[Any, int], sums: set[Any]) -> None:
    atoms = [(False, k, a) for k, a in enumerate(eqn.invars)] + [(True, k, v) for k, v in enumerate(eqn.outvars)]
    held = {Slot(r, k, rows[a]) for r, k, a in atoms if is_var(a) and a in rows}
    if not held:
        return
    ruled = {s: g for g in found or () for s in g.slots}
    for slot in held:
        if slot not in ruled or ruled[slot].kind == MIXED:
            raise Mixes(eqn, "mixes positions")
        if ruled[slot].kind == SUMMED:
            sums.update(eqn.outvars)
        elif not all(s in held for s in ruled[slot].slots if is_var(s.of(eqn))):
            raise Mixes(eqn, "reads the positions in two dimensions of one value")
