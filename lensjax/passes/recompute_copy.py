"""Copies: what a pass that repeats equations needs beside a Builder, and the facts of the copies.

Analyses keep facts per variable, so every copied equation gets fresh variables, at every depth, and `copies` remembers
which variable each stands for. `with_facts` gives the program the same facts for the copies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.program.edit import Atom, Builder, Var, is_var, map_bodies
from lensjax.program.program import Program

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# The name that recomputed equations carry in front of their own: profiles show it, and the pin pass reads it.
AGAIN = "lensjax.recompute"


@dataclasses.dataclass
class Copies:
    """`old`: new variable -> (the variable that it stands for, how many leading dimensions were added: -1, 0 or 1)."""

    old: dict[Var, tuple[Var, int]] = dataclasses.field(default_factory=dict)

    def add(self, new: Atom, old: Atom, added: int = 0) -> None:
        if is_var(new) and is_var(old) and new is not old:
            self.old[new] = (old, added)

    def fresh(self, old: Any, aval: Any = None, added: int = 0) -> Any:
        if isinstance(old, jcore.DropVar):
            return old
        new = _jax.new_var(old.aval if aval is None else aval)
        self.add(new, old, added)
        return new

    def root(self, var: Var) -> tuple[Var, int]:
        added = 0
        while var in self.old:
            var, more = self.old[var]
            added += more
        return var, added


class Writer(Builder):
    """A Builder that can repeat equations, tie values together, and move them between memories."""

    def __init__(self, copies: Copies):
        super().__init__()
        self.copies = copies

    def clone(self, eqn: Any, env: dict[Var, Atom], name: str = AGAIN) -> None:
        """Emits a copy of `eqn` that reads `env` first; its results are recorded in `env`."""
        ins = [env[a] if is_var(a) and a in env else self.read(a) for a in eqn.invars]
        outs = [self.copies.fresh(v) for v in eqn.outvars]
        copied = map_bodies(eqn, lambda body, _: refresh(body, self.copies))
        source = copied.source_info
        stack = type(source.name_stack)().extend(name) + source.name_stack
        self.emit(copied.replace(invars=ins, outvars=outs, source_info=source.replace(name_stack=stack)))
        env.update((o, n) for o, n in zip(eqn.outvars, outs) if not isinstance(o, jcore.DropVar))

    def tie(self, atoms: Sequence[Atom], like: Any) -> list[Any]:
        """The values after one barrier: none can be used before all are there."""
        outs = [self.copies.fresh(a) for a in atoms]
        self.emit(_barrier().replace(invars=list(atoms), outvars=outs, source_info=_named(like, "lensjax.gate")))
        return outs

    def put(self, atom: Atom, space: Any, like: Any) -> Any:
        """The value in another memory."""
        (new,) = self.apply(_put(space), atom, like=like, name="lensjax.offload")
        self.copies.add(new, atom)
        return new


def _named(like: Any, name: str) -> Any:
    source = like.source_info
    return source.replace(name_stack=source.name_stack.extend(name))


@functools.cache
def _barrier() -> Any:
    """An equation of optimization_barrier, to be given operands: it takes values of every kind and memory."""
    return _jax.open_jaxpr(jax.make_jaxpr(jax.lax.optimization_barrier)(0.0)).eqns[0]


@functools.cache
def _put(space: Any) -> Any:
    return lambda x: jax.device_put(x, space)


def refresh(jaxpr: Any, copies: Copies) -> Any:
    """The same body with fresh variables, at every depth."""
    inner = _jax.open_jaxpr(jaxpr)
    b = Writer(copies)
    invars = [copies.fresh(v) for v in inner.invars]
    b.env.update(zip(inner.invars, invars))
    for eqn in inner.eqns:
        outs = [copies.fresh(v) for v in eqn.outvars]
        copied = map_bodies(eqn, lambda body, _: refresh(body, copies))
        b.emit(copied.replace(invars=b.read_all(eqn.invars), outvars=outs))
        b.env.update((o, n) for o, n in zip(eqn.outvars, outs) if not isinstance(o, jcore.DropVar))
    return _jax.rebuild(jaxpr, invars=invars, eqns=b.eqns, outvars=b.read_all(inner.outvars))


def live(jaxpr: Any) -> Any:
    """The body without equations that nobody reads (effects stay)."""
    inner = _jax.open_jaxpr(jaxpr)
    wanted = {v for v in inner.outvars if is_var(v)}
    kept = []
    for eqn in reversed(inner.eqns):
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            wanted.update(v for v in eqn.invars if is_var(v))
            kept.append(eqn)
    return _jax.rebuild(jaxpr, eqns=kept[::-1])


def with_facts(program: Program, jaxpr: Any, copies: Copies, logical: bool) -> Program:
    """`program` with another jaxpr, and each copy with the facts of what it stands for. `logical`: whether the plan
    asks for logical axes (finding them takes about as long as one trace)."""
    dims, depends, compute = dict(program.batch.dims), dict(program.depends), set(program.compute)
    axes = dict(program.logical.dims) if logical else {}
    for new in copies.old:
        old, added = copies.root(new)
        if old in dims:
            dims[new] = tuple(d + added for d in dims[old] if d + added >= 0)
        if old in depends:
            depends[new] = depends[old]
        if old in compute:
            compute.add(new)
        if old in axes and not added:
            axes[new] = axes[old]
    made = dataclasses.replace(
        program,
        jaxpr=jaxpr,
        batch=dataclasses.replace(program.batch, dims=dims),
        depends=depends,
        compute=frozenset(compute),
    )
    if logical:
        made.__dict__["logical"] = dataclasses.replace(program.logical, dims=axes)
    return made
