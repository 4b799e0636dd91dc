"""The split pass: the program of one share of the batch, and the program of the update.

    share    (arguments with a share's part of the batch, offset, totals known before) -> partial values, batch results
    update   (arguments without the batch, totals) -> the step's other results

Both are the step's own equations: those that the wanted values need, with the batch dimensions re-sized and what the
analysis noted (see `program.status.interpreter`) carried out. Whoever runs them sums the partial values over the
shares: a loop over micro-batches, a reduction over nodes, or both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.passes.draw import Draw, Take
from lensjax.program.batch import Batch
from lensjax.program.edit import Builder, bodies, is_var
from lensjax.program.flow import dependencies
from lensjax.program.program import Program
from lensjax.program.roles import Argument
from lensjax.program.status.analysis import Cut, Split
from lensjax.program.status.paired import SIZES, Body, Op

# At the cut: (builder, cut, partial value, equation) -> what every use sees.
Hook = Callable[[Builder, Cut, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a split step. `program`: its arguments are the step's, then `offset` (int32: the first example of the
    share), then the totals of `known`; its results are the partial values of `wanted`, then the step's results
    `results`."""

    program: Program
    known: tuple[Cut, ...]
    wanted: tuple[Cut, ...]
    results: tuple[int, ...]


def share(
    program: Program,
    size: int,
    wanted: Sequence[Cut],
    known: Sequence[Cut] = (),
    results: Sequence[int] = (),
    hook: Hook | None = None,
) -> Part:
    """The program of one share of `size` examples. `hook` makes totals in place for early cuts that are not `known`."""
    return _Writer(program, size, known, hook).part(tuple(wanted), tuple(results))


def update(program: Program) -> Part:
    """What remains when every total is known. It never reads the batch."""
    split = program.split
    rest = tuple(r for r, s in enumerate(split.results) if s.kind != "B")
    given = [c for c in split.cuts if not c.inside] + _given(split)
    part = _Writer(program, program.batch.size, given, None).part((), rest)
    inner = _jax.open_jaxpr(part.program.jaxpr)
    batch = {v for v, s in zip(inner.invars, split.inputs) if s.kind == "B"}
    read = {a for e in inner.eqns for a in e.invars if is_var(a)} | {a for a in inner.outvars if is_var(a)}
    if batch & read:
        raise AssertionError("the update reads the batch: the analysis missed a cut")
    return part


def _given(split: Split) -> list[Cut]:
    """Values that are the same in every share, but made by an equation that reads the batch (a running statistic that a
    loop returns): the update takes them from a share."""
    body = split.body
    assert body is not None
    reads = {v for v, s in zip(body.invars, split.inputs) if s.kind == "B"}
    found = []
    for op in body.ops:
        if not any(is_var(a) and a in reads for a in op.invars) or ("ones", op) in split.fixes:
            continue
        for v in op.outvars:
            if v in split.cut:
                continue
            if split.statuses[v].kind in "RZ" and not split.statuses[v].scale:
                found.append(Cut(v, "same", False, 0, False, "", "the update"))
            else:
                reads.add(v)
    return found


