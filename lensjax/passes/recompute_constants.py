"""Constants of a loop that are made of nothing (masks, zeros): made again in the body, nothing is alive for them."""

from __future__ import annotations

from typing import Any

from lensjax import _jax
from lensjax.passes.recompute_copy import Copies, Writer
from lensjax.program.edit import is_var
from lensjax.program.values import is_solid, nbytes, results

LEAST = 2**10  # bytes of a constant that is worth it
LONGEST = 24  # equations that make it


def sink_constants(jaxpr: Any, copies: Copies) -> Any:
    """The body with literal-only constants of its scans made inside of them, at every depth."""
    inner = _jax.open_jaxpr(jaxpr)
    maker = {v: e for e in inner.eqns for v in results(e)}
    eqns = []
    for eqn in inner.eqns:
        if eqn.primitive.name == "scan":
            eqn = _sunk(eqn, maker, inner.eqns, copies)
        eqns.append(eqn)
    return _jax.rebuild(jaxpr, eqns=eqns)


def _sunk(eqn: Any, maker: dict[Any, Any], order: Any, copies: Copies) -> Any:
    consts, _ = _jax.scan_split(eqn)
    body = eqn.params["jaxpr"]
    inner = _jax.open_jaxpr(body)
    cones = {}
    for n, a in enumerate(eqn.invars[:consts]):
        if is_var(a) and nbytes(a) >= LEAST and (cone := _cone(a, maker)) is not None:
            cones[n] = cone
    if cones:
        wanted = set().union(*cones.values())
        w = Writer(copies)
        env: dict[Any, Any] = {}
        for e in order:
            if id(e) in wanted:
                w.clone(e, env, "lensjax.constant")
        w.env.update((inner.invars[n], env[eqn.invars[n]]) for n in cones)
        for e in inner.eqns:
            w.copy(e)
        left = [v for n, v in enumerate(inner.invars) if n not in cones]
        body = _jax.rebuild(body, invars=left, eqns=w.eqns, outvars=w.read_all(inner.outvars))
    operands = [a for n, a in enumerate(eqn.invars) if n not in cones]
    return _jax.rescan(
        eqn, invars=operands, outvars=eqn.outvars, body=sink_constants(body, copies), consts=consts - len(cones)
    )


def _cone(v: Any, maker: dict[Any, Any]) -> set[int] | None:
    """Identities of the equations that make a value out of literals; None where it is made of anything else."""
    seen: set[int] = set()
    todo = [v]
    while todo:
        eqn = maker.get(todo.pop())
        if eqn is None or is_solid(eqn) or eqn.effects or len(seen) > LONGEST:
            return None
        if id(eqn) not in seen:
            seen.add(id(eqn))
            todo.extend(a for a in eqn.invars if is_var(a))
    return seen
