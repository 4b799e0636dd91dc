"""Optimizer state in the host's memory: there between steps, on the device for its update, and back.

A parameter's moments are read by nothing but their own update. They are fetched behind a barrier over the gradient
that the update reads, so that none is on the device while forward and backward run, and over what the update before
made and sent back, so that one parameter's are there at once. Without it XLA would fetch all of them at the start.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.passes.recompute_copy import DEVICE, HOST, Copies, Writer
from lensjax.plan.plan import Plan
from lensjax.program.edit import is_var
from lensjax.program.program import Program
from lensjax.program.values import nbytes, results

SMALLEST = 2**16  # bytes below which an array is not worth a copy over the host link
KIND = "pinned_host"


def on_host(program: Program, plan: Plan) -> tuple[int, ...]:
    """The arguments that `plan.host` keeps in the host's memory: those of the optimizer that a pattern matches and that
    the step gives back. Raises PlanError for a pattern without any."""
    found: dict[int, None] = {}
    for pattern in plan.host:
        mine = [i for i, a in enumerate(program.arguments) if fnmatch.fnmatchcase(a.path, pattern)]
        able = [i for i in mine if _movable(program, i)]
        if not able:
            paths = [a.path for i, a in enumerate(program.arguments) if _movable(program, i)]
            some = f"as in {paths[0]!r}" if paths else f"this step has none of at least {SMALLEST} bytes"
            raise PlanError(
                f"field 'host' has the pattern {pattern!r}, which matches no optimizer state that can wait on the host",
                hint=f"what can are arrays of the optimizer that the step gives back changed: {some}",
            )
        found.update(dict.fromkeys(able))
    return tuple(sorted(found))


def _movable(program: Program, i: int) -> bool:
    a = program.arguments[i]
    return a.role == "optimizer" and a.result is not None and a.follows is not None and a.nbytes >= SMALLEST


def moved(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=KIND)


def fetched(jaxpr: Any, program: Program, held: Sequence[int]) -> Any:
    """The body of a step whose arguments `held` come from the host's memory, and go back there. What depends on them is
    put in order: one parameter's update after the other's."""
    inner = _jax.open_jaxpr(jaxpr)
    groups = _groups(program, held)
    at = {inner.invars[i]: n for n, g in enumerate(groups) for i in g}
    last = _last_group(inner, at)
    buckets: list[list[Any]] = [[] for _ in range(len(groups) + 1)]
    for n, eqn in zip(last, inner.eqns):
        buckets[n + 1].append(eqn)
    w = Writer(Copies())
    for eqn in buckets[0]:
        w.copy(eqn)
    host = {inner.invars[i]: _jax.new_var(inner.invars[i].aval.update(memory_space=HOST)) for i in held}
    number = {i: r for i in held if (r := program.arguments[i].result) is not None}
    back: dict[int, Any] = {}  # result -> its copy on the host
    parameters = [_parameter(program, inner, g[0]) for g in groups]
    made: set[Any] = set()
    for n, group in enumerate(groups):
        mine = [inner.invars[i] for i in group]
        tie = _read_last(inner, buckets[n + 1], last)
        before = [number[i] for i in groups[n - 1]] if n else []
        updated = [v for v in parameters[n - 1] if v in made] if n else []
        like = buckets[n + 1][0]
        outs = iter(w.tie([*(host[v] for v in mine), *w.read_all([*tie, *updated]), *(back[r] for r in before)], like))
        w.env.update([(v, w.put(next(outs), DEVICE, like)) for v in mine])
        w.env.update([(v, next(outs)) for v in (*tie, *updated)])
        back.update([(r, next(outs)) for r in before])
        for eqn in buckets[n + 1]:
            w.copy(eqn)
            made.update(results(eqn))
        for i in group:
            r = number[i]
            back[r] = w.put(w.read(inner.outvars[r]), HOST, like)
    outs = [back.get(r, w.read(v)) for r, v in enumerate(inner.outvars)]
    return _jax.rebuild(jaxpr, invars=[host.get(v, v) for v in inner.invars], eqns=w.eqns, outvars=outs)


def _groups(program: Program, held: Sequence[int]) -> list[list[int]]:
    """Arguments that belong to one parameter."""
    found: dict[int | None, list[int]] = {}
    for i in held:
        found.setdefault(program.arguments[i].follows, []).append(i)
    return list(found.values())


def _parameter(program: Program, inner: Any, i: int) -> list[Any]:
    """The new value of the parameter that a moment follows."""
    follows = program.arguments[i].follows
    r = program.arguments[follows].result if follows is not None else None
    return [inner.outvars[r]] if r is not None and is_var(inner.outvars[r]) else []


def _last_group(inner: Any, at: dict[Any, int]) -> list[int]:
    """For each equation the last group on whose arrays it depends, -1 for none."""
    of, found = dict(at), []
    for eqn in inner.eqns:
        n = max((of.get(a, -1) for a in eqn.invars if is_var(a)), default=-1)
        found.append(n)
        if n >= 0:
            of.update((v, n) for v in results(eqn))
    return found


def _read_last(inner: Any, bucket: Sequence[Any], last: Sequence[int]) -> list[Any]:
    """The value that an update reads which is made last without any moments: its gradient, whole and scaled."""
    made = {v: i for i, (e, n) in enumerate(zip(inner.eqns, last)) if n < 0 for v in results(e)}
    read = {a for e in bucket for a in e.invars if is_var(a) and a in made}
    size = max((nbytes(a) for a in read), default=0)
    return sorted((a for a in read if nbytes(a) == size), key=made.__getitem__)[-1:]
