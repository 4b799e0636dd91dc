"""Gradients of scanned layers, reduced over the slow axes inside the backward loop, one layer behind it.

At the end of a share all gradients stand stacked and are reduced at once, with nothing left to hide that behind. Where
a gradient is what a scan stacks, its loop can do it: in each trip

    the gradients of the layer before cross the slow axes   (nothing of this trip waits for them)
    the body goes back through its own layer                (and hands its gradients to the next trip)

and the last layer's cross after the loop. The first trip has no layer before it and sends zeros: L + 1 exchanges for L
layers, of which L stand beside a layer's work. Totals are written into their rows in place, and so is what a codec
remembers, one row a layer. Of micro-batches the last one does so: each layer's sum over those before is added to its
own before it crosses.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jcore
from jax.sharding import NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax.passes.compress import Compressed
from lensjax.passes.reduce import Reducer, wide
from lensjax.passes.shardings import named
from lensjax.passes.share_layout import without
from lensjax.plan.plan import Spec
from lensjax.program.edit import Builder, is_var, shape_of
from lensjax.program.program import Program

LEAST = 2  # trips: one layer has no other to hide behind

# Equations that treat each row of a stack alike, with the row dimension first before and after.
_ROWWISE = frozenset({"convert_element_type", "neg", "copy", "reshape", "transpose", "sharding_constraint"})


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A value that a scan stacks. `scan`: the equation's position; `place`: which of its stacked results; `path`: what
    happens to it afterwards, row by row."""

    scan: int
    place: int
    path: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One of a share's results, to be reduced in the loop that stacks it. `name`: the path of its parameter; `spec`:
    of the whole total, whose first dimension (the layers) is not split."""

    name: str
    spec: Spec


@dataclasses.dataclass(frozen=True)
class Moved:
    """What was moved into loops. `results`: positions of the share's results that are totals now; `memory`: what the
    reductions keep between calls, a row for each layer, name -> shape: the program takes it after its arguments and
    returns its next values after its results. Where there are shares before this one it takes their sums of `results`
    after that, in this order."""

    results: tuple[int, ...] = ()
    memory: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)


def said(moved: Moved, count: int, axes: tuple[str, ...], micro: bool) -> str:
    """What was moved, of `count` gradients that cross `axes`, in words."""
    where = ", ".join(axes)
    if not moved.results:
        return f"no gradient crosses {where} inside a loop: none is what a loop over whole layers stacks"
    last = " of the last micro-batch" if micro else ""
    return (
        f"{len(moved.results)} of {count} gradients cross {where} inside the backward loop{last}, each layer's while "
        "the next one is computed"
    )


def stacked(program: Program, results: Collection[int]) -> dict[int, Stacked]:
    """Which of a program's results are what a top-level scan stacks, read by nobody else on the way."""
    inner = _jax.open_jaxpr(program.jaxpr)
    made = {v: (n, i) for n, e in enumerate(inner.eqns) for i, v in enumerate(e.outvars)}
    reads = collections.Counter(a for e in inner.eqns for a in e.invars if is_var(a))
    reads.update(a for a in inner.outvars if is_var(a))
    found = {}
    for r in results:
        v, path = inner.outvars[r], []
        while is_var(v) and v in made and reads[v] == 1:
            n, i = made[v]
            eqn = inner.eqns[n]
            if eqn.primitive.name == "scan":
                place = i - _jax.scan_split(eqn)[1]
                if place >= 0 and eqn.params["length"] >= LEAST:
                    found[r] = Stacked(n, place, tuple(reversed(path)))
                break
            if not _rowwise(eqn):
                break
            path.append(eqn)
            v = eqn.invars[0]
    return found


def _rowwise(eqn: Any) -> bool:
    name, (before, after) = eqn.primitive.name, (shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))
    if name not in _ROWWISE or len(eqn.invars) != 1 or before[:1] != after[:1]:
        return False
    if name == "transpose":
        return eqn.params["permutation"][0] == 0
    return name != "reshape" or eqn.params["dimensions"] is None


@dataclasses.dataclass(frozen=True)
class Crossing:
    """How partial gradients become totals. `axes`: the mesh axes along which `jax.vmap` maps the shares; `fast`:
    (partial gradients [groups, ..], the total's spec) -> the same, stacked over the slow ones of `axes` only; `reduce`:
    over these, `slow`."""

    mesh: Any
    axes: tuple[str, ...]
    slow: tuple[str, ...]
    fast: Callable[[jax.Array, Spec], jax.Array]
    reduce: Reducer


