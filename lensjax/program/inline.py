"""Inlining: calls (jit, closed_call, custom_jvp, custom_vjp) become their equations; dead equations go.

What stays an equation with a body: scan, while, cond, and the user's own remat (a region that passes may look into and
that compiles back to a remat). Kernels, shard_map and custom_partitioning stay whole.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.program.edit import Builder, Constrain, is_var, map_bodies

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


def inline(jaxpr: Any) -> Any:
    """The same program with every call replaced by its equations, at every depth, and constants as literals.

    Source lines and name stacks are kept: an inlined equation carries the caller's stack before its own, and the
    caller's line where it has none (JAX traces its own functions, `jnp.sort`, out of sight). Shardings on an inner jit
    become sharding constraints. Every variable is a fresh object: JAX shares one jaxpr object between
    equal calls, while analyses keep facts per variable.
    """
    return _dead_code(_inline(jaxpr))


def _inline(jaxpr: Any) -> Any:
    inner = _jax.open_jaxpr(jaxpr)
    b = Builder()
    invars = [_jax.new_var(v.aval) for v in inner.invars]
    b.env.update(zip(inner.invars, invars))
    results = _inline_into(b, jaxpr, None)
    return _jax.rebuild(jaxpr, invars=invars, eqns=b.eqns, outvars=results)


def _inline_into(b: Builder, jaxpr: Any, outer: Any) -> list[Any]:
    """Emits the equations of `jaxpr` into `b`, whose `env` holds its arguments; returns the results.

    `outer` is the source of the call, None at the top of a body.
    """
    inner = _jax.open_jaxpr(jaxpr)
    hidden = outer is not None and bool(inner.eqns) and not _jax.user_line(inner.eqns[0])
    for var, value in zip(inner.constvars, _jax.constants(jaxpr)):
        b.env[var] = jcore.Literal(value, var.aval)
    for eqn in inner.eqns:
        source = eqn.source_info
        if outer is not None:
            traceback = outer.traceback if hidden else source.traceback
            source = source.replace(name_stack=outer.name_stack + source.name_stack, traceback=traceback)
        eqn = eqn.replace(source_info=source)
        key = _CALLS.get(eqn.primitive.name)
        if key in eqn.params:
            results = _inline_call(b, eqn, eqn.params[key])
        else:
            eqn = map_bodies(eqn, lambda body, _: _inline(body))
            results = [v if isinstance(v, jcore.DropVar) else _jax.new_var(v.aval) for v in eqn.outvars]
            b.emit(eqn.replace(invars=b.read_all(eqn.invars), outvars=results))
        b.env.update(zip(eqn.outvars, results))
    return b.read_all(inner.outvars)


def _inline_call(b: Builder, eqn: Any, callee: Any) -> list[Any]:
    source = eqn.source_info
    if eqn.primitive.name in ("jit", "pjit"):
        source = source.replace(name_stack=source.name_stack.extend(f"jit({eqn.params['name']})"))
    inner = Builder()
    inner.eqns = b.eqns
    operands = _constrained(b, b.read_all(eqn.invars), eqn.params.get("in_shardings"), eqn)
    inner.env = dict(zip(_jax.open_jaxpr(callee).invars, operands))
    return _constrained(b, _inline_into(inner, callee, source), eqn.params.get("out_shardings"), eqn)


def _constrained(b: Builder, atoms: list[Any], shardings: Any, like: Any) -> list[Any]:
    if not shardings:
        return atoms
    out = []
    for atom, sharding in zip(atoms, shardings):
        if isinstance(sharding, jax.sharding.NamedSharding) and is_var(atom):
            (atom,) = b.apply(Constrain(sharding), atom, like=like)
        out.append(atom)
    return out


def _dead_code(jaxpr: Any) -> Any:
    """Drops equations without effects whose results nobody reads (results of loops and branches are kept whole)."""
    inner = _jax.open_jaxpr(jaxpr)
    live = {v for v in inner.outvars if is_var(v)}
    kept = []
    for eqn in reversed(inner.eqns):
        if not eqn.effects and not any(v in live for v in eqn.outvars):
            continue
        live.update(v for v in eqn.invars if is_var(v))
        kept.append(map_bodies(eqn, lambda body, _: _dead_code(body)))
    return _jax.rebuild(jaxpr, eqns=kept[::-1])
