"""Weights of scanned layers, gathered one layer ahead: while a layer is computed, the next one's weights travel.

A plan that gathers split weights again in each layer does it in the loop's body, where little of the body can run
before. Under a plan with `prefetch` the gathered weights of the next layer are handed from trip to trip:

    the first layer's weights are gathered before the loop
    each trip computes its own layer with what it was handed
              and gathers the next one's    (nothing of this trip waits for them)
    the last layer is computed after the loop, so that no gather is for nothing

The same in the backward loop, from the last layer to the first. There a trip also reduces gradients, over the same
links, and XLA's scheduler puts the gathers last, behind the work that could hide them: the matmuls that make gradients
wait for the gathers, so that these travel during the layer's recompute and the way of its cotangent, and reductions
come after. It costs the memory of one more gathered layer, and the compiler copies what is handed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.passes.recompute_copy import HOST
from lensjax.program.edit import Builder, all_equations, bodies, is_var, map_bodies, splice

LEAST = 2  # trips: one layer has no other to travel beside

# What `passes.pin` names the constraints under which a weight is whole, and a gradient as its optimizer needs it.
GATHER, GRADIENT = "lensjax.gather", "lensjax.gradient"

# What may stand between the row of a stack and the gather of it.
_ON_THE_WAY = frozenset({"convert_element_type", "sharding_constraint", "copy", "transpose", "reshape", "squeeze"})
_REMAT = ("remat2", "checkpoint")
_MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What the pass did. `loops`: (trips, weights that are gathered ahead) of each; `left`: why gathers of others stay
    where they are."""

    loops: tuple[tuple[int, int], ...] = ()
    left: tuple[str, ...] = ()

    def __add__(self, other: Ahead) -> Ahead:
        return Ahead(self.loops + other.loops, self.left + other.left)

    def note(self) -> str:
        """One sentence for the reader of a plan."""
        told = [
            f"weights of {length} scanned layers are gathered one layer ahead, while the layer before is computed"
            for length in dict.fromkeys(length for length, _ in self.loops)
        ]
        told += [f"weights are not gathered ahead {why}" for why in dict.fromkeys(self.left)]
        return "; ".join(told or ["nothing is gathered ahead: no loop over layers gathers split weights in its body"])


def prefetch(jaxpr: Any) -> tuple[Any, Ahead]:
    """A pinned program whose loops over layers gather split weights one trip ahead, and what was done. Values keep
    their bits."""
    inner, b, done = _jax.open_jaxpr(jaxpr), Builder(), Ahead()
    for eqn in inner.eqns:
        if _gathers(eqn):
            eqn, more = _inside(eqn)
            done += more
            why = _stays(eqn)
            if not why and eqn.primitive.name == "scan":
                if (loop := _apart(eqn)).fetched:
                    b.env.update(zip(eqn.outvars, _emit(loop, b, eqn)))
                    done += Ahead(((eqn.params["length"], len(loop.fetched)),))
                    continue
                if _holds(eqn):
                    why = f"in a loop whose trips share them{_where(eqn)}: no trip has weights of its own"
            done += Ahead(left=(why,) if why else ())
        b.copy(eqn)
    if not done.loops:
        return jaxpr, done
    return _jax.rebuild(jaxpr, eqns=b.eqns, outvars=b.read_all(inner.outvars)), done


def _inside(eqn: Any) -> tuple[Any, Ahead]:
    """`eqn` with the loops in its bodies changed."""
    done = []

    def rewrite(body: Any, _: int) -> Any:
        body, more = prefetch(body)
        done.append(more)
        return body

    return map_bodies(eqn, rewrite), sum(done, Ahead())


def _named(eqn: Any, name: str) -> bool:
    return eqn.primitive.name == "sharding_constraint" and str(eqn.source_info.name_stack).endswith(name)


def _gathers(eqn: Any) -> bool:
    return any(_named(e, GATHER) for body in bodies(eqn) for e in all_equations(body))


def _own(jaxpr: Any) -> Iterator[Any]:
    """The gathers of a body itself and of its remat regions, not of loops inside it."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if _named(eqn, GATHER):
            yield eqn
        elif eqn.primitive.name in _REMAT:
            yield from (g for body in bodies(eqn) for g in _own(body))


def _holds(eqn: Any) -> bool:
    return any(True for body in bodies(eqn) for _ in _own(body))


def _where(eqn: Any) -> str:
    return f" ({line})" if (line := _jax.user_line(eqn)) else ""


def _stays(eqn: Any) -> str:
    """Why the gathers of a loop stay in their trips; empty where they need not, or where it has none of its own."""
    if eqn.primitive.name not in ("scan", "while") or not _holds(eqn):
        return ""
    where = _where(eqn)
    if eqn.primitive.name == "while":
        return f"in a while loop{where}: which trip is its last is not known before"
    if eqn.params["length"] < LEAST:
        return f"in a loop of one trip{where}"
    if _jax.open_jaxpr(eqn.params["jaxpr"]).effects:
        return f"in a loop with effects{where}: its last trip would leave it"
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars[_jax.scan_split(eqn)[1] :]):
        return f"in a loop that stacks random keys{where}: they cannot be written one by one"
    if any(HOST in e.params.get("devices", ()) for body in bodies(eqn) for e in all_equations(body)):
        return f"in a loop that keeps values in the host's memory{where}: they are written in its own trips only"
    return ""


# ---- one loop apart -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A scan in two parts. `fetched`: which of its operands are stacks of weights; `fetch`: a row of each -> gathered
    weights; `work`: (constants, carry, rows, gathered weights) -> the results of a trip."""

    fetched: tuple[int, ...]
    fetch: Any
    work: Any


