"""Rules of lookups and updates by index: gather, scatter, dynamic slices.

A lookup of examples' indices in what is the same everywhere belongs to the examples. A lookup in the examples
themselves is theirs only where each example looks into itself: along batching dimensions, or by the local index.
"""

from __future__ import annotations

from typing import Any

from lensjax.program.edit import shape_of
from lensjax.program.status.elementwise import SHIFTED
from lensjax.program.status.interpreter import Interpreter, Rule
from lensjax.program.status.lattice import Status, part, partial, same, union, within
from lensjax.program.status.paired import Op


def _indices(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    """Operand 1 as an index vector where it is made of local indices, else as any value."""
    s, shape = ins[1], shape_of(op.invars[1])
    if s.kind == "C":
        return s
    if s.kind == "I" and shape[-1] == 1 and s.dim != len(shape) - 1:
        return Status("C", s.dim, 1, s.deps, parts=(s,))
    return an.total(op, 1, s)


def _local(s: Status, k: int) -> bool:
    """Whether component k of an index vector points at the share's own example."""
    if s.kind != "C" or k >= len(s.parts):
        return False
    found = s.parts[k]
    return found.kind == "I" and found.op != SHIFTED and (found.inner or 1) == 1


def _plain(op: Op, s: Status, used: int = -1) -> Status:
    """The index vector as a value of the examples. Local indices that are not used as such would need a shift."""
    if s.kind != "C":
        return s
    if any(p.kind == "I" and k != used for k, p in enumerate(s.parts)):
        raise op.refuse("an index along the batch used in a dimension that is not the batch")
    return part(s.dim, s.inner, s.deps)


def gather(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    numbers, o = op.params["dimension_numbers"], shape_of(op.outvars[0])
    x = shape_of(op.invars[0])
    idx, s = _indices(an, op, ins), ins[0]
    places = [d for d in range(len(o)) if d not in numbers.offset_dims]
    by_example = idx.kind in "BC"
    if s.kind in "PZ" and not by_example and not op.outs[0]:
        if s.kind == "Z" or within(idx.deps, s.deps):
            return s.on(s.deps | idx.deps)
        return same(an.total(op, 0, s).deps | idx.deps)
    if s.kind in "PMIC":
        s = an.total(op, 0, s)
    deps = s.deps | idx.deps
    if s.kind != "B" and op.ins[0]:
        s = part(op.ins[0][0], None, deps)
    if s.kind != "B":
        if not by_example:
            return same(deps)
        idx = _plain(op, idx)
        return an.result(op, 0, places[idx.dim], idx.inner, deps)
    if not by_example:
        if op.params["slice_sizes"][s.dim] != x[s.dim]:
            raise op.refuse("a lookup of particular examples")
        kept = [
            d for d in range(len(x)) if d not in numbers.collapsed_slice_dims and d not in numbers.operand_batching_dims
        ]
        return an.result(op, 0, numbers.offset_dims[kept.index(s.dim)], s.inner, deps)
    if s.dim in numbers.operand_batching_dims:
        k = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(s.dim)]
        idx = _plain(op, idx)
        if idx.dim != k:
            raise op.refuse("a lookup that meets two batch layouts")
        _, inner = an.layout(op, [s._replace(dim=0), idx._replace(dim=0)])
        return an.result(op, 0, places[k], inner, deps)
    if s.dim in numbers.start_index_map and (s.inner or 1) == 1:
        k = numbers.start_index_map.index(s.dim)
        if _local(idx, k) and x[s.dim] == an.full and op.params["slice_sizes"][s.dim] == 1:
            _plain(op, idx, k)
            return an.result(op, 0, places[idx.dim], s.inner, deps)
    raise op.refuse("mixes examples: a lookup in the batch by indices that are data")


def scatter(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    numbers = op.params["dimension_numbers"]
    adds = op.name in ("scatter-add", "scatter_add", "scatter-sub", "scatter_sub")
    x, u = shape_of(op.invars[0]), shape_of(op.invars[2])
    idx, s, up = _indices(an, op, ins), ins[0], ins[2]
    if s.kind in "IC" or up.kind in "IC":
        s, up = an.total(op, 0, s), an.total(op, 2, up)
    if up.kind == "Z" and op.ins[2]:
        up = part(op.ins[2][0], None, up.deps)
    deps = s.deps | up.deps | idx.deps
    places = [d for d in range(len(u)) if d not in numbers.update_window_dims]
    if idx.kind in "BC":
        return _scatter_by_example(an, op, idx, s, up, places, adds)
    if up.kind == "B" or s.kind == "B" or op.outs[0]:
        s, up = an.total(op, 0, s), an.total(op, 2, up)
        if not op.outs[0]:
            raise op.refuse("a scatter of particular examples")
        d = op.outs[0][0]
        window = [
            i for i in range(len(x)) if i not in numbers.inserted_window_dims and i not in numbers.operand_batching_dims
        ]
        if d not in window or u[numbers.update_window_dims[window.index(d)]] != x[d]:
            raise op.refuse("a scatter that writes particular examples")
        parts = [t._replace(dim=0) for t in (s, up) if t.kind == "B"]
        inner = an.layout(op, parts)[1] if parts else None
        return an.result(op, 0, d, inner, deps)
    if "P" in (s.kind, up.kind) or "M" in (s.kind, up.kind):
        linear = s.kind in "PZ" and up.kind in "PZ" and (adds or op.name == "scatter")
        if linear and within(idx.deps, s.deps | up.deps):
            return partial(deps)
        return same(an.total(op, 0, s).deps | an.total(op, 2, up).deps | idx.deps)
    return Status("Z", deps=deps) if s.kind == up.kind == "Z" and adds else same(deps)


def _scatter_by_example(
    an: Interpreter, op: Op, idx: Status, s: Status, up: Status, places: list[int], adds: bool
) -> Status:
    """Updates whose indices belong to examples: a sum into what is no batch is partial."""
    numbers = op.params["dimension_numbers"]
    if up.kind != "B":
        raise op.refuse("a scatter by the examples' indices of values that are not theirs")
    if idx.dim >= len(places) or places[idx.dim] != up.dim:
        raise op.refuse("a scatter that meets two batch layouts")
    an.layout(op, [up._replace(dim=0), idx._replace(dim=0)])
    deps = s.deps | up.deps | idx.deps
    if not op.outs[0]:
        if not adds:
            raise op.refuse(f"{op.name} over the batch: the last example wins")
        _plain(op, idx)
        if s.kind == "R":
            an.fixes["first", op, 0] = True
        if s.kind in "RZP":
            return partial(deps)
        raise op.refuse(f"{op.name} over the batch into {s}")
    d = op.outs[0][0]
    if s.kind in "PM" or (s.kind == "B" and s.dim != d):
        raise op.refuse("a scatter that meets two batch layouts")
    if s.kind == "B":
        an.layout(op, [s._replace(dim=0), up._replace(dim=0)])
    if d in numbers.operand_batching_dims:
        k = numbers.operand_batching_dims.index(d)
        if numbers.scatter_indices_batching_dims[k] == idx.dim:
            _plain(op, idx)
            return an.result(op, 0, d, up.inner, deps)
    if d in numbers.scatter_dims_to_operand_dims and (up.inner or 1) == 1:
        k = numbers.scatter_dims_to_operand_dims.index(d)
        if _local(idx, k) and shape_of(op.invars[0])[d] == an.full:
            _plain(op, idx, k)
            return an.result(op, 0, d, up.inner, deps)
    raise op.refuse("mixes examples: a scatter into the batch by indices that are data")


def dynamic_slice(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s, idx = ins[0], [an.total(op, i, t) for i, t in enumerate(ins) if i]
    if any(t.kind == "B" for t in idx):
        raise op.refuse("a slice whose start is an example's")
    at = union(idx)
    if s.kind in "PZ":
        if s.kind == "Z" or within(at, s.deps):
            return s.on(s.deps | at)
        return same(an.total(op, 0, s).deps | at)
    s = an.total(op, 0, s)
    if s.kind != "B":
        return same(s.deps | at)
    if op.params["slice_sizes"][s.dim] != shape_of(op.invars[0])[s.dim]:
        raise op.refuse("a slice of the batch")
    return an.result(op, 0, s.dim, s.inner, s.deps | at)


def dynamic_update_slice(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    s, up = ins[:2]
    idx = [an.total(op, i, t) for i, t in enumerate(ins) if i > 1]
    at = union(idx)
    if any(t.kind == "B" for t in idx):
        raise op.refuse("an update whose start is an example's")
    if not op.outs[0]:
        if s.kind in "PZ" and up.kind in "PZ" and within(at, s.deps | up.deps):
            deps = s.deps | up.deps | at
            return partial(deps) if "P" in (s.kind, up.kind) else Status("Z", deps=deps)
        return same(an.total(op, 0, s).deps | an.total(op, 1, up).deps | at)
    s, up = an.total(op, 0, s), an.total(op, 1, up)
    parts = [t for t in (s, up) if t.kind == "B"] or [part(op.outs[0][0], None)]
    dim, inner = an.layout(op, parts)
    if shape_of(op.invars[1])[dim] != shape_of(op.outvars[0])[dim]:
        raise op.refuse("an update of particular examples")
    return an.result(op, 0, dim, inner, s.deps | up.deps | at)


RULES: dict[str, Rule] = {
    "gather": gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub", "scatter-mul", "scatter_mul",
         "scatter-min", "scatter_min", "scatter-max", "scatter_max"), scatter,
    ),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}  # fmt: skip