def layer_by_layer(
    program: Program, gradients: Mapping[int, Gradient], offset: int, how: Crossing, before: bool
) -> tuple[Program, Moved]:
    """A share's program with those of its results `gradients` that scans stack reduced in their loops. `offset`: the
    position of its argument that differs from share to share; `before`: whether there are sums of other shares, to
    which these gradients are added."""
    found = stacked(program, gradients)
    if not found:
        return program, Moved()
    inner = _jax.open_jaxpr(program.jaxpr)
    b, outs, hidden, sums, after = Builder(), list(inner.outvars), {}, {}, []
    dropped = {id(e) for s in found.values() for e in s.path}
    for n, eqn in enumerate(inner.eqns):
        mine = {r: s for r, s in found.items() if s.scan == n}
        if not mine:
            if id(eqn) not in dropped:
                b.copy(eqn)
            continue
        which = [
            _Row(gradients[r].name, s.place, s.path, inner.outvars[r].aval, gradients[r].spec) for r, s in mine.items()
        ]
        loop = _Loop(eqn, which, how)
        memory = {f"layers/{len(hidden)}/{key}": x for key, x in loop.memory.items()}
        rows = [_variable(x.shape, x.dtype) for x in memory.values()]
        more = [_variable(row.total.shape, row.wide.dtype) for row in which] if before else []
        sums |= dict(zip(mine, more))
        given = (inner.invars[offset], *b.read_all(eqn.invars), *rows, *more)
        made = iter(b.apply(loop, *given, like=eqn, name="lensjax.layers"))
        _, carry = _jax.scan_split(eqn)
        for i, v in enumerate(eqn.outvars):
            if i - carry not in loop.places:
                b.env[v] = next(made)
        for r in mine:
            outs[r] = next(made)
        hidden[n] = (memory, rows)
        after += made
    memory = {k: x for more, _ in hidden.values() for k, x in more.items()}
    invars = [*inner.invars, *(v for _, rows in hidden.values() for v in rows), *sums.values()]
    outs = [outs[r] if r in found else b.read(v) for r, v in enumerate(inner.outvars)]
    jaxpr = _jax.rebuild(program.jaxpr, invars=invars, eqns=b.eqns, outvars=[*outs, *after])
    order = [r for n in hidden for r, s in found.items() if s.scan == n]
    return dataclasses.replace(program, jaxpr=jaxpr), Moved(tuple(order), memory)


def _variable(shape: tuple[int, ...], dtype: Any) -> Any:
    return _jax.new_var(jax.typeof(np.zeros((), dtype)).update(shape=shape))


@dataclasses.dataclass(frozen=True)
class _Row:
    """One gradient in its loop: where the body makes it, what happens to it then, the stacked total and its spec."""

    name: str
    place: int
    path: tuple[Any, ...]
    total: Any
    spec: Spec

    def partial(self, y: jax.Array) -> jax.Array:
        """What the body stacks -> the row of the partial gradient, wide enough to be added up."""
        x = y[None]
        for eqn in self.path:
            if eqn.primitive.name == "reshape":
                x = x.reshape((1, *shape_of(eqn.outvars[0])[1:]))
            elif eqn.primitive.name != "sharding_constraint":  # they are of the stack; the row has its own
                x = eqn.primitive.bind(x, **eqn.params)
        return wide("sum", x[0])

    @property
    def wide(self) -> Any:
        return jax.eval_shape(lambda: wide("sum", jnp.zeros(self.total.shape[1:], self.total.dtype)))