def _apart(eqn: Any) -> _Loop:
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    place = {v: i for i, v in enumerate(body.invars) if i >= sum(_jax.scan_split(eqn))}
    eqns = _lifted(body, set(place))
    ways = _ways(eqns, set(place))
    gathers = [e for e in eqns if _named(e, GATHER) and e.outvars[0] in ways]
    rows = tuple(dict.fromkeys(ways[g.outvars[0]][0] for g in gathers))
    wanted = {id(e) for g in gathers for e in ways[g.outvars[0]][1]}
    fetch = _jax.rebuild(
        eqn.params["jaxpr"],
        invars=rows,
        eqns=[e for e in eqns if id(e) in wanted],
        outvars=[g.outvars[0] for g in gathers],
    )
    # What a trip is handed is pinned as it was gathered: nothing else decides how the loop holds it.
    handed = {id(g): _jax.new_var(g.outvars[0].aval) for g in gathers}
    eqns = [e.replace(invars=[handed[id(e)]]) if id(e) in handed else e for e in eqns]
    work = _jax.rebuild(eqn.params["jaxpr"], invars=[*body.invars, *handed.values()], eqns=_live(eqns, body.outvars))
    return _Loop(tuple(place[v] for v in rows), fetch, work)


def _live(eqns: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The equations that results need."""
    need, kept = {v for v in results if is_var(v)}, []
    for e in reversed(eqns):
        if any(v in need for v in e.outvars):
            kept.append(e)
            need |= {a for a in e.invars if is_var(a)}
    return kept[::-1]


def _ways(eqns: Sequence[Any], rows: set[Any]) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    """{variable: (the row that it is a view of, the equations from there to it)}."""
    found: dict[Any, tuple[Any, tuple[Any, ...]]] = {v: (v, ()) for v in rows}
    for e in eqns:
        if e.primitive.name in _ON_THE_WAY and len(e.invars) == 1 and is_var(e.invars[0]) and e.invars[0] in found:
            row, path = found[e.invars[0]]
            found[e.outvars[0]] = (row, (*path, e))
    return found


def _lifted(body: Any, rows: set[Any]) -> list[Any]:
    """The body's equations with gathers of rows taken out of remat regions, which are handed what they read."""
    out: list[Any] = []
    for eqn in body.eqns:
        if eqn.primitive.name in _REMAT:
            eqn = _outside(eqn, set(_ways(out, rows)), out)
        out.append(eqn)
    return out


def _outside(eqn: Any, rows: set[Any], out: list[Any]) -> Any:
    """A remat region that is handed what it gathered itself: the gathers are appended to `out`."""
    region = eqn.params["jaxpr"]
    inner = _jax.open_jaxpr(region)
    operand = dict(zip(inner.invars, eqn.invars))
    ways = _ways(inner.eqns, {v for v, a in operand.items() if is_var(a) and a in rows})
    made: dict[Any, Any] = {}
    for e in inner.eqns:
        if _named(e, GATHER) and e.outvars[0] in ways:
            row, path = ways[e.outvars[0]]
            piece = _jax.rebuild(region, invars=[row], eqns=path, outvars=e.outvars)
            (made[e.outvars[0]],) = splice(out, piece, [operand[row]], lambda e: e.source_info)
    if not made:
        return eqn
    eqns = _live([e for e in inner.eqns if not any(v in made for v in e.outvars)], inner.outvars)
    read = {a for e in eqns for a in e.invars if is_var(a)} | {v for v in inner.outvars if is_var(v)}
    kept = [v for v in inner.invars if v in read]
    params = {**eqn.params, "jaxpr": _jax.rebuild(region, invars=[*kept, *made], eqns=eqns)}
    return eqn.replace(invars=[*(operand[v] for v in kept), *made.values()], params=params)


# ---- gradients behind the gathers -----------------------------------------------------------------------------------


def _behind(work: Any, count: int) -> Any:
    """A trip's work that also takes the `count` weights gathered for the next trip (after all others): no matmul that
    makes a gradient starts before they are there."""
    inner = _jax.open_jaxpr(work)
    ahead = [_jax.new_var(v.aval) for v in inner.invars[-count:]]
    return _jax.rebuild(work, invars=[*inner.invars, *ahead], eqns=_waiting(inner.eqns, ahead))


def _waiting(eqns: Sequence[Any], ahead: Sequence[Any]) -> list[Any]:
    made, b = _gradients(eqns), Builder()
    for e in eqns:
        if e.primitive.name in _REMAT:
            (body,) = bodies(e)
            inner = _jax.open_jaxpr(body)
            own = [_jax.new_var(v.aval) for v in ahead]
            body = _jax.rebuild(body, invars=[*own, *inner.invars], eqns=_waiting(inner.eqns, own))
            e = _jax.add_operands(e, ahead, [body])
        elif e.primitive.name in _MATMULS and e.outvars[0] in made:
            i = next(i for i, a in enumerate(e.invars) if is_var(a))
            (first,) = b.apply(_after, e.invars[i], *ahead, like=e, name="lensjax.ahead")
            e = e.replace(invars=[*e.invars[:i], first, *e.invars[i + 1 :]])
        b.emit(e)
    return b.eqns


def _gradients(eqns: Sequence[Any]) -> set[Any]:
    """The values that constraints, one or several, pin as a gradient: the matmul's, and as it is summed first."""
    made: set[Any] = set()
    for e in reversed(eqns):
        pins = e.primitive.name == "sharding_constraint" and (_named(e, GRADIENT) or e.outvars[0] in made)
        made |= {e.invars[0]} if pins else set()
    return made


def _after(x, *others):
    return jax.lax.optimization_barrier((x, *others))[0]


# ---- emission -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Row `at` of some stacks; hashable."""

    at: int

    def __call__(self, *stacks):
        return [jax.lax.index_in_dim(x, self.at, 0, keepdims=False) for x in stacks]


@dataclasses.dataclass(frozen=True)
class _Written:
    """(stacks, rows) -> the stacks with row `at` written; hashable."""

    at: int

    def __call__(self, *values):
        half = len(values) // 2
        rows = zip(values[:half], values[half:])
        return [jax.lax.dynamic_update_index_in_dim(x, y, self.at, 0) for x, y in rows]


class _Trips:
    """All trips but the last, as a function: (what the first is handed, constants, carry, what is scanned over) ->
    (what the last is handed, carry, stacked results). Rows are read and written by index: a stack without its last row
    would be a copy of it. Compares by identity."""

    def __init__(self, loop: _Loop, eqn: Any):
        self.loop, self.eqn, self.length = loop, eqn, eqn.params["length"]
        self.consts, self.carried = _jax.scan_split(eqn)
        self.first = self.consts + self.carried
        self.count = len(_jax.open_jaxpr(loop.fetch).outvars)

    def row(self, n: Any) -> Any:
        """The row of the n-th trip."""
        return self.length - 1 - n if self.eqn.params["reverse"] else n

    def __call__(self, *values):
        held, operands = values[: self.count], values[self.count :]
        consts, carry, xs = operands[: self.consts], operands[self.consts : self.first], operands[self.first :]
        fetch = jcore.jaxpr_as_fun(_jax.close(self.loop.fetch))
        work = jcore.jaxpr_as_fun(_jax.close(_behind(self.loop.work, self.count)))

        def trip(n, state):
            held, carry, stacks = state
            take = lambda x, n: jax.lax.dynamic_index_in_dim(x, self.row(n), 0, keepdims=False)
            ahead = fetch(*(take(operands[i], n + 1) for i in self.loop.fetched))
            outs = work(*consts, *carry, *(take(x, n) for x in xs), *held, *ahead)
            rows = zip(stacks, outs[self.carried :])
            stacks = [jax.lax.dynamic_update_index_in_dim(x, y, self.row(n), 0) for x, y in rows]
            return list(ahead), list(outs[: self.carried]), stacks

        stacks = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.eqn.outvars[self.carried :]]
        held, carry, stacks = jax.lax.fori_loop(0, self.length - 1, trip, (list(held), list(carry), stacks))
        return [*held, *carry, *stacks]


def _emit(loop: _Loop, b: Builder, eqn: Any) -> list[Any]:
    """Appends the first gathers, the loop and the last trip; returns the scan's results."""
    trips, ins, own = _Trips(loop, eqn), b.read_all(eqn.invars), lambda e: e.source_info
    how: dict[str, Any] = dict(like=eqn, name="lensjax.ahead")
    start, end = trips.row(0), trips.row(trips.length - 1)
    held = splice(b.eqns, loop.fetch, b.apply(_Rows(start), *(ins[i] for i in loop.fetched), **how), own)
    made = b.apply(trips, *held, *ins, **how)
    held, rest = made[: trips.count], made[trips.count :]
    carry, stacks = rest[: trips.carried], rest[trips.carried :]
    rows = b.apply(_Rows(end), *ins[trips.first :], **how)
    outs = splice(b.eqns, loop.work, [*ins[: trips.consts], *carry, *rows, *held], own)
    return [*outs[: trips.carried], *b.apply(_Written(end), *stacks, *outs[trips.carried :], **how)]