class _Writer:
    def __init__(self, program: Program, size: int, known: Sequence[Cut], hook: Hook | None):
        self.program, self.split, self.size = program, program.split, size
        self.known = {c.var: c for c in known}
        self.order = tuple(known)
        self.hook = hook
        self.renamed: dict[Any, Any] = {}

    # ---- the whole --------------------------------------------------------------------------------------------------

    def part(self, wanted: tuple[Cut, ...], results: tuple[int, ...]) -> Part:
        split, program = self.split, self.program
        body = split.body
        assert body is not None
        b = Builder()
        invars = [self.rename(b, v) for v in body.invars]
        offset = _jax.new_var(jax.typeof(np.int32(0)))
        totals = {c.var: _jax.new_var(c.var.aval) for c in self.order}
        targets = [c.var for c in wanted] + [body.outvars[r] for r in results]
        self.raw = {c.var for c in wanted}
        self.partials: dict[Any, Any] = {}
        self.write(b, body, offset, totals, self.needed(body, targets))
        outs = [self.partials[c.var] for c in wanted]
        for r in results:
            atom = b.read(body.outvars[r])
            outs.append(self.scaled(b, ("scale", body, r), atom, None))
        read = {a for e in b.eqns for a in e.invars if is_var(a)} | {a for a in outs if is_var(a)}
        self.order = tuple(c for c in self.order if totals[c.var] in read)
        invars += [offset, *(totals[c.var] for c in self.order)]
        jaxpr = _jax.rebuild(program.jaxpr, invars=invars, eqns=b.eqns, outvars=outs)
        return Part(self.facts(jaxpr, results), self.order, wanted, results)

    def facts(self, jaxpr: Any, results: tuple[int, ...]) -> Program:
        """The part as a Program: what was found out about the step, for its variables."""
        p, inner, place = self.program, _jax.open_jaxpr(jaxpr), {r: k for k, r in enumerate(results)}
        arguments = [
            dataclasses.replace(a, shape=tuple(v.aval.shape), result=None if a.result is None else place.get(a.result))
            for a, v in zip(p.arguments, inner.invars)
        ]  # fmt: skip
        for name, v in zip(("offset", *(f"total/{i}" for i in range(len(self.order)))), inner.invars[len(arguments) :]):
            arguments.append(Argument(f"lensjax/{name}", tuple(v.aval.shape), v.aval.dtype, "other"))
        dims = {self.renamed.get(v, v): d for v, d in p.batch.dims.items() if v in self.renamed}
        batch = Batch(self.size, dict(p.batch.axes), dims, None, "a share of the batch")
        return dataclasses.replace(
            p,
            jaxpr=jaxpr,
            arguments=tuple(arguments),
            result_paths=tuple(p.result_paths[r] for r in results),
            batch=batch,
            gradients={i: place[r] for i, r in p.gradients.items() if r in place},
            donate=False,
            compute=p.compute | {self.renamed[v] for v in p.compute if v in self.renamed},
            depends=dependencies(jaxpr),
        )

    # ---- which equations --------------------------------------------------------------------------------------------

    def reads(self, op: Op) -> set[Any]:
        """The variables that an equation needs once what was left out is left out."""
        fixes = self.split.fixes
        if ("ones", op) in fixes:
            return set()
        found = {a for i, a in enumerate(op.invars) if is_var(a) and ("one", op, i) not in fixes}
        for i in range(len(op.invars)):
            found |= self.scalars(("scale", op, i))
        return found

    def scalars(self, key: Any) -> set[Any]:
        return {self.split.scalars[n] for n, _ in self.split.fixes.get(key, ())}

    def needed(self, body: Body, targets: Collection[Any]) -> set[Any]:
        """The variables that must be made for the targets (a known total is given; a wanted one is made itself)."""
        found = {a for a in targets if is_var(a)}
        for r in range(len(body.outvars)):
            if any(body.outvars[r] is t for t in targets):
                found |= self.scalars(("scale", body, r))
        for op in reversed(body.ops):
            made = [v for v in op.outvars if v in found]
            for v in made:
                if v in self.split.cut and (v not in self.raw or self.hooked(v)):
                    found |= self.scalars(("scale", v))
            if any(v in self.raw or v not in self.known for v in made):
                found |= self.reads(op)
        return found

    # ---- equations --------------------------------------------------------------------------------------------------

    def rename(self, b: Builder, v: Any) -> Any:
        """The variable at the share's size."""
        dims = self.program.batch.dims.get(v)
        if not dims or isinstance(v, jcore.DropVar) or self.size == self.program.batch.size:
            self.renamed.setdefault(v, v)
            return v
        n = self.program.batch.size
        shape = tuple(s * self.size // n if d in dims else s for d, s in enumerate(v.aval.shape))
        new = _jax.new_var(v.aval.update(shape=shape))
        self.renamed[v] = b.env[v] = new
        return new

    def write(self, b: Builder, body: Body, offset: Any, totals: dict[Any, Any], needed: set[Any] | None) -> None:
        """Writes the equations of a body (those that make `needed` variables; None: all)."""
        for op in body.ops:
            made = [v for v in op.outvars if needed is None or v in needed]
            if not made:
                continue
            if any(v in self.raw or v not in self.known for v in made):
                self.equation(b, op, offset)
            for v in made:
                if v in self.split.cut or v in totals or v in self.raw:
                    self.cut(b, op, v, totals)

    def cut(self, b: Builder, op: Op, v: Any, totals: dict[Any, Any]) -> None:
        if v in self.raw:
            self.partials[v] = b.read(v)
        if v in totals:
            b.env[v] = self.scaled(b, ("scale", v), totals[v], op)
        elif v not in self.raw or self.hooked(v):
            assert self.hook is not None, f"the total of {v.aval} is needed and not known"
            b.env[v] = self.scaled(b, ("scale", v), self.hook(b, self.split.cut[v], b.read(v), op.eqn), op)

    def hooked(self, v: Any) -> bool:
        """Whether the total is made in place, for the share's own use."""
        return self.hook is not None and v in self.split.cut and self.split.cut[v].early

    def equation(self, b: Builder, op: Op, offset: Any) -> None:
        fixes = self.split.fixes
        if ("ones", op) in fixes:
            v = self.rename(b, op.outvars[0])
            (b.env[op.outvars[0]],) = b.apply(_Ones(v.aval.shape, v.aval.dtype), like=op.eqn)
            return
        ins = [self.operand(b, op, i, offset) for i in range(len(op.invars))]
        if ("draw", op) in fixes:
            self.draw(b, op, ins, offset)
            return
        if op.bodies and (op.batched or self.noted(op)):
            self.with_bodies(b, op, ins, offset)
            return
        outs = [self.rename(b, v) for v in op.outvars]
        b.emit(op.eqn.replace(invars=ins, outvars=outs, params=self.params(op)))

    def params(self, op: Op) -> dict[str, Any]:
        if not op.batched or self.size == self.program.batch.size:
            return op.params
        full, small = self.split.sizes
        sized = {
            k: _between(op.params[k], op.small[k], full, small, self.size) for k in op.params if (op.name, k) in SIZES
        }
        return {**op.params, **sized}

    def operand(self, b: Builder, op: Op, i: int, offset: Any) -> Any:
        fixes, atom = self.split.fixes, op.invars[i]
        if ("one", op, i) in fixes:
            return jcore.Literal(np.ones((), atom.aval.dtype), atom.aval)
        atom = self.scaled(b, ("scale", op, i), b.read(atom), op)
        if ("global", op, i) in fixes:
            (atom,) = b.apply(_Shift(fixes["global", op, i] or 1), atom, offset, like=op.eqn, name="lensjax.offset")
        if ("first", op, i) in fixes:
            (atom,) = b.apply(_first, atom, offset, like=op.eqn, name="lensjax.first")
        return atom

    def scaled(self, b: Builder, key: Any, atom: Any, op: Op | None) -> Any:
        """The value with the scalars that were left out of it."""
        for n, power in self.split.fixes.get(key, ()):
            like = op.eqn if op is not None else b.eqns[-1]
            (atom,) = b.apply(_Power(power), atom, b.read(self.split.scalars[n]), like=like, name="lensjax.scale")
        return atom

    def draw(self, b: Builder, op: Op, ins: list[Any], offset: Any) -> None:
        d = self.split.fixes["draw", op]
        full = op.outvars[0].aval
        v = self.rename(b, op.outvars[0])
        unit = full.shape[d] // self.split.sizes[0]
        if op.name == "random_bits":
            fn = Draw(tuple(full.shape), d, unit, v.aval.shape[d], op.params["bit_width"])
            (b.env[op.outvars[0]],) = b.apply(fn, ins[0], offset, like=op.eqn, name="lensjax.draw")
            return
        whole = _jax.new_var(full)
        b.emit(op.eqn.replace(invars=ins, outvars=[whole]))
        take = Take(d, unit, v.aval.shape[d])
        (b.env[op.outvars[0]],) = b.apply(take, whole, offset, like=op.eqn, name="lensjax.draw")

    # ---- bodies -----------------------------------------------------------------------------------------------------

    def noted(self, op: Op) -> bool:
        """Whether something in the bodies differs from the program."""
        return any(
            ("first", body, k) in self.split.fixes for body in op.bodies for k in range(len(body.outvars))
        ) or any(self.marked(o) for body in op.bodies for o in body.ops)

    def marked(self, op: Op) -> bool:
        fixes = self.split.fixes
        own = ("draw", op) in fixes or ("ones", op) in fixes or any(v in self.split.cut for v in op.outvars)
        for i in range(len(op.invars)):
            own = own or any((kind, op, i) in fixes for kind in ("global", "first", "one", "scale"))
        return own or any(("first", op, "carry", k) in fixes for k in range(len(op.invars))) or self.noted(op)

    def with_bodies(self, b: Builder, op: Op, ins: list[Any], offset: Any) -> None:
        fixes = self.split.fixes
        if op.name in ("scan", "while"):
            first = (
                _jax.scan_split(op.eqn)[0]
                if op.name == "scan"
                else op.params["cond_nconsts"] + op.params["body_nconsts"]
            )
            for k in range(len(op.invars) - first):
                if ("first", op, "carry", k) in fixes:
                    (ins[first + k],) = b.apply(_first, ins[first + k], offset, like=op.eqn, name="lensjax.first")
        inside = self.noted(op)
        news = []
        for j, (body, old) in enumerate(zip(op.bodies, bodies(op.eqn))):
            plain = op.name == "while" and j == 0  # the condition reads no share's offset
            inner = Builder()
            own = _jax.new_var(offset.aval)
            invars = [self.rename(inner, v) for v in body.invars]
            self.write(inner, body, own, {}, None)
            outs = []
            for k, atom in enumerate(body.outvars):
                atom = inner.read(atom)
                if ("first", body, k) in fixes:
                    (atom,) = inner.apply(_first, atom, own, like=op.eqn, name="lensjax.first")
                outs.append(atom)
            extra = [own] if inside and not plain else []
            news.append(_jax.rebuild(old, invars=[*extra, *invars], eqns=inner.eqns, outvars=outs))
        eqn = _jax.add_operands(op.eqn.replace(invars=ins), [offset] if inside else [], news)
        b.emit(eqn.replace(outvars=[self.rename(b, v) for v in op.outvars]))


def _between(full: Any, small: Any, n: int, m: int, size: int) -> Any:
    """A size (or a tree of them) at a batch of `size`, from those at n and at m."""
    if isinstance(full, tuple | list):
        return type(full)(_between(x, y, n, m, size) for x, y in zip(full, small))
    if full is None or full == small:
        return full
    return small + (full - small) * (size - m) // (n - m)


# ---- small functions that are spliced in ---------------------------------------------------------------------------


def _first(x, offset):
    return jnp.where(offset == 0, x, jnp.zeros_like(x))


@dataclasses.dataclass(frozen=True)
class _Shift:
    inner: int

    def __call__(self, x, offset):
        return x + (offset * self.inner).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Power:
    power: int

    def __call__(self, x, scalar):
        return x * (scalar**self.power).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Ones:
    shape: tuple[int, ...]
    dtype: Any

    def __call__(self):
        return jnp.ones(self.shape, self.dtype)
