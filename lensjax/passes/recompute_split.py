"""A stack of scanned layers as several: consecutive parts of the layers, each with a level of its own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.passes.recompute_copy import Copies, Writer, refresh
from lensjax.passes.recompute_scans import Pair
from lensjax.program.edit import is_var


@dataclasses.dataclass(frozen=True)
class Rows:
    """`x -> x[start:stop]`, hashable."""

    start: int
    stop: int

    def __call__(self, x):
        return jax.lax.slice_in_dim(x, self.start, self.stop)


def _joined(*parts):
    return jax.lax.concatenate(parts, 0)


def split_scan(jaxpr: Any, pair: Pair, counts: Sequence[int], copies: Copies) -> tuple[Any, list[Pair]]:
    """The body with a pair of scans as `len(counts)` pairs, the n-th over `counts[n]` layers in forward order; also
    the new pairs. What the forward stacks for the backward alone is never joined."""
    if len(counts) == 1:
        return jaxpr, [pair]
    inner = _jax.open_jaxpr(jaxpr)
    forward = inner.eqns[pair.forward]
    bounds = [sum(counts[:n]) for n in range(len(counts) + 1)]
    if forward.params["reverse"]:  # the first layer is the last row
        rows = [(bounds[-1] - z, bounds[-1] - a) for a, z in itertools.pairwise(bounds)]
    else:
        rows = list(itertools.pairwise(bounds))
    between = {v for v in forward.outvars if _only_read_by(inner, v, pair.backward)}
    w = Writer(copies)
    pieces: dict[Any, list[Any]] = {}
    where: list[tuple[int, int]] = []
    ahead: list[int] = []
    for n, eqn in enumerate(inner.eqns):
        if n == pair.forward:
            ahead = _run(w, eqn, rows, range(len(rows)), pieces, between)
        elif n == pair.backward:
            back = _run(w, eqn, rows, range(len(rows))[::-1], pieces, set())
            where = list(zip(ahead, back[::-1]))
        else:
            w.copy(eqn)
    out = _jax.rebuild(jaxpr, eqns=w.eqns, outvars=w.read_all(inner.outvars))
    return out, [dataclasses.replace(pair, forward=f, backward=b) for f, b in where]


def _only_read_by(inner: Any, v: Any, position: int) -> bool:
    return v not in {a for a in inner.outvars if is_var(a)} and not any(
        v in [a for a in e.invars if is_var(a)] for n, e in enumerate(inner.eqns) if n != position
    )


def _run(w: Writer, eqn: Any, rows: Any, order: Any, pieces: dict[Any, list[Any]], apart: set[Any]) -> list[int]:
    """Emits a scan part by part in `order`; returns their positions. Stacked results in `apart` stay in pieces."""
    consts, carry = _jax.scan_split(eqn)
    state = w.read_all(eqn.invars[consts : consts + carry])
    shared = w.read_all(eqn.invars[:consts])
    stacked: list[list[Any]] = [[] for _ in eqn.outvars[carry:]]
    positions = []
    for k, part in enumerate(order):
        start, stop = rows[part]
        xs = []
        for a in eqn.invars[consts + carry :]:
            if is_var(a) and a in pieces:
                xs.append(pieces[a][part])
            else:
                (x,) = w.apply(Rows(start, stop), w.read(a), like=eqn, name="lensjax.layers")
                w.copies.add(x, a)
                xs.append(x)
        # A carry that nobody reads in the end is still handed from part to part.
        outs = [
            _jax.new_var(v.aval) if isinstance(v, jcore.DropVar) else w.copies.fresh(v) for v in eqn.outvars[:carry]
        ]
        for new, a in zip(outs, _jax.open_jaxpr(eqn.params["jaxpr"]).invars[consts : consts + carry]):
            w.copies.old.setdefault(new, (a, 0))
        ys = []
        for v, inside in zip(eqn.outvars[carry:], _jax.open_jaxpr(eqn.params["jaxpr"]).outvars[carry:]):
            shape = (stop - start, *inside.aval.shape)
            ys.append(w.copies.fresh(v, v.aval.update(shape=shape)))
        body = eqn.params["jaxpr"] if k == 0 else refresh(eqn.params["jaxpr"], w.copies)
        positions.append(len(w.eqns))
        w.emit(_jax.rescan(eqn, invars=[*shared, *state, *xs], outvars=[*outs, *ys], body=body, length=stop - start))
        state = outs
        for found, y in zip(stacked, ys):
            found.append(y)
    w.env.update(zip(eqn.outvars[:carry], state))
    for v, parts in zip(eqn.outvars[carry:], stacked):
        if isinstance(v, jcore.DropVar):
            continue
        in_order = [parts[list(order).index(n)] for n in range(len(rows))]
        if v in apart:
            pieces[v] = in_order
            continue
        by_row = sorted(range(len(rows)), key=lambda n: rows[n][0])
        (whole,) = w.apply(_joined, *(in_order[n] for n in by_row), like=eqn, name="lensjax.layers")
        w.copies.add(whole, v)
        w.env[v] = whole
    return positions
