"""Comparisons of a value with what was selected from it read the same bits.

The gradient of a maximum looks for the place where `x == max(x)`; `x >= top_k(x)[-1]` keeps the largest. Compilers may
compute `x` once for the selection and again for the comparison, in another loop and with the last bit rounded otherwise
(XLA does, on CPU and on GPU); then no place is found, and a gradient is lost without a word. Splitting `x` makes that
likely, since a collective stands between the two. So such an `x` goes behind a barrier: it is made once, and both read
it. `x == maximum(x, y)` needs no barrier: it is `x >= y`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.program.edit import Builder, all_equations, bodies, is_var, map_bodies

_COMPARE = frozenset("eq ne lt le gt ge".split())
# What hands numbers on as they are, or by a function of each that rounds nothing twice.
_EXACT = frozenset(
    """broadcast_in_dim reshape squeeze expand_dims transpose rev copy sharding_constraint optimization_barrier slice
    dynamic_slice gather concatenate select_n pad abs neg convert_element_type name max min clamp
    custom_vmap_call""".split()  # the last: totals over shares (see `shares.Total`)
)
# What picks numbers by comparing them with others of the same value.
_SELECTING = frozenset("reduce_max reduce_min cummax cummin sort top_k approx_top_k reduce_window_max".split())


def _not_less(x, y):
    return jax.lax.ge(*jnp.broadcast_arrays(x, y))


def _not_more(x, y):
    return jax.lax.le(*jnp.broadcast_arrays(x, y))


_ELEMENTWISE: dict[str, Callable[..., Any]] = {"max": _not_less, "min": _not_more}
Made = dict[Any, Any]  # variable -> the equation of this body that makes it


def steady(jaxpr: Any) -> Any:
    """`jaxpr` with each value that is compared with a selection of itself made exactly once. The numbers are those of
    the equations as they stand."""
    if not any(e.primitive.name in _COMPARE and all(map(_rounded, e.invars)) for e in all_equations(jaxpr)):
        return jaxpr
    return _jax.rebuild(jaxpr, eqns=_body(_jax.open_jaxpr(jaxpr), arguments=False))


def compared(jaxpr: Any) -> list[str]:
    """The user's lines (`file.py:12`, or empty) whose comparisons make `steady` hold a value, each once."""
    every = [jaxpr, *(body for eqn in all_equations(jaxpr) for body in bodies(eqn))]
    return list(dict.fromkeys(line for body in every for line, _ in _compared(_jax.open_jaxpr(body))))


def _body(jaxpr: Any, arguments: bool) -> list[Any]:
    """The equations of a body. `arguments`: those of the body are no buffers when it starts (a remat's are not)."""
    hold = {v for _, v in _compared(jaxpr)}
    made, b = _made(jaxpr), Builder()
    for v in jaxpr.invars:
        if arguments and v in hold:
            _once(b, v, jaxpr.eqns[0])
    for eqn in jaxpr.eqns:
        remat = eqn.primitive.name in ("remat2", "checkpoint")
        eqn = map_bodies(
            eqn, lambda body, _, remat=remat: _jax.rebuild(body, eqns=_body(_jax.open_jaxpr(body), arguments=remat))
        )
        order = _ordered(eqn, made)
        if order is not None:
            b.env[eqn.outvars[0]] = b.apply(order[0], *b.read_all(order[1:]), like=eqn)[0]
            continue
        b.copy(eqn)
        for v in eqn.outvars:
            if v in hold:
                _once(b, v, eqn)
    # Results keep their variables, so that the body's outvars stay what they are.
    back = {new: old for old, new in b.env.items() if old not in jaxpr.invars}
    swap = back | {old: new for new, old in back.items()}
    if not swap:
        return b.eqns
    name = lambda a: swap.get(a, a) if is_var(a) else a
    return [e.replace(invars=[name(a) for a in e.invars], outvars=[name(v) for v in e.outvars]) for e in b.eqns]


def _once(b: Builder, v: Any, like: Any) -> None:
    b.env[v] = b.apply(jax.lax.optimization_barrier, v, like=like, name="lensjax.once")[0]


def _compared(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """(user line, value) of each comparison of one body in which a value meets a selection of itself."""
    made = _made(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _COMPARE and all(map(_rounded, eqn.invars)) and _ordered(eqn, made) is None:
            left, right = eqn.invars
            for v in _meeting(left, right, made):
                yield _jax.user_line(eqn, own=True), v


def _rounded(atom: Any) -> bool:
    return is_var(atom) and jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _made(jaxpr: Any) -> Made:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if not isinstance(v, jcore.DropVar)}


def _handed_on(v: Any, made: Made) -> tuple[list[Any], bool]:
    """(the values whose numbers `v` hands on, whether it selects among them)."""
    eqn = made.get(v)
    if eqn is None or eqn.primitive.name not in _EXACT | _SELECTING:
        return [], False
    return [a for a in eqn.invars if _rounded(a)], eqn.primitive.name in _SELECTING


def _meeting(left: Any, right: Any, made: Made) -> Iterator[Any]:
    """The nearest values whose numbers reach both sides, on one of them at least as a selection."""
    reached: dict[Any, set[bool]] = {}
    todo = [(left, False)]
    while todo:
        v, selected = todo.pop()
        if selected not in reached.setdefault(v, set()):
            reached[v].add(selected)
            below, selects = _handed_on(v, made)
            todo += [(a, selected or selects) for a in below]
    seen, todo = set(), [(right, False)]
    while todo:
        v, selected = todo.pop()
        if (v, selected) in seen:
            continue
        seen.add((v, selected))
        if v in reached and (selected or True in reached[v]):
            yield v
            continue
        below, selects = _handed_on(v, made)
        todo += [(a, selected or selects) for a in below]


def _ordered(eqn: Any, made: Made) -> tuple[Any, Any, Any] | None:
    """(comparison, x, y) for `x == maximum(x, y)`: `x >= y`, the same for every number (NaN too) and a function of the
    two alone; None for other equations."""
    if eqn.primitive.name != "eq" or not all(map(_rounded, eqn.invars)):
        return None
    for x, z in (eqn.invars, eqn.invars[::-1]):
        other = made.get(z)
        if other is not None and other.primitive.name in _ELEMENTWISE and any(a is x for a in other.invars):
            y = other.invars[1] if other.invars[0] is x else other.invars[0]
            return _ELEMENTWISE[other.primitive.name], x, y
    return None