class _Loop:
    """A scan as a function that also reduces gradients: (offset, operands, memory, sums of the shares before) ->
    (carry, what it stacks besides, totals, next memory). Compares by identity."""

    def __init__(self, eqn: Any, rows: Sequence[_Row], how: Crossing):
        self.eqn, self.rows, self.how, self.mesh = eqn, rows, how, how.mesh
        self.length, self.places = eqn.params["length"], {row.place for row in rows}
        self.specs = {row.name: row.spec[1:] for row in rows}
        self.reduce = how.reduce
        self.memory: dict[str, jax.ShapeDtypeStruct] = {}
        if isinstance(how.reduce, Compressed):
            self.reduce = how.reduce.layers(self.length)
            shapes = {row.name: row.wide for row in rows}
            for name, x in self.reduce.state(shapes, mesh=how.mesh, specs=self.specs, axes=how.slow).items():
                sharding = NamedSharding(how.mesh, PartitionSpec(None, *x.sharding.spec))
                self.memory[name] = jax.ShapeDtypeStruct((self.length, *x.shape), x.dtype, sharding=sharding)

    def __call__(self, offset, *values):
        consts, carried = _jax.scan_split(self.eqn)
        values, memory = values[: len(self.eqn.invars)], values[len(self.eqn.invars) :]
        memory, before = dict(zip(self.memory, memory)), list(memory[len(self.memory) :])
        body = jcore.jaxpr_as_fun(_jax.close(self.eqn.params["jaxpr"]))

        def trip(state, xs):
            n, carry, held, totals, memory = state
            xs, before = xs
            totals, memory = self.cross(n - 1, offset, held, totals, memory)
            outs = body(*values[:consts], *carry, *xs)
            ys = outs[carried:]
            held = [row.partial(ys[row.place]) for row in self.rows]
            held = [x + y for x, y in zip(held, before, strict=True)] if before else held
            held = [self.place(x, without(row.spec[1:], self.how.axes)) for x, row in zip(held, self.rows)]
            rest = [y for i, y in enumerate(ys) if i not in self.places]
            return (n + 1, outs[:carried], held, totals, memory), rest

        totals = [self.place(jnp.zeros(row.total.shape, row.total.dtype), row.spec) for row in self.rows]
        none = [
            self.place(jnp.zeros(row.wide.shape, row.wide.dtype), without(row.spec[1:], self.how.axes))
            for row in self.rows
        ]
        first = (jnp.int32(0), list(values[consts : consts + carried]), none, totals, memory)
        how = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        xs = list(values[consts + carried :]), before
        (n, carry, held, totals, memory), rest = jax.lax.scan(trip, first, xs, **how)
        totals, memory = self.cross(n - 1, offset, held, totals, memory)
        return [*carry, *rest, *totals, *memory.values()]

    def cross(self, n: Any, offset: Any, held: list[Any], totals: list[Any], memory: dict[str, Any]) -> Any:
        """The gradients of the n-th trip, reduced: (totals, memory) with their rows. Before the first trip (n = -1)
        what comes out is written where the first trip's total will be, and is not remembered."""
        trip = jnp.maximum(n, 0)
        row = self.length - 1 - trip if self.eqn.params["reverse"] else trip
        old = [jax.lax.dynamic_index_in_dim(x, row, 0, keepdims=False) for x in memory.values()]
        made = _Exchange(self)(offset, *held, *old)
        write = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, row, 0)
        totals = [self.place(write(x, t), r.spec) for x, t, r in zip(totals, made, self.rows)]
        new = [jnp.where(n < 0, was, now) for was, now in zip(old, made[len(held) :])]
        pinned = lambda x, name: jax.lax.with_sharding_constraint(x, self.memory[name].sharding)
        return totals, {name: pinned(write(x, a), name) for (name, x), a in zip(memory.items(), new)}

    def place(self, x: Any, spec: Spec) -> Any:
        return jax.lax.with_sharding_constraint(x, named(self.mesh, spec))


class _Exchange:
    """(offset, partial gradients of one layer, rows of memory) -> (their totals, next rows): over the mapped dimension;
    as they are where there is one share."""

    def __init__(self, loop: _Loop):
        self.loop = loop

    def __call__(self, *operands):
        loop, count = self.loop, len(self.loop.rows)

        @jax.custom_batching.custom_vmap
        def exchange(_, *values):
            return [*self.narrow(values[:count]), *values[count:]]

        @exchange.def_vmap
        def _(size, batched, _, *values):
            # A gradient that is the same in every share is a partial one nevertheless.
            each = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(values[:count], batched[1:])]
            partials = {row.name: loop.how.fast(x, loop.specs[row.name]) for row, x in zip(loop.rows, each)}
            rows = dict(zip(loop.memory, values[count:]))
            made, new = loop.reduce(partials, mesh=loop.mesh, specs=loop.specs, axes=loop.how.slow, state=rows)
            out = [*self.narrow([made[row.name] for row in loop.rows]), *(new[name] for name in loop.memory)]
            return out, [False] * len(out)

        return exchange(*operands)

    def narrow(self, totals: Sequence[Any]) -> list[Any]:
        return [x.astype(row.total.dtype) for x, row in zip(totals, self.loop.rows)]
