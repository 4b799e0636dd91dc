"""The head of a step: the matmul that makes logits, the loss made of them, and what the backward makes of both.

Logits are the largest values of a language model's step: [batch, positions, vocabulary], several times. What is
computed of them is computed position by position, forward and backward, up to sums. Nothing here knows a loss by name:
the head is every equation between the first that makes a value of the logits' shape and the last that reads one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from jax import numpy as jnp

from lensjax import _jax
from lensjax.program.edit import bodies, is_var, shape_of
from lensjax.program.program import Program
from lensjax.program.rows import SUMMED, Mixes, groups, rows_of
from lensjax.program.values import nbytes, results


@dataclasses.dataclass(frozen=True)
class Head:
    """`equations`: positions in the program's body, in order; `logits`: the largest value, `row` the dimension of it
    along which it can be computed in parts (positions), of size `length`; `large`: all values of its shape; `rows`:
    variable -> its dimension of rows; `sums`: results that are sums over the rows; `inputs`: read and made elsewhere;
    `outputs`: made here and read elsewhere."""

    equations: tuple[int, ...]
    logits: Any
    row: int
    length: int
    large: frozenset[Any]
    rows: dict[Any, int]
    sums: frozenset[Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


class NoHead(NamedTuple):
    """Why the head cannot be computed in parts; `logits`: where there are some."""

    reason: str
    logits: Any = None


def find_head(program: Program, whole: Set[int] = frozenset()) -> Head | NoHead:
    """The head of a program, or why there is none that can be computed in parts. `whole`: logical axes that the plan
    splits, along which nothing is cut."""
    inner = _jax.open_jaxpr(program.jaxpr)
    at = _logits(program, inner)
    if at is None:
        return NoHead("no matmul outside of the layers makes a value that is larger than the part of the batch in it")
    eqn = inner.eqns[at]
    logits = eqn.outvars[0]
    no = lambda reason: NoHead(reason, logits)
    line = _jax.user_line(eqn)
    kept, made = _dimensions(program, eqn)
    free = [d for d in kept if d not in program.batch.dims.get(logits, ())]
    if whole:
        free = [d for d in free if program.logical.major(logits, d) not in whole]
    if not free or not made:
        return no(
            f"the logits {logits.aval.str_short()} of {line} have no dimension of positions by itself: only the "
            "batch's, one merged with it, or one that the plan splits"
        )
    row = max(free, key=lambda d: shape_of(logits)[d])
    column = max(made, key=lambda d: shape_of(logits)[d])
    large = _alike(inner, logits, row, column)
    if any(v in large for v in inner.outvars if is_var(v)):
        return no(f"the step returns its logits {logits.aval.str_short()} ({line})")
    positions = _between(inner, large)
    eqns = [inner.eqns[i] for i in positions]
    for e in eqns:
        if e.effects or any(True for _ in bodies(e)):
            return no(f"{_named(e)} stands between the logits and their gradient")
    try:
        rows, sums = rows_of(eqns, logits, row)
    except Mixes as e:
        return no(f"{_named(e.eqn)} {e.why}")
    own = {v for e in eqns for v in results(e)}
    read = {a for i, e in enumerate(inner.eqns) if i not in set(positions) for a in e.invars if is_var(a)}
    read |= {a for a in inner.outvars if is_var(a)}
    inputs = tuple(dict.fromkeys(a for e in eqns for a in e.invars if is_var(a) and a not in own))
    outputs = tuple(v for e in eqns for v in results(e) if v in read)
    if loose := next((v for v in outputs if v not in rows and v not in sums), None):
        return no(f"a value {loose.aval.str_short()} that does not depend on the positions is made among the logits")
    length = shape_of(logits)[row]
    return Head(tuple(positions), logits, row, length, frozenset(large), rows, frozenset(sums), inputs, outputs)


def _named(eqn: Any) -> str:
    line = _jax.user_line(eqn)
    return f"{eqn.primitive.name} at {line}" if line else eqn.primitive.name


def _logits(program: Program, inner: Any) -> int | None:
    """The position of the matmul with the largest result that has the batch and outgrows its operands."""
    best, found = 0, None
    for i, eqn in enumerate(inner.eqns):
        if eqn.primitive.name != "dot_general" or eqn.params["dimension_numbers"][1][0]:
            continue
        out = eqn.outvars[0]
        batched = [a for a in eqn.invars if is_var(a) and a in program.batch.dims]
        if len(batched) != 1 or out not in program.batch.dims or not jnp.issubdtype(out.aval.dtype, jnp.floating):
            continue
        if math.prod(shape_of(out)) > math.prod(shape_of(batched[0])) and nbytes(out) > best:
            best, found = nbytes(out), i
    return found


def _dimensions(program: Program, eqn: Any) -> tuple[list[int], list[int]]:
    """Dimensions of a matmul's result that come from the operand with the batch, and from the other."""
    known = groups(eqn) or ()
    kept, made = [], []
    for group in known:
        out = [s.dim for s in group.slots if s.result]
        source = [s.of(eqn) for s in group.slots if not s.result]
        (kept if source and is_var(source[0]) and source[0] in program.batch.dims else made).extend(out)
    return kept, made


def _alike(inner: Any, logits: Any, row: int, column: int) -> set[Any]:
    """Values that have the logits' rows and columns."""
    touching: dict[Any, list[Any]] = {}
    for eqn in inner.eqns:
        for a in {*filter(is_var, eqn.invars), *results(eqn)}:
            touching.setdefault(a, []).append(eqn)
    found = {logits: (row, column)}
    todo = [logits]
    while todo:
        value = todo.pop()
        for eqn in touching.get(value, ()):
            known = groups(eqn) or ()
            sides = [
                {s.of(eqn): s.dim for g in known if g.kind != SUMMED and _has(eqn, g.slots, value, d) for s in g.slots}
                for d in found[value]
            ]
            for v in sides[0].keys() & sides[1].keys():
                if is_var(v) and v not in found:
                    found[v] = (sides[0][v], sides[1][v])
                    todo.append(v)
    return set(found)


def _has(eqn: Any, slots: Sequence[Any], value: Any, dim: int) -> bool:
    return any(s.of(eqn) is value and s.dim == dim for s in slots)


def _between(inner: Any, large: Set[Any]) -> list[int]:
    """Equations that read or make a large value, and all on a way from one of them to another."""
    touch = lambda e: any(is_var(a) and a in large for a in (*e.invars, *e.outvars))
    core = {i for i, e in enumerate(inner.eqns) if touch(e)}
    after: set[Any] = set()
    behind = set()
    for i, e in enumerate(inner.eqns):
        if i in core or any(is_var(a) and a in after for a in e.invars):
            after.update(results(e))
            behind.add(i)
    before: set[Any] = set()
    found = []
    for i in reversed(range(len(inner.eqns))):
        e = inner.eqns[i]
        if i in core or (i in behind and any(v in before for v in results(e))):
            found.append(i)
        if i in core or any(v in before for v in results(e)):
            before.update(filter(is_var, e.invars))
    return found[::-1]
