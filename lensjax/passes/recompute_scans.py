"""Recompute on scanned layers: the forward scan stops stacking what its backward scan can make again.

A stack of layers is two scans, one backwards over what the other stacked. A stacked value that only the backward reads
is dropped, the slice of the forward body that makes it is put in front of the backward body, and what that slice needs
(the carry: the layer's input) is stacked instead, where it was not.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from jax import numpy as jnp
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.passes.recompute_copy import HOST, Copies, Writer, live
from lensjax.passes.recompute_fetch import fetch
from lensjax.passes.recompute_layers import OFFLOADED, Layer, aliases, kept_by
from lensjax.plan.levels import Level
from lensjax.program.edit import is_var
from lensjax.program.values import nbytes, results


@dataclasses.dataclass(frozen=True)
class Pair:
    """Positions of a forward scan and of the backward scan over what it stacked; `layers`: whether it runs over
    parameters, so that its trips are layers; `name`: their common path."""

    forward: int
    backward: int
    layers: bool
    name: str


def scan_pairs(jaxpr: Any, name_of: Callable[[Sequence[Any]], str]) -> list[Pair]:
    """The pairs in a body: equal length, opposite direction, stacked results of one are scanned over by the other.
    `name_of(variables)`: the common path of the parameters among them."""
    inner = _jax.open_jaxpr(jaxpr)
    made = {v: i for i, e in enumerate(inner.eqns) if e.primitive.name == "scan" for v in results(e)}
    pairs, taken = [], set()
    for j, eqn in enumerate(inner.eqns):
        if eqn.primitive.name != "scan":
            continue
        source: Counter[int] = Counter()
        for a in _scanned(eqn):
            i = made.get(a) if is_var(a) else None
            if i is not None and i < j and _opposite(inner.eqns[i], eqn) and _stacked(inner.eqns[i], a):
                source[i] += nbytes(a)
        if source:
            i = source.most_common(1)[0][0]
            if i not in taken:
                taken.add(i)
                scanned = name_of(_scanned(inner.eqns[i]))
                pairs.append(Pair(i, j, bool(scanned), scanned or name_of(inner.eqns[i].invars)))
    return pairs


def _scanned(eqn: Any) -> list[Any]:
    return list(eqn.invars[sum(_jax.scan_split(eqn)) :])


def _opposite(one: Any, other: Any) -> bool:
    return one.params["length"] == other.params["length"] and one.params["reverse"] != other.params["reverse"]


def _stacked(eqn: Any, v: Any) -> bool:
    return any(v is o for o in eqn.outvars[_jax.scan_split(eqn)[1] :])


@dataclasses.dataclass(frozen=True)
class _Cut:
    """What changes about a pair. Body variables of the forward: `dropped` result -> body result; `slice`: equations
    that make them; `inputs`: what the slice reads, of which `stacked` are stacked anew and `held` were already."""

    dropped: Mapping[Any, Any]
    slice: tuple[Any, ...]
    inputs: tuple[Any, ...]
    stacked: tuple[Any, ...]
    held: Mapping[Any, Any]


def recompute_scan(jaxpr: Any, pair: Pair, level: Level, copies: Copies, record: list[Layer] | None = None) -> Any:
    """The body with a pair recut at a level; the same object where there is nothing to gain. `record` receives what
    each of its layers keeps."""
    inner = _jax.open_jaxpr(jaxpr)
    forward, backward = inner.eqns[pair.forward], inner.eqns[pair.backward]
    cut = _cut(inner, pair, level)
    if record is not None:
        record.append(_layer(pair, forward, backward, cut, level))
    if cut is None:
        return jaxpr
    host = frozenset(v for v in cut.stacked if level.kind == "offload" and _movable(v))
    ahead, stacks = _forward(forward, cut, host, copies)
    back = _backward(forward, backward, cut, stacks, host, copies)
    eqns = list(inner.eqns)
    eqns[pair.forward], eqns[pair.backward : pair.backward + 1] = ahead, back
    return _jax.rebuild(jaxpr, eqns=eqns)


def _layer(pair: Pair, forward: Any, backward: Any, cut: _Cut | None, level: Level) -> Layer:
    _, carry = _jax.scan_split(forward)
    body = _jax.open_jaxpr(forward.params["jaxpr"])
    read = {id(a) for a in _scanned(backward)}
    between = [v for o, v in zip(forward.outvars[carry:], body.outvars[carry:]) if id(o) in read and is_var(v)]
    work = tuple(body.eqns)
    if cut is None:
        return Layer(pair.name, forward.params["length"], tuple(between), (), (), (), work)
    gone = set(cut.dropped.values())
    host = tuple(v for v in cut.stacked if level.kind == "offload" and _movable(v))
    kept = [v for v in (*between, *cut.stacked) if v not in gone and v not in host]
    named = aliases(body.eqns)
    again = tuple(v for v in gone if v not in host and v not in named)
    return Layer(pair.name, forward.params["length"], tuple(kept), again, cut.slice, host, work)


def _movable(v: Any) -> bool:
    return nbytes(v) >= OFFLOADED and jnp.issubdtype(v.aval.dtype, np.inexact)


def _cut(inner: Any, pair: Pair, level: Level) -> _Cut | None:
    forward, backward = inner.eqns[pair.forward], inner.eqns[pair.backward]
    body = _jax.open_jaxpr(forward.params["jaxpr"])
    consts, carry = _jax.scan_split(forward)
    readers = defaultdict(set)
    for n, eqn in enumerate(inner.eqns):
        for a in eqn.invars:
            if is_var(a):
                readers[a].add(n)
    for a in inner.outvars:
        if is_var(a):
            readers[a].add(len(inner.eqns))
    maker = {v: e for e in body.eqns for v in results(e)}
    ys = [(o, v) for o, v in zip(forward.outvars[carry:], body.outvars[carry:]) if is_var(v)]
    ys = [(o, v) for o, v in ys if not isinstance(o, jcore.DropVar)]
    scanned = {id(a) for a in _scanned(backward)}
    others = {id(a) for a in backward.invars[: sum(_jax.scan_split(backward))]}
    kept = kept_by(level, body.eqns)
    dropped = {
        o: v for o, v in ys
        if readers[o] == {pair.backward} and id(o) in scanned and id(o) not in others and v in maker and v not in kept
    }  # fmt: skip
    held = {v: o for o, v in ys if o not in dropped}
    need, again = set(dropped.values()), []
    for eqn in reversed(body.eqns):
        if any(v in need for v in results(eqn)):
            again.append(eqn)
            need |= {a for a in eqn.invars if is_var(a) and a not in held and a not in kept}
    again.reverse()
    made = {v for e in again for v in results(e) if v not in held and v not in kept}
    inputs = tuple(dict.fromkeys(a for e in again for a in e.invars if is_var(a) and a not in made))
    position = {v: n for n, v in enumerate(body.invars)}
    stacked = tuple(
        v for v in inputs if v not in held and (v not in position or consts <= position[v] < consts + carry)
    )
    if level.kind == "offload":
        # A layer's input that is stacked already goes to the host instead, where only the backward reads the stack.
        alone = {
            v: o for v, o in held.items()
            if v in inputs and _movable(v)
            and readers[o] == {pair.backward} and id(o) in scanned and id(o) not in others
        }  # fmt: skip
        stacked += tuple(alone)
        dropped.update((o, v) for v, o in alone.items())
        held = {v: o for v, o in held.items() if v not in alone}
    stays = sum(nbytes(v) for v in stacked if level.kind != "offload" or not _movable(v))
    if not dropped or stays >= sum(map(nbytes, dropped.values())):
        return None
    return _Cut(dropped, tuple(again), inputs, stacked, held)


def _forward(eqn: Any, cut: _Cut, host: Set[Any], copies: Copies) -> tuple[Any, dict[Any, Any]]:
    """The forward scan without the dropped stacks and with the new ones, {body variable: its stack}."""
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    _, carry = _jax.scan_split(eqn)
    length = eqn.params["length"]
    w = Writer(copies)
    for e in body.eqns:
        w.emit(e)
    like = body.eqns[-1]
    out = {v: w.put(v, HOST, like) if v in host else v for v in cut.stacked}
    stacks = {}
    for v in cut.stacked:
        aval = out[v].aval
        stacks[v] = copies.fresh(v, aval.update(shape=(length, *aval.shape)), added=1)
    ys = [(o, v) for o, v in zip(eqn.outvars[carry:], body.outvars[carry:]) if o not in cut.dropped]
    results_ = [*body.outvars[:carry], *(v for _, v in ys), *(out[v] for v in cut.stacked)]
    new = live(_jax.rebuild(eqn.params["jaxpr"], eqns=w.eqns, outvars=results_))
    outs = [*eqn.outvars[:carry], *(o for o, _ in ys), *stacks.values()]
    return _jax.rescan(eqn, invars=eqn.invars, outvars=outs, body=new), stacks


def _backward(
    forward: Any, eqn: Any, cut: _Cut, stacks: Mapping[Any, Any], host: Set[Any], copies: Copies
) -> list[Any]:
    """The backward scan with the slice in front of its body, behind what it needs before it."""
    ahead = _jax.open_jaxpr(forward.params["jaxpr"])
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    consts, carry = _jax.scan_split(eqn)
    outer = dict(zip(ahead.invars, forward.invars))
    ahead_consts = set(ahead.invars[: _jax.scan_split(forward)[0]])
    operand = {v: stacks.get(v) or cut.held.get(v) or outer[v] for v in cut.inputs}
    new_consts = [v for v in cut.inputs if v in ahead_consts]
    new_xs = [v for v in cut.inputs if v not in ahead_consts and v not in host]
    xs = list(zip(eqn.invars[consts + carry :], body.invars[consts + carry :]))
    stay = [(a, v) for a, v in xs if not (is_var(a) and a in cut.dropped)]
    around, w = Writer(copies), Writer(copies)
    fetched = fetch(eqn, [v for v in cut.inputs if v in host], stacks, around, w)
    fresh: dict[Any, Any] = {v: copies.fresh(v) for v in (*new_consts, *new_xs)}
    env = fresh | dict(zip(fetched.values, fetched.held))
    for e in cut.slice:
        w.clone(e, env)
    w.env.update((v, env[cut.dropped[a]]) for a, v in xs if is_var(a) and a in cut.dropped)
    for e in body.eqns:
        w.copy(e)
    invars = [
        *body.invars[:consts], *(fresh[v] for v in new_consts), *fetched.stacks,
        *body.invars[consts : consts + carry], *fetched.held,
        *(v for _, v in stay), *(fresh[v] for v in new_xs), *fetched.rows,
    ]  # fmt: skip
    outs = w.read_all(body.outvars)
    outs[carry:carry] = fetched.ahead
    new = live(_jax.rebuild(eqn.params["jaxpr"], invars=invars, eqns=w.eqns, outvars=outs))
    operands = [
        *eqn.invars[:consts], *(operand[v] for v in new_consts), *fetched.operands,
        *eqn.invars[consts : consts + carry], *fetched.first,
        *(a for a, _ in stay), *(operand[v] for v in new_xs), *fetched.order,
    ]  # fmt: skip
    unread = [jcore.DropVar(v.aval) for v in fetched.values]
    outvars = [*eqn.outvars[:carry], *unread, *eqn.outvars[carry:]]
    count = {"consts": consts + len(new_consts) + len(unread), "carry": carry + len(unread)}
    return [*around.eqns, _jax.rescan(eqn, invars=operands, outvars=outvars, body=new, **count)]
