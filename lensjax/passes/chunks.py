"""The head in chunks: logits, loss and the gradients of both, some positions at a time, in one loop.

The program holds forward and backward, and the head's backward needs nothing that its forward has not made for the same
positions. So a chunk's logits live for one trip: loss and gradient come out of it together, and nothing is made twice.
Gradients of weights are summed over the trips in float32, each device its own part of the batch: what crosses the
devices crosses once, after the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.passes.pin import activation_rules
from lensjax.passes.reduce import start, wide
from lensjax.passes.shardings import batch_axes, ways
from lensjax.plan.plan import Plan
from lensjax.program.edit import is_var, shape_of, splice
from lensjax.program.head import Head, NoHead, find_head
from lensjax.program.program import Program
from lensjax.program.values import results

_NAME = "lensjax.chunk"


def chunks(program: Program, plan: Plan) -> Program:
    """`program` with its head in `plan.chunks` parts; the same object for one. Raises PlanError with the reason where
    that cannot be."""
    if plan.chunks == 1:
        return program
    head = head_of(program, plan)
    if isinstance(head, NoHead):
        raise PlanError(
            f"field 'chunks' is {plan.chunks}, and the head cannot be computed in parts: {head.reason}",
            hint="set it to 1; more micro-batches (micro.count) have smaller logits too",
        )
    if head.length % plan.chunks:
        raise PlanError(
            f"field 'chunks' is {plan.chunks}, which does not divide the {head.length} positions of the logits "
            f"{head.logits.aval.str_short()}",
            hint="parts are equal: take a number that divides them",
        )
    return _rewritten(program, plan, head)


def head_of(program: Program, plan: Plan) -> Head | NoHead:
    """The head that a plan can compute in parts, or why there is none."""
    return find_head(program, frozenset(axis for axis, mesh in activation_rules(program, plan) if mesh))


def _rewritten(program: Program, plan: Plan, head: Head) -> Program:
    inner = _jax.open_jaxpr(program.jaxpr)
    eqns = [inner.eqns[i] for i in head.equations]
    loop = _Loop(program, head, eqns, plan.chunks, ways(plan, batch_axes(plan)))
    closed = jax.make_jaxpr(loop)(*(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in head.inputs))
    like = inner.eqns[head.equations[0]]
    facts = _Facts(program, eqns, head)
    into: list[Any] = []
    made = splice(into, _sourced(closed, eqns, like), head.inputs, lambda e: e.source_info)
    facts.read(into)
    new = dict(zip(head.outputs, made))
    for old, v in new.items():
        facts.same(v, old)
    return facts.applied(_in_order(program.jaxpr, head, into, new))


def _in_order(jaxpr: Any, head: Head, loop: Sequence[Any], new: dict[Any, Any]) -> Any:
    """The body with the loop in the place of the head: behind everything that it reads, before what reads it."""
    inner = _jax.open_jaxpr(jaxpr)
    gone, last = set(head.equations), head.equations[-1]
    renamed = lambda e: e.replace(invars=[new.get(a, a) if is_var(a) else a for a in e.invars])
    before, after, late, ordered = [], [], set(new), False
    for i, eqn in enumerate(inner.eqns):
        if i in gone:
            continue
        if i > last or any(is_var(a) and a in late for a in eqn.invars) or (eqn.effects and ordered):
            ordered = ordered or bool(eqn.effects)
            late.update(results(eqn))
            after.append(renamed(eqn))
        else:
            before.append(eqn)
    outs = [new.get(a, a) if is_var(a) else a for a in inner.outvars]
    return _jax.rebuild(jaxpr, eqns=[*before, *loop, *after], outvars=outs)


class _Loop:
    """The head as a function of its inputs, to be traced. `parts`: of the batch, each on its own devices."""

    def __init__(self, program: Program, head: Head, eqns: Sequence[Any], count: int, parts: int):
        self.program, self.head, self.eqns = program, head, eqns
        self.count, self.size, self.parts = count, head.length // count, parts
        self.summed = [v for v in head.outputs if v in head.sums]
        self.stacked = [v for v in head.outputs if v in head.rows and v not in head.sums]

    def __call__(self, *inputs):
        rows = self.head.rows
        given = dict(zip(self.head.inputs, inputs))
        whole = {v: x for v, x in given.items() if v not in rows}
        cut = [v for v in given if v in rows]

        def trip(totals, parts):
            env = {**whole, **dict(zip(cut, parts))}
            for k, eqn in enumerate(self.eqns):
                with jax.named_scope(f"{_NAME}.{k}."):
                    self.step(eqn, env)
            return [t + env[v] for t, v in zip(totals, self.summed)], [env[v] for v in self.stacked]

        zeros = [start("sum", v.aval.dtype, self.total_shape(v)) for v in self.summed]
        totals, stacks = jax.lax.scan(trip, zeros, [self.parted(given[v], rows[v]) for v in cut])
        out: dict[Any, Any] = {v: self.joined(x, rows[v]) for v, x in zip(self.stacked, stacks)}
        for v, total in zip(self.summed, totals):
            out[v] = (total.sum(0) if self.apart(v) is not None else total).astype(v.aval.dtype)
        return [out[v] for v in self.head.outputs]

    def parted(self, x, row):
        """[..., length, ...] -> [count, ..., size, ...]"""
        return jnp.moveaxis(x.reshape(*x.shape[:row], self.count, self.size, *x.shape[row + 1 :]), row, 0)

    def joined(self, x, row):
        x = jnp.moveaxis(x, 0, row)
        return x.reshape(*x.shape[:row], self.head.length, *x.shape[row + 2 :])

    def step(self, eqn: Any, env: dict[Any, Any]) -> None:
        ins = [env[a] if is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in eqn.invars]
        if any(v in self.head.sums for v in eqn.outvars):
            env[eqn.outvars[0]] = self.partial(eqn, ins)
            return
        ins = [a.val if not is_var(a) else x for a, x in zip(eqn.invars, ins)]
        out = eqn.primitive.bind(*ins, **self.params(eqn))
        env.update(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out]))

    def params(self, eqn: Any) -> dict[str, Any]:
        """The parameters that hold shapes, at the size of a chunk."""
        params, out = dict(eqn.params), eqn.outvars[0]
        row = self.head.rows.get(out)
        for key in ("shape", "new_sizes"):
            if key in params and row is not None:
                params[key] = tuple(self.size if d == row else n for d, n in enumerate(params[key]))
        if "slice_sizes" in params:
            at = self.head.rows.get(eqn.invars[0])
            batching = eqn.params["dimension_numbers"].operand_batching_dims
            params["slice_sizes"] = tuple(
                self.size if d == at and d not in batching else n for d, n in enumerate(params["slice_sizes"])
            )
        return params

    # ---- sums over the rows --------------------------------------------------------------------------------------

    def apart(self, v: Any) -> int | None:
        """Which sum over the batch as well: those stay apart, one for each part of the batch. None: the sum does not
        run over the batch, or the batch is whole."""
        if self.parts == 1:
            return None
        eqn = next(e for e in self.eqns if v in e.outvars)
        if v in self.program.batch.dims:
            return None
        plain = self.program.batch.plain(eqn.invars[0])
        return plain[0] if plain else None

    def total_shape(self, v: Any) -> tuple[int, ...]:
        return (self.parts, *shape_of(v)) if self.apart(v) is not None else shape_of(v)

    def partial(self, eqn: Any, ins: list[Any]) -> Any:
        v = eqn.outvars[0]
        batch = self.apart(v)
        if eqn.primitive.name == "reduce_sum":
            x, axes = wide("sum", ins[0]), eqn.params["axes"]
            if batch is None:
                return x.sum(axes)
            x = x.reshape(*x.shape[:batch], self.parts, -1, *x.shape[batch + 1 :])
            axes = tuple(d if d < batch else d + 1 for d in axes)
            return jnp.moveaxis(x, batch, 0).sum([_moved(d, batch) for d in axes])
        numbers = eqn.params["dimension_numbers"]
        if batch is not None:
            ins, numbers = self._apart(ins, numbers, batch)
        params = {**eqn.params, "dimension_numbers": numbers}
        return wide("sum", eqn.primitive.bind(*ins, **params))

    def _apart(self, ins: list[Any], numbers: Any, batch: int) -> tuple[list[Any], Any]:
        """The same matmul with the parts of the batch as a batch dimension, first in the result."""
        (left, right), (left_batch, right_batch) = numbers
        at = (batch, right[left.index(batch)])
        split = [x.reshape(*x.shape[:d], self.parts, -1, *x.shape[d + 1 :]) for x, d in zip(ins, at)]
        moved = [[d if d < a else d + 1 for d in dims] for dims, a in zip((left, right), at)]
        first = [[a, *(d if d < a else d + 1 for d in dims)] for dims, a in zip((left_batch, right_batch), at)]
        return split, ((tuple(moved[0]), tuple(moved[1])), (tuple(first[0]), tuple(first[1])))


def _moved(d: int, batch: int) -> int:
    """Where dimension `d` is once dimension `batch` is the first."""
    return d if d > batch else d + 1


# ---- what the rest of the passes know of it --------------------------------------------------------------------------


def _number(eqn: Any) -> int | None:
    """Which equation of the head an equation of the loop stands for."""
    name = str(eqn.source_info.name_stack)
    at = name.rfind(_NAME + ".")
    return int(name[at + len(_NAME) + 1 :].split(".", 1)[0]) if at >= 0 else None


def _sourced(jaxpr: Any, eqns: Sequence[Any], like: Any) -> Any:
    """The traced loop with each equation's user line and name taken from the one that it stands for."""
    inner = _jax.open_jaxpr(jaxpr)
    out = []
    for eqn in inner.eqns:
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"]
            found = [_renamed(e, eqns, like) for e in _jax.open_jaxpr(body).eqns]
            eqn = eqn.replace(params={**eqn.params, "jaxpr": _jax.rebuild(body, eqns=found)})
        out.append(eqn.replace(source_info=like.source_info))
    assert not _jax.constants(jaxpr)
    return _jax.rebuild(jaxpr, eqns=out)


