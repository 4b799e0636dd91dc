"""Micro-batches: a step as a loop over shares of the batch, one reduction, and one update.

Each device (each group of devices along the axes that split the batch) goes through its own part of the batch share by
share and adds up its partial values, in float32 or wider. Nothing is reduced between devices inside the loop: partial
values stand side by side along a leading dimension that is split over the batch's mesh axes (the share program is
batched over it by `jax.vmap(spmd_axis_name=...)`). After the loop that dimension is summed: one reduction, whatever the
number of shares. Split weights are gathered before the loop, once.

Totals that a share needs before it is done (a denominator that the model makes) are found by a pass of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jcore
from jax.sharding import NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.passes.gradients import gradient_inputs
from lensjax.passes.hoist import hoist
from lensjax.passes.pin import Share, pin
from lensjax.passes.recompute import recompute
from lensjax.passes.shardings import Shardings, batch_axes, named, ways, whole
from lensjax.passes.split import Part, share, update
from lensjax.plan.plan import Plan, Spec
from lensjax.program.edit import is_var, shape_of
from lensjax.program.program import Program
from lensjax.program.status.analysis import Cut
from lensjax.program.status.lattice import Status


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How the batch is cut. Examples, in units of one for each of the pieces into which the step itself splits its
    batch: `local` on each of `ways` groups of devices = `full` shares of `share` and one of `rest`."""

    ways: int
    outer: int
    local: int
    share: int
    full: int
    rest: int

    @property
    def count(self) -> int:
        return self.full + (self.rest > 0)


