"""Rules of operations that move values without computing with them, and of sums over dimensions."""

from __future__ import annotations

import math
from typing import Any

from lensjax.program.edit import shape_of
from lensjax.program.status.interpreter import Interpreter, Rule
from lensjax.program.status.lattice import ZERO, Status, part, partial, same, union
from lensjax.program.status.paired import Op


def reshape(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    """The batch factor must land whole in one dimension: its stride, inner * the dimensions after it, tells where."""
    s, x, o = ins[0], shape_of(op.invars[0]), shape_of(op.outvars[0])
    if s.kind == "C":
        raise op.refuse("reshape of index vectors")
    if s.kind not in "BI":
        return s
    if len(op.outs[0]) != 1:
        raise op.refuse("a reshape splits the batch dimension, or merges it with itself")
    d = op.outs[0][0]
    if s.inner is None:
        return part(d, None, s.deps)
    stride, tail = s.inner * math.prod(x[s.dim + 1 :]), math.prod(o[d + 1 :])
    if stride % tail or o[d] % (stride // tail * an.full):
        raise op.refuse("a reshape splits the batch dimension")
    return Status(s.kind, d, stride // tail, s.deps)


def transpose(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s = ins[0]
    return s._replace(dim=list(op.params["permutation"]).index(s.dim)) if s.kind in "BI" else _whole(an, op, s)


def squeeze(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s = ins[0]
    return s._replace(dim=s.dim - sum(d < s.dim for d in op.params["dimensions"])) if s.kind in "BI" else s


def expand_dims(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s = ins[0]
    return s._replace(dim=op.outs[0][0]) if s.kind in "BI" else s


def broadcast_in_dim(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s = ins[0]
    if s.kind in "BI":
        dim = op.params["broadcast_dimensions"][s.dim]
        return an.result(op, 0, dim, s.inner, s.deps)._replace(kind=s.kind)
    if not op.outs[0]:
        return _whole(an, op, s)
    if len(op.outs[0]) > 1:
        raise op.refuse("mixes examples: a broadcast to two batch dimensions")
    if s.kind == "Z":
        return s
    return part(op.outs[0][0], None, an.total(op, 0, s).deps)


def _whole(an: Interpreter, op: Op, s: Status) -> Status:
    if s.kind == "C":
        raise op.refuse(f"{op.name} of index vectors")
    return s


def slice_(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s = ins[0]
    if s.kind not in "BI":
        return _whole(an, op, s)
    s = an.total(op, 0, s)
    d, strides = s.dim, op.params["strides"]
    x, o = shape_of(op.invars[0]), shape_of(op.outvars[0])
    if strides is not None and strides[d] != 1:
        raise op.refuse("a strided slice of the batch")
    if x[d] != o[d]:
        # Whole units of the batch only: a part of a dimension that is outer x batch.
        small, full = an.small * (s.inner or 1), an.full * (s.inner or 1)
        for key in ("start_indices", "limit_indices"):
            a, b = op.small[key][d], op.params[key][d]
            if a % small or b % full or a // small != b // full:
                raise op.refuse("a slice that selects particular examples")
    return an.result(op, 0, d, s.inner, s.deps)


def pad(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s, value = ins
    if s.kind in "BI":
        s, value = an.totals(op, ins)
        low, high, between = op.params["padding_config"][s.dim]
        if (low, high, between) != (0, 0, 0):
            small, full = an.small * (s.inner or 1), an.full * (s.inner or 1)
            before, after, _ = op.small["padding_config"][s.dim]
            whole = all(n >= 0 and n % full == 0 and m * full == n * small for n, m in ((low, before), (high, after)))
            if between or not whole:
                raise op.refuse("padding of the batch dimension")
        return an.result(op, 0, s.dim, s.inner, union((s, value)))
    if s.kind in "PM" and (value.kind != "Z" or s.kind == "M"):
        return same(union((an.total(op, 0, s), an.total(op, 1, value))))
    if value.kind in "PM":
        return same(union((an.total(op, 0, s), an.total(op, 1, value))))
    if s.kind == "Z" and value.kind != "Z":
        return same(union(ins))
    return s


def rev(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s = ins[0]
    if s.kind in "BI" and s.dim in op.params["dimensions"]:
        raise op.refuse("the batch in reverse order")
    return an.total(op, 0, s) if s.kind == "I" else s


def _together(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    """Partial values put together without a batch: partial where all are (or zero)."""
    kinds = {s.kind for s in ins}
    if kinds <= {"P", "Z"}:
        return partial(union(ins)) if "P" in kinds else ZERO
    return same(union(an.totals(op, ins)))


def concatenate(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    axis, rank = op.params["dimension"], len(shape_of(op.outvars[0]))
    dims = op.outs[0]
    last = axis == rank - 1
    if dims and dims != (axis,) and last and any(s.kind in "IC" for s in ins) and all(s.kind in "ICBRZ" for s in ins):
        parts: list[Status] = []
        for a, s in zip(op.invars, ins):
            parts += list(s.parts) if s.kind == "C" else [s] * shape_of(a)[axis]
        return Status("C", dims[0], 1, union(ins), parts=tuple(parts))
    if not dims:
        return _together(an, op, ins)
    ins = an.totals(op, ins)
    if len(dims) > 1:
        raise op.refuse("mixes examples: concatenate has two batch dimensions")
    parts = [s for s in ins if s.kind == "B"] or [part(dims[0], None)]
    dim, inner = an.layout(op, parts)
    if dim == axis and (inner is None or not all(op.ins)):
        raise op.refuse("a concatenation along the batch with something that is no batch")
    return an.result(op, 0, dim, inner, union(ins))


def stack(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    axis, dims = op.params["axis"], op.outs[0]
    if not dims:
        return _together(an, op, ins)
    if axis == len(shape_of(op.outvars[0])) - 1 and any(s.kind == "I" for s in ins):
        return Status("C", dims[0], 1, union(ins), parts=tuple(ins))
    ins = an.totals(op, ins)
    dim, inner = an.layout(op, [s for s in ins if s.kind == "B"] or [part(op.ins[0][0], None)])
    return an.result(op, 0, dim + (dim >= axis), inner, union(ins))


def unstack(an: Interpreter, op: Op, ins: list[Status]) -> list[Status]:
    s, axis = an.total(op, 0, ins[0]) if ins[0].kind in "IC" else ins[0], op.params["axis"]
    if s.kind == "B":
        if s.dim == axis:
            raise op.refuse("the batch taken apart into examples")
        s = s._replace(dim=s.dim - (s.dim > axis))
    return [s] * len(op.outs)


def split(an: Interpreter, op: Op, ins: list[Status]) -> list[Status]:
    s = an.total(op, 0, ins[0]) if ins[0].kind in "IC" else ins[0]
    if s.kind == "B" and s.dim == op.params["axis"]:
        raise op.refuse("the batch split into pieces")
    return [s] * len(op.outs)


def tile(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s = ins[0]
    if s.kind in "BI":
        s = an.total(op, 0, s)
        return an.result(op, 0, s.dim, s.inner, s.deps)  # repeated along the batch: one more outer factor
    if not op.outs[0]:
        return _whole(an, op, s)
    if len(op.outs[0]) > 1:
        raise op.refuse("mixes examples: a value repeated along two batch dimensions")
    if s.kind == "Z":
        return s
    d = op.outs[0][0]
    period, length = shape_of(op.invars[0])[d], shape_of(op.outvars[0])[d]
    if period > 1 and length // period % an.full:
        raise op.refuse("a pattern repeated along the batch, not a whole number of times for an example")
    return part(d, None if period == 1 else length // an.full, an.total(op, 0, s).deps)


def iota(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    dims = op.outs[0]
    if not dims:
        return same()
    if len(dims) > 1:
        raise op.refuse("an index over two batch dimensions")
    if dims[0] != op.params["dimension"]:
        return part(dims[0], None)
    if an.outer > 1:
        raise op.refuse("an index along a batch that is split by the step itself")
    return Status("I", dims[0], shape_of(op.outvars[0])[dims[0]] // an.full)


# ---- sums and other reductions ------------------------------------------------------------------------------------

_EXTREMES = {"reduce_max": "max", "reduce_min": "min", "reduce_or": "or", "reduce_and": "and"}


def reduce(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    """Over the batch a sum is partial; a maximum, minimum, or, and are extremes; others need every example at once."""
    name, axes, s = op.name, op.params["axes"], ins[0]
    if name == "reduce_sum" and s.kind in "PZR":
        return s
    if s.kind == "M" and _EXTREMES.get(name) == s.op:
        return s
    s = an.total(op, 0, s)
    if s.kind == "Z" and op.ins[0]:
        s = part(op.ins[0][0], None, s.deps)
    if s.kind != "B":
        return same(s.deps)
    if s.dim not in axes:
        return an.result(op, 0, s.dim - sum(a < s.dim for a in axes), s.inner, s.deps)
    if name == "reduce_sum":
        return partial(s.deps)
    if name in _EXTREMES:
        return Status("M", deps=s.deps, op=_EXTREMES[name])
    raise op.refuse(f"{name} over the batch")


def argmax(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    s, axes = an.total(op, 0, ins[0]), op.params["axes"]
    if s.kind != "B":
        return same(s.deps)
    if s.dim in axes:
        raise op.refuse(f"{op.name} over the batch")
    return an.result(op, 0, s.dim - sum(a < s.dim for a in axes), s.inner, s.deps)


def cumulate(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    if op.name == "cumsum" and ins[0].kind in "PZR":
        return ins[0]
    s = an.total(op, 0, ins[0])
    if s.kind != "B":
        return same(s.deps)
    if s.dim == op.params["axis"]:
        raise op.refuse(f"{op.name} over the batch")
    return s


def sort(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    ins = an.totals(op, ins)
    parts = [s for s in ins if s.kind == "B"]
    if not parts:
        return [same(union(ins))] * len(op.outs)
    dim, inner = an.layout(op, parts)
    if dim == op.params["dimension"]:
        raise op.refuse("a sort over the batch")
    return [an.result(op, k, dim, inner, union(ins)) for k in range(len(op.outs))]


def top_k(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    s, rank = an.total(op, 0, ins[0]), len(shape_of(op.invars[0]))
    if s.kind != "B":
        return [same(s.deps)] * len(op.outs)
    if s.dim == op.params.get("axis", rank - 1) % rank:
        raise op.refuse("top_k over the batch")
    return [an.result(op, k, s.dim, s.inner, s.deps) for k in range(len(op.outs))]


def window(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    if op.name == "reduce_window_sum" and ins[0].kind in "PZR":
        return ins[0]
    ins = an.totals(op, ins)
    parts = [s for s in ins if s.kind == "B"]
    if not parts:
        return [same(union(ins))] * len(op.outs)
    dim, inner = an.layout(op, parts)
    if op.params["window_dimensions"][dim] != 1:
        raise op.refuse("a window over the batch")
    for key in ("window_strides", "base_dilation", "window_dilation"):
        if op.params.get(key) is not None and op.params[key][dim] != 1:
            raise op.refuse("a strided window over the batch")
    return [an.result(op, k, dim, inner, union(ins)) for k in range(len(op.outs))]


RULES: dict[str, Rule] = {
    "reshape": reshape, "transpose": transpose, "squeeze": squeeze, "expand_dims": expand_dims,
    "broadcast_in_dim": broadcast_in_dim, "slice": slice_, "pad": pad, "rev": rev, "concatenate": concatenate,
    "stack": stack, "unstack": unstack, "split": split, "tile": tile, "iota": iota, "argmax": argmax,
    "argmin": argmax, "sort": sort, "top_k": top_k,
    **dict.fromkeys(("reduce_sum", "reduce_prod", "reduce_xor", *_EXTREMES), reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), cumulate),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_scatter_add",
         "select_and_gather_add"), window,
    ),
}  # fmt: skip