def _renamed(eqn: Any, eqns: Sequence[Any], like: Any) -> Any:
    number = _number(eqn)
    source = (eqns[number] if number is not None else like).source_info
    suffix = f"{_NAME}.{number}." if number is not None else _NAME
    return eqn.replace(source_info=source.replace(name_stack=source.name_stack.extend(suffix)))


class _Facts:
    """What the program knows of the loop's values: what it knew of those that they stand for."""

    def __init__(self, program: Program, eqns: Sequence[Any], head: Head):
        self.program, self.eqns, self.head = program, eqns, head
        self.pairs: dict[Any, Any] = {}
        self.read_by_loop: list[Any] = []

    def same(self, new: Any, old: Any) -> None:
        self.pairs[new] = old

    def read(self, loop: Sequence[Any]) -> None:
        scan = next(e for e in loop if e.primitive.name == "scan")
        body = _jax.open_jaxpr(scan.params["jaxpr"])
        consts, _ = _jax.scan_split(scan)
        for v, a in zip(body.invars[:consts], scan.invars[:consts]):
            self.same(v, a)
            self.read_by_loop.append(v)
        for eqn in body.eqns:
            number = _number(eqn)
            old = self.eqns[number] if number is not None else None
            if old is None or old.outvars[0] in self.head.sums or old.primitive is not eqn.primitive:
                continue
            for v, o in zip(eqn.outvars, old.outvars):
                self.same(v, o)

    def applied(self, jaxpr: Any) -> Program:
        program = self.program
        dims, depends = dict(program.batch.dims), dict(program.depends)
        compute = {*program.compute, *self.read_by_loop}
        known = program.__dict__.get("logical")
        axes = dict(known.dims) if known is not None else {}
        for table in (dims, depends, axes):
            _copied(table, self.pairs)
        compute.update(new for new, old in self.pairs.items() if old in compute)
        batch = dataclasses.replace(program.batch, dims=dims)
        made = dataclasses.replace(program, jaxpr=jaxpr, batch=batch, depends=depends, compute=frozenset(compute))
        if known is not None:
            made.__dict__["logical"] = dataclasses.replace(known, dims=axes)
        return made


def _copied(table: dict[Any, Any], pairs: dict[Any, Any]) -> None:
    table.update({new: table[old] for new, old in pairs.items() if old in table})
