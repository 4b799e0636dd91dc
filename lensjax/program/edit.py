"""Editing jaxprs: walking into bodies, copying with fresh variables, building equations by tracing small functions.

A pass never fills in a primitive's parameters by hand. It traces a tiny public-API function on the right shapes and
splices the equations in (`Builder.apply`), so that what is built is what JAX itself would have built, whatever the
release. Every built equation takes the source line of the equation it stands for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jcore

from lensjax import _jax

Var = jcore.Var
Atom = Any  # Var or Literal


def is_var(atom: Atom) -> bool:
    return isinstance(atom, jcore.Var)


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


@functools.lru_cache(maxsize=65536)
def type_text(aval: Any) -> str:
    """A type as text. A program repeats a few hundred, and writing one takes longer than the rest of an equation."""
    return str(aval)


# ---- bodies ---------------------------------------------------------------------------------------------------------

_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}


def bodies(eqn: Any) -> Iterator[Any]:
    """The sub-programs that passes may look into: of scan, while, cond and remat. Others (kernels) are opaque."""
    for key in _BODIES.get(eqn.primitive.name, ()):
        value = eqn.params[key]
        yield from value if isinstance(value, tuple | list) else (value,)


def map_bodies(eqn: Any, fn: Callable[[Any, int], Any]) -> Any:
    """`eqn` with each of its bodies replaced by `fn(body, index)` (same arguments and results)."""
    if eqn.primitive.name not in _BODIES:  # nearly all
        return eqn
    params, index = dict(eqn.params), 0
    for key in _BODIES[eqn.primitive.name]:
        value = params[key]
        many = isinstance(value, tuple | list)
        new = []
        for body in value if many else (value,):
            new.append(fn(body, index))
            index += 1
        params[key] = tuple(new) if many else new[0]
    return eqn.replace(params=params)


def body_operands(eqn: Any) -> Iterator[tuple[Any, list[Atom], list[Atom | None]]]:
    """For each body: (body, the operand of `eqn` behind each body argument, the result of `eqn` behind each body
    result).

    For a scan, a scanned operand is the whole stack and the body sees a slice of it; for the predicate of a while loop
    the result is None.
    """
    name = eqn.primitive.name
    if name not in _BODIES:  # nearly all: analyses ask this of every equation
        return
    ins, outs = list(eqn.invars), list(eqn.outvars)
    if name == "cond":
        for body in eqn.params["branches"]:
            yield body, ins[1:], outs
    elif name == "while":
        c, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        yield eqn.params["cond_jaxpr"], [*ins[:c], *ins[c + b :]], [None]
        yield eqn.params["body_jaxpr"], ins[c:], outs
    else:
        for body in bodies(eqn):
            yield body, ins, outs


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, bodies included, in program order (an equation comes before those of its bodies)."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in bodies(eqn):
            yield from all_equations(body)


# ---- building --------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _traced(fn: Callable, avals: tuple[Any, ...]) -> Any:
    return jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals))


class Constrain:
    """`x -> with_sharding_constraint(x, sharding)`; equal shardings trace once."""

    def __init__(self, sharding: jax.sharding.NamedSharding):
        self.sharding = sharding

    def __call__(self, x):
        return jax.lax.with_sharding_constraint(x, self.sharding)

    def __hash__(self):
        return hash(self.sharding)

    def __eq__(self, other):
        return isinstance(other, Constrain) and self.sharding == other.sharding


class Builder:
    """Collects the equations of one body while a pass rewrites it.

    `env` maps variables of the old body to atoms of the new one; variables that are not in it stand for themselves.
    """

    def __init__(self):
        self.eqns: list[Any] = []
        self.env: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        return self.env.get(atom, atom) if is_var(atom) else atom

    def read_all(self, atoms: Sequence[Atom]) -> list[Atom]:
        return [self.read(a) for a in atoms]

    def emit(self, eqn: Any) -> None:
        self.eqns.append(eqn)

    def copy(self, eqn: Any, **changes: Any) -> Any:
        """Emits `eqn` with its operands looked up in `env`; its result variables stay the same objects."""
        if self.env or changes:
            eqn = eqn.replace(invars=self.read_all(eqn.invars), **changes)
        self.eqns.append(eqn)
        return eqn

    def apply(self, fn: Callable, *atoms: Atom, like: Any, name: str = "") -> list[Var]:
        """Splices `fn(*atoms)` in, built by tracing. `fn` must be hashable and cheap (it is traced once per shape).

        `like` is the equation whose user source line and name stack the new equations carry; `name` is added to the
        stack.
        """
        closed = _traced(fn, tuple(a.aval for a in atoms))
        source = like.source_info
        if name:
            source = source.replace(name_stack=source.name_stack.extend(name))
        return splice(self.eqns, closed, atoms, lambda _: source)


def splice(into: list[Any], jaxpr: Any, atoms: Sequence[Atom], source: Callable[[Any], Any]) -> list[Atom]:
    """Appends the jaxpr's equations with fresh variables, its arguments bound to `atoms`; returns its results.

    `source(eqn)` gives the source info of each appended equation.
    """
    inner = _jax.open_jaxpr(jaxpr)
    env: dict[Var, Atom] = dict(zip(inner.invars, atoms))
    for var, value in zip(inner.constvars, _jax.constants(jaxpr)):
        env[var] = jcore.Literal(value, var.aval)
    read = lambda a: env[a] if is_var(a) else a
    for eqn in inner.eqns:
        fresh = [v if isinstance(v, jcore.DropVar) else _jax.new_var(v.aval) for v in eqn.outvars]
        into.append(eqn.replace(invars=[read(a) for a in eqn.invars], outvars=fresh, source_info=source(eqn)))
        env.update(zip(eqn.outvars, fresh))
    return [read(a) for a in inner.outvars]