def sizes(program: Program, plan: Plan) -> Sizes:
    """Raises PlanError where the step does not split, or not into that many shares."""
    split, micro = program.split, plan.micro
    if not split.micro:
        raise PlanError(
            f"field 'micro.count' of the plan is {micro.count}; the step cannot go through its batch share by share: "
            f"{split.micro}",
            hint="set micro.count to 1: the whole batch then goes through at once",
            code="split",
        )
    n, outer, groups = program.batch.size, split.outer, ways(plan, batch_axes(plan))
    unit = outer * groups
    if n % unit:
        raise PlanError(
            f"the batch of {n} does not divide into the {outer} pieces of the step's own accumulation on each of "
            f"{groups} devices",
            hint=f"a batch that {unit} divides, or micro.count 1",
            code="split",
        )
    local = n // unit
    if micro.share is not None:
        if micro.share % unit or not 0 < micro.share <= n:
            raise PlanError(
                f"field 'micro.share' of the plan is {micro.share}; it is a number of examples of the batch of {n}, "
                f"the same on each of {groups} devices{f' and in each of {outer} pieces' if outer > 1 else ''}",
                hint=f"a multiple of {unit}",
                code="split",
            )
        one = micro.share // unit
    else:
        one = -(-local // micro.count)
    found = Sizes(groups, outer, local, one, local // one, local % one)
    if micro.share is None and found.count != micro.count:
        raise PlanError(
            f"field 'micro.count' of the plan is {micro.count}; {local} examples on each device do not make as many "
            f"shares of equal size (shares of {one} make {found.count})",
            hint=f"micro.count {found.count}, or another number up to {local}",
            code="split",
        )
    return found


def micro(program: Program, plan: Plan, mesh: Any, shardings: Shardings) -> Callable[..., list[Any]]:
    """The step as a function of its flat arguments, share by share. Raises PlanError."""
    return _Micro(program, plan, mesh, shardings).run


class _Micro:
    def __init__(self, program: Program, plan: Plan, mesh: Any, shardings: Shardings):
        self.program, self.plan, self.mesh, self.shardings = program, plan, mesh, shardings
        self.split, self.sizes = program.split, sizes(program, plan)
        self.axes = batch_axes(plan)
        self.after = update(program)
        self.specs = self._total_specs()
        self.results = tuple(r for r, s in enumerate(self.split.results) if s.kind == "B")
        cuts = self.split.cuts
        early = [c for c in cuts if c.early]
        stages = sorted({c.stage for c in early})
        passes = []
        for stage in stages:
            wanted = [c for c in early if c.stage == stage]
            passes.append(self._pass(wanted, [c for c in early if c.stage < stage], ()))
        passes.append(self._pass([c for c in cuts if not c.early], early, self.results))
        self.passes = passes
        self.finish = self._finish()

    def _total_specs(self) -> dict[Any, Spec]:
        """{cut variable: the spec in which the update needs its total}."""
        inner = _jax.open_jaxpr(self.after.program.jaxpr)
        arguments, wanted = self.after.program.arguments, {}
        for i, a in enumerate(arguments[: len(self.program.arguments)]):
            if a.result is not None and a.role == "parameter":
                wanted[inner.outvars[a.result]] = self.shardings.gradients[i]
            elif a.result is not None and a.role == "optimizer":
                wanted[inner.outvars[a.result]] = self.shardings.arguments[i]
        for p, r in self.after.program.gradients.items():
            wanted[inner.outvars[r]] = self.shardings.gradients[p]
        found = gradient_inputs(self.after.program, wanted)
        totals = inner.invars[len(self.program.arguments) + 1 :]
        return {c.var: found.get(v, whole(len(shape_of(v)))) for c, v in zip(self.after.known, totals, strict=True)}

    def _partial_spec(self, cut: Cut) -> Spec:
        return tuple(tuple(a for a in axes if a not in self.axes) for axes in self.specs[cut.var])

    # ---- the programs -------------------------------------------------------------------------------------------

    def _pass(self, wanted: Sequence[Cut], known: Sequence[Cut], results: tuple[int, ...]) -> _Pass:
        made = []
        for size in (self.sizes.share, self.sizes.rest):
            if size == 0 or (size == self.sizes.share and self.sizes.full == 0):
                made.append(None)
                continue
            part = share(self.program, size * self.sizes.outer, wanted, known, results)
            arguments = [
                whole(len(a.shape)) if a.role == "batch" or i >= len(self.program.arguments) else s
                for i, (a, s) in enumerate(_padded(part.program.arguments, self.shardings.arguments))
            ]
            specs = Shardings(tuple(arguments), (None,) * (len(wanted) + len(results)), {})
            inside = Share(self.axes, {k: self._partial_spec(c) for k, c in enumerate(wanted)})
            program = recompute(part.program, self.plan, specs)
            made.append(hoist(pin(program, self.plan, self.mesh, specs, inside), self.plan))
        return _Pass(tuple(wanted), tuple(known), results, made[0], made[1])

    def _finish(self) -> Callable[..., list[Any]]:
        p = self.after.program
        extra = [self.specs[c.var] for c in self.after.known]
        arguments = (*self.shardings.arguments, (), *extra)
        results = tuple(self.shardings.results[r] for r in self.after.results)
        pinned = pin(p, self.plan, self.mesh, Shardings(arguments, results, self.shardings.gradients))
        return jcore.jaxpr_as_fun(_jax.close(pinned.jaxpr))

    # ---- running ------------------------------------------------------------------------------------------------

    def run(self, *leaves: Any) -> list[Any]:
        inputs = [
            self.stacked(x, s) if s.kind == "B" else x for x, s in zip(leaves, self.split.inputs, strict=True)
        ]
        totals: dict[Any, Any] = {}
        batch: list[Any] = []
        for one in self.passes:
            sums, batch = self.shares(one, inputs, [totals[c.var] for c in one.known])
            totals |= {c.var: self.total(c, x) for c, x in zip(one.wanted, sums, strict=True)}
        rest = self.finish(*leaves, jnp.int32(0), *(totals[c.var] for c in self.after.known))
        out: list[Any] = [None] * len(self.split.results)
        for r, x in zip((*self.results, *self.after.results), (*batch, *rest), strict=True):
            out[r] = x
        return out

    def stacked(self, x: Any, s: Status) -> Any:
        """[.., outer * N * inner, ..] -> [.., outer, ways, local, inner, ..], split over the batch's axes."""
        z, d = self.sizes, s.dim
        x = x.reshape((*x.shape[:d], -1, z.ways, z.local, s.inner or 1, *x.shape[d + 1 :]))
        return self.constrain(x, d + 1, free=False)

    def constrain(self, x: Any, d: int, free: bool = True, spec: Spec | None = None) -> Any:
        """`x` split along dimension d over the batch's axes; the others free, whole, or as `spec` says."""
        if self.plan.mesh.size == 1 or not self.axes:
            return x
        others = [PartitionSpec.UNCONSTRAINED if free else None] * (x.ndim - 1)
        if spec is not None:
            others = [axes or None for axes in spec]
        entries = [*others[:d], self.axes, *others[d:]]
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def shares(self, one: _Pass, inputs: list[Any], known: list[Any]) -> tuple[list[Any], list[Any]]:
        """(sums of partial values, stacked along a leading dimension; the step's batch results)."""
        z = self.sizes
        sums: list[Any] | None = None
        collected: list[list[Any]] = []
        if one.main is not None:
            fixed = one.main.before(self._arguments(inputs))
            trip = lambda i: self.trip(one.main, z.share, i, inputs, fixed, known, one)
            if z.full == 1:
                sums, outs = trip(jnp.int32(0))
                collected.append([x[None] for x in outs])
            else:
                sums, outs = self.loop(one, trip)
                collected.append(outs)
        if one.last is not None:
            fixed = one.last.before(self._arguments(inputs))
            more, outs = self.trip(one.last, z.rest, jnp.int32(z.full), inputs, fixed, known, one)
            sums = more if sums is None else [_combine(c.op, a, b) for c, a, b in zip(one.wanted, sums, more)]
            collected.append([x[None] for x in outs])
        assert sums is not None
        found = [
            self.joined([c[k] for c in collected], self.split.results[r]) for k, r in enumerate(one.results)
        ]
        return sums, found

    def _arguments(self, inputs: list[Any]) -> list[Any]:
        return [None if s.kind == "B" else x for x, s in zip(inputs, self.split.inputs)]

    def loop(self, one: _Pass, trip: Callable[[Any], tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
        def body(sums, i):
            more, outs = trip(i)
            return [_combine(c.op, a, b) for c, a, b in zip(one.wanted, sums, more)], outs

        start = [
            self.constrain(_start(c, (self.sizes.ways, *shape_of(c.var))), 0, spec=self._partial_spec(c))
            for c in one.wanted
        ]
        return jax.lax.scan(body, start, jnp.arange(self.sizes.full, dtype=jnp.int32))

    def trip(
        self, part: Any, size: int, i: Any, inputs: list[Any], fixed: list[Any], known: list[Any], one: _Pass
    ) -> tuple[list[Any], list[Any]]:
        """One share on every group of devices: (partial values, batch results), stacked along a leading dimension."""
        z = self.sizes

        def single(group, *batch):
            parts = iter(batch)
            args = []
            for x, s in zip(inputs, self.split.inputs):
                args.append(_slice(next(parts), s.dim + 1, i * z.share, size) if s.kind == "B" else x)
            outs = part.run(args, fixed, group * z.local + i * z.share, known)
            partials = [_wide(x, c) for x, c in zip(outs, one.wanted)]
            return partials, outs[len(one.wanted) :]

        batch = [(x, s.dim + 1) for x, s in zip(inputs, self.split.inputs) if s.kind == "B"]
        if z.ways == 1:
            outs = single(jnp.int32(0), *(jax.lax.index_in_dim(x, 0, d, keepdims=False) for x, d in batch))
            return jax.tree.map(lambda x: x[None], outs)
        axes = self.axes if len(self.axes) > 1 else self.axes[0]
        groups = jnp.arange(z.ways, dtype=jnp.int32)
        mapped = jax.vmap(single, in_axes=(0, *(d for _, d in batch)), out_axes=0, axis_size=z.ways, spmd_axis_name=axes)
        return mapped(groups, *(x for x, _ in batch))

    def total(self, cut: Cut, x: Any) -> Any:
        """The reduction over the devices."""
        if self.plan.mesh.size > 1:
            x = self.constrain(x, 0, spec=self._partial_spec(cut))
        x = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "or": jnp.any, "and": jnp.all}[cut.op](x, 0)
        if self.plan.mesh.size > 1:
            x = jax.lax.with_sharding_constraint(x, named(self.mesh, self.specs[cut.var]))
        return x.astype(cut.var.aval.dtype)

    def joined(self, pieces: list[Any], s: Status) -> Any:
        """[shares, ways, .., outer * share * inner, ..] -> [.., outer * N * inner, ..]."""
        z, d, inner, found = self.sizes, s.dim, 1, []
        for x, size in zip(pieces, (z.share, z.rest) if z.full else (z.rest,)):
            before, after = x.shape[2 : 2 + d], x.shape[3 + d :]
            inner = s.inner or 1 if s.inner is not None else x.shape[2 + d] // (size * z.outer)
            x = x.reshape((*x.shape[:2], *before, -1, size, inner, *after))
            # shares move next to their examples, ways before them
            x = jnp.moveaxis(x, (1, 0), (d + 1, d + 2))
            found.append(x.reshape((*x.shape[: d + 2], -1, *x.shape[d + 4 :])))
        x = found[0] if len(found) == 1 else jnp.concatenate(found, d + 2)
        return x.reshape((*x.shape[:d], math.prod(x.shape[d : d + 4]), *x.shape[d + 4 :]))


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One way through the batch. `main`, `last`: the share program at the size of all shares and of an uneven last
    one."""

    wanted: tuple[Cut, ...]
    known: tuple[Cut, ...]
    results: tuple[int, ...]
    main: Any
    last: Any


def _padded(arguments: Sequence[Any], specs: Sequence[Spec]) -> list[tuple[Any, Spec]]:
    return [(a, specs[i] if i < len(specs) else ()) for i, a in enumerate(arguments)]


def _slice(x: Any, d: int, start: Any, size: int) -> Any:
    """[.., outer, local, inner, ..] -> [.., outer * size * inner, ..]: the share's part. `d`: where `local` stands."""
    x = jax.lax.dynamic_slice_in_dim(x, start, size, d)
    return x.reshape((*x.shape[: d - 1], math.prod(x.shape[d - 1 : d + 2]), *x.shape[d + 2 :]))


def _wide(x: Any, cut: Cut) -> Any:
    """A partial sum in at least float32."""
    narrow = cut.op == "sum" and jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if narrow else x


def _combine(op: str, a: Any, b: Any) -> Any:
    found = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum, "or": jnp.logical_or, "and": jnp.logical_and}
    return found[op](a, b)


def _start(cut: Cut, shape: tuple[int, ...]) -> Any:
    dtype = cut.var.aval.dtype
    if cut.op in ("or", "and"):
        return jnp.full(shape, cut.op == "and", dtype)
    if cut.op == "sum":
        return _wide(jnp.zeros(shape, dtype), cut)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.full(shape, -jnp.inf if cut.op == "max" else jnp.inf, dtype)
    info = jnp.iinfo(dtype)
    return jnp.full(shape, info.min if cut.op == "max" else info.max, dtype)
