"""Data flow: which arguments each value depends on, through loops, branches and remat.

Sets of arguments are Python integers used as bit sets: bit i stands for argument i of the whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lensjax import _jax
from lensjax.program.edit import body_operands, is_var

# Equations that work element by element: the shape stays, and each element has its own history.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos
    cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul
    ne neg nextafter not optimization_barrier or pow real reduce_precision rem round rsqrt select_n sharding_constraint
    sign sin sinh sqrt square stop_gradient sub tan tanh xor""".split()
)


def dependencies(jaxpr: Any, passes: Callable[[Any], bool] = lambda eqn: True) -> dict[Any, int]:
    """For every variable, at every depth, the bit set of top-level arguments that it depends on.

    Only equations for which `passes(eqn)` holds are followed (loops, branches and remat always are, into their bodies);
    every result of a cond or while depends on its predicate too.
    """
    inner = _jax.open_jaxpr(jaxpr)
    deps: dict[Any, int] = {v: 1 << i for i, v in enumerate(inner.invars)}
    _visit(inner, deps, passes)
    return deps


def _read(deps: dict[Any, int], atom: Any) -> int:
    return deps.get(atom, 0) if is_var(atom) else 0


def _visit(jaxpr: Any, deps: dict[Any, int], passes: Callable[[Any], bool]) -> None:
    for eqn in jaxpr.eqns:
        inner = list(body_operands(eqn))
        if not inner:
            every = 0
            if passes(eqn):
                for a in eqn.invars:
                    every |= _read(deps, a)
            deps.update((v, every) for v in eqn.outvars)
        else:
            _visit_bodies(eqn, inner, deps, passes)


def _visit_bodies(eqn: Any, inner: Sequence[Any], deps: dict[Any, int], passes: Callable[[Any], bool]) -> None:
    control = 0
    if eqn.primitive.name == "cond":
        control = _read(deps, eqn.invars[0])
    carried = carried_pairs(eqn)
    for _ in range(len(eqn.outvars) + 2):  # a fixed point: sets only grow, one loop trip moves them one carry on
        before = [deps.get(v) for v in eqn.outvars]
        for body, operands, results in inner:
            body = _jax.open_jaxpr(body)
            for v, a in zip(body.invars, operands):
                deps[v] = deps.get(v, 0) | _read(deps, a)
            _visit(body, deps, passes)
            found = [_read(deps, a) for a in body.outvars]
            if len(results) == 1 and results[0] is None:  # the predicate of a while loop
                control |= found[0]
                continue
            for v, d in zip(results, found):
                deps[v] = deps.get(v, 0) | d
        for v in eqn.outvars:
            deps[v] = deps.get(v, 0) | control
        for out, ins in carried:
            for v in ins:
                deps[v] = deps.get(v, 0) | deps[out]
        if [deps.get(v) for v in eqn.outvars] == before or not carried:
            break


def carried_pairs(eqn: Any) -> list[tuple[Any, list[Any]]]:
    """For a loop: (result of the equation, the body arguments that receive it in the next trip). Empty for others."""
    name = eqn.primitive.name
    if name == "scan":
        consts, carry = _jax.scan_split(eqn)
        args = _jax.open_jaxpr(eqn.params["jaxpr"]).invars[consts : consts + carry]
        return [(o, [v]) for o, v in zip(eqn.outvars[:carry], args)]
    if name == "while":
        cond = _jax.open_jaxpr(eqn.params["cond_jaxpr"]).invars[eqn.params["cond_nconsts"] :]
        body = _jax.open_jaxpr(eqn.params["body_jaxpr"]).invars[eqn.params["body_nconsts"] :]
        return [(o, [c, v]) for o, c, v in zip(eqn.outvars, cond, body)]
    return []


def compute_arguments(jaxpr: Any, is_batch: Any) -> set[Any]:
    """Variables, at every depth, that reach an equation which touches a batch dimension through batch-free equations.

    `is_batch(var)` says whether a variable has a batch dimension. These are the values that a forward or backward
    computation reads (weights, keys); what only the optimizer reads is not among them.
    """
    needed: set[Any] = set()
    _needed(_jax.open_jaxpr(jaxpr), lambda eqn: touches(eqn, is_batch), needed)
    return needed


_MIXES = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "gather"})


def mixed_arguments(jaxpr: Any, deps: Mapping[Any, int], batch: int) -> set[Any]:
    """What `compute_arguments` finds, where no value that is computed with has a batch dimension: the step cuts pieces
    of a fixed size out of its batch. Variables that do not depend on the arguments `batch` (a bit set), and reach a
    matmul, convolution or lookup that does."""
    needed: set[Any] = set()
    depends = lambda a: is_var(a) and bool(deps.get(a, 0) & batch)
    mixes = lambda eqn: eqn.primitive.name in _MIXES and any(map(depends, eqn.invars))
    _needed(_jax.open_jaxpr(jaxpr), mixes, needed)
    return {v for v in needed if not depends(v)}


def touches(eqn: Any, is_batch: Callable[[Any], bool]) -> bool:
    """Whether an operand or a result of the equation has a batch dimension."""
    return any(is_var(a) and is_batch(a) for a in (*eqn.invars, *eqn.outvars))


def _needed(jaxpr: Any, starts: Callable[[Any], bool], needed: set[Any]) -> None:
    for eqn in reversed(jaxpr.eqns):
        inner = list(body_operands(eqn))
        if not inner:
            if starts(eqn) or any(v in needed for v in eqn.outvars):
                needed.update(a for a in eqn.invars if is_var(a))
            continue
        carried = carried_pairs(eqn)
        for _ in range(len(carried) + 2):
            size = len(needed)
            for body, operands, results in inner:
                body = _jax.open_jaxpr(body)
                needed.update(a for a, r in zip(body.outvars, results) if is_var(a) and r is not None and r in needed)
                _needed(body, starts, needed)
                needed.update(a for a, v in zip(operands, body.invars) if v in needed and is_var(a))
            for out, args in carried:
                if any(v in needed for v in args):
                    needed.add(out)
            if len(needed) == size:
                break
