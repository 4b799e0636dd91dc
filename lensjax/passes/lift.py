"""The numbers of a step that depend on the size of its batch, as arguments of it.

A mean is divided by the number of examples, which stands in the traced program as a literal: another size is another
program. Where the two traces of a step have different literals in one place, an argument takes their place here. The
programs of several sizes are then the same in that place, and get their own numbers when they run.

Nothing is assumed about how a number depends on the size: every size brings its own, from its own trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lensjax import _jax
from lensjax.program.edit import bodies, is_var, shape_of
from lensjax.program.flow import dependencies
from lensjax.program.program import Program
from lensjax.program.roles import Argument
from lensjax.program.status.paired import differs


@dataclasses.dataclass(frozen=True)
class Lifted:
    """`program`: the step with one more argument for each of `values`, after its own; they are what the literals
    were."""

    program: Program
    values: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class _Found:
    """A literal that became a variable, in the full trace and in the small one."""

    value: np.ndarray
    full: Any
    small: Any


def lift(program: Program) -> Lifted:
    """Literals that differ between the two traces of `program`, at every depth, as arguments. A while loop's condition
    keeps its own; so does a program that was traced at one size only."""
    second = program.batch.second
    if second is None:
        return Lifted(program, ())
    full, small, found = _lifted(program.jaxpr, second)
    full = _with_arguments(full, [], [f.full for f in found])
    small = _with_arguments(small, [], [f.small for f in found])
    more = tuple(
        Argument(f"lensjax/size/{k}", shape_of(f.full), f.full.aval.dtype, "other") for k, f in enumerate(found)
    )
    lifted = dataclasses.replace(
        program,
        jaxpr=full,
        arguments=(*program.arguments, *more),
        batch=dataclasses.replace(program.batch, second=small),
        depends=dependencies(full),
    )
    return Lifted(lifted, tuple(f.value for f in found))


def _lifted(full: Any, small: Any) -> tuple[Any, Any, list[_Found]]:
    """Both traces of a body with variables in place of the literals, and those variables, which nothing binds yet."""
    a, b = _jax.open_jaxpr(full), _jax.open_jaxpr(small)
    found: list[_Found] = []

    def atoms(xs: Sequence[Any], ys: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = [_variable(x, y, found) for x, y in zip(xs, ys, strict=True)]
        return [x for x, _ in pairs], [y for _, y in pairs]

    eqns = ([], [])
    for e, f in zip(a.eqns, b.eqns, strict=True):
        ins, others = atoms(e.invars, f.invars)
        e, f = e.replace(invars=ins), f.replace(invars=others)
        e, f = _with_bodies(e, f, found)
        eqns[0].append(e)
        eqns[1].append(f)
    outs, others = atoms(a.outvars, b.outvars)
    return (
        _jax.rebuild(full, eqns=eqns[0], outvars=outs),
        _jax.rebuild(small, eqns=eqns[1], outvars=others),
        found,
    )


def _variable(x: Any, y: Any, found: list[_Found]) -> tuple[Any, Any]:
    if is_var(x) or is_var(y) or shape_of(x) != shape_of(y) or not differs(x, y):
        return x, y
    try:
        value = np.asarray(x.val, x.aval.dtype)
    except TypeError:  # a key, which numpy does not know: it stays a literal
        return x, y
    found.append(_Found(value, _jax.new_var(x.aval), _jax.new_var(y.aval)))
    return found[-1].full, found[-1].small


def _with_bodies(e: Any, f: Any, found: list[_Found]) -> tuple[Any, Any]:
    """The equation with its bodies lifted: what was found in one is one more operand of all."""
    pairs = list(zip(bodies(e), bodies(f), strict=True))
    condition = [pairs.pop(0)] if e.primitive.name == "while" else []  # takes no operand of its own
    made = [_lifted(p, q) for p, q in pairs]
    if not any(inner for _, _, inner in made):
        return e, f
    outer = [
        _Found(x.value, _jax.new_var(x.full.aval), _jax.new_var(x.small.aval)) for _, _, inner in made for x in inner
    ]
    found += outer
    fulls, smalls, at = [p for p, _ in condition], [q for _, q in condition], 0
    for p, q, inner in made:  # a body binds its own variables, and takes those of the others without a use
        first, last = outer[:at], outer[at + len(inner) :]
        for bodies_, body, side in ((fulls, p, "full"), (smalls, q, "small")):
            unused = lambda xs, side=side: [_jax.new_var(getattr(x, side).aval) for x in xs]
            bodies_.append(_with_arguments(body, [*unused(first), *(getattr(x, side) for x in inner), *unused(last)]))
        at += len(inner)
    return (
        _jax.add_operands(e, [x.full for x in outer], fulls),
        _jax.add_operands(f, [x.small for x in outer], smalls),
    )


def _with_arguments(jaxpr: Any, before: Sequence[Any], after: Sequence[Any] = ()) -> Any:
    return _jax.rebuild(jaxpr, invars=[*before, *_jax.open_jaxpr(jaxpr).invars, *after])
