"""A step as shares of its batch: over nodes, over micro-batches, or both; then one reduction and one update.

nodes           the share of each group of devices stands side by side along a leading dimension that is split over
                the slow mesh axes (`jax.vmap(spmd_axis_name=...)`, everything else automatic); that dimension is
                reduced at the end, totals that a share needs before it is done where they stand.
scanned layers  where the plan says `inside`, their gradients cross in the backward loop (see `share_layers`), of
                micro-batches in that of the last one, which is a program of its own then.
micro-batches   the same over all axes that split the batch, in a loop: each device adds up its own partial values,
                in float32 or wider, nothing is reduced between devices inside the loop, and split weights are
                gathered before it. Totals needed before are found by a pass of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jcore
from jax.sharding import NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax.passes import reduce as reduction
from lensjax.passes.compress import Compressed
from lensjax.passes.hoist import Hoisted, hoist
from lensjax.passes.islands import Total, inside, islands
from lensjax.passes.pin import Share, pin
from lensjax.passes.prefetch import Ahead, prefetch
from lensjax.passes.recompute import recompute
from lensjax.passes.reduce import Reducer, combine, exact, over, wide
from lensjax.passes.secondary import copies
from lensjax.passes.shardings import Shardings, named, whole
from lensjax.passes.share_layers import Crossing, Gradient, Moved, layer_by_layer, said, stacked
from lensjax.passes.share_layout import join, own, spread, stack, take, without
from lensjax.passes.share_sizes import inside_loops, sizes
from lensjax.passes.share_specs import total_specs
from lensjax.passes.split import share, update
from lensjax.plan.plan import Micro, Plan, Spec
from lensjax.program.edit import shape_of
from lensjax.program.program import Program
from lensjax.program.status.analysis import Cut


def shares(
    program: Program, plan: Plan, mesh: Any, shardings: Shardings, reduce: Reducer = exact
) -> tuple[Callable[..., list[Any]], dict[str, jax.ShapeDtypeStruct], str]:
    """The step as a function of its flat arguments (then the hidden state, returned after the results), share by share;
    that state; and where gradients of scanned layers are reduced and weights gathered, if the plan is about that.
    `reduce` is what happens to partial gradients over the plan's slow axes. Raises PlanError where the step does not
    split so."""
    made = Shares(program, plan, mesh, shardings, reduce)
    return made.run, made.extra, made.note()


@dataclasses.dataclass(frozen=True)
class Sized:
    """The share program of `size` examples (see `Sizes`). `moved`: the gradients that are totals when it is done."""

    size: int
    program: Hoisted
    moved: Moved


@dataclasses.dataclass(frozen=True)
class Pass:
    """One way through the batch. `main`, `last`: the share program at the size of all shares, and of a last one that
    differs."""

    wanted: tuple[Cut, ...]
    known: tuple[Cut, ...]
    results: tuple[int, ...]
    main: Sized | None
    last: Sized | None

    @property
    def moved(self) -> Moved:
        """What is a total when the last share is done."""
        end = self.last or self.main
        return end.moved if end is not None else Moved()


class Shares:
    """The programs of a step's shares, and how they run as one program."""

    def __init__(self, program: Program, plan: Plan, mesh: Any, shardings: Shardings, reduce: Reducer):
        self.program, self.plan, self.mesh, self.shardings = program, plan, mesh, shardings
        self.reduce = reduce
        self.split, self.sizes = program.split, sizes(program, plan)
        self.count = len(program.arguments)
        self.fixed = tuple(i for i, s in enumerate(self.split.inputs) if s.kind != "B")
        self.copies = copies(program, plan, shardings, self.sizes.slow) if plan.mesh.size > 1 else {}
        self.after = update(program)
        self.specs, self.owners = total_specs(self.after, self.count, shardings)
        if isinstance(reduce, Compressed):
            reduce.check(self.owners.values())
        self.results = tuple(r for r, s in enumerate(self.split.results) if s.kind == "B")
        self.rowwise: set[Any] = set()  # cuts that a scan stacks and the plan reduces there
        self.ahead = Ahead()
        self.passes = self._passes()
        self.finish = self._finish()
        self.extra = self._extra()

    # ---- the programs -------------------------------------------------------------------------------------------

    def _passes(self) -> list[Pass]:
        if self.plan.micro == Micro():  # one share for each node: early totals are reduced where they are needed
            return [self._pass(self.after.known, [], self.results, self._hook)]
        early = [c for c in self.split.cuts if c.early]
        last = [c for c in self.after.known if not c.early]
        stages = sorted({c.stage for c in early})
        found = [
            self._pass([c for c in early if c.stage == n], [c for c in early if c.stage < n], (), None) for n in stages
        ]
        return [*found, self._pass(last, early, self.results, None)]

    def _hook(self, b: Any, cut: Cut, atom: Any, eqn: Any) -> Any:
        return b.apply(Total(cut.op), atom, like=eqn, name="lensjax.total")[0]

    def _pass(self, wanted: Sequence[Cut], known: Sequence[Cut], results: tuple[int, ...], hook: Any) -> Pass:
        z, made = self.sizes, []
        sizes = (z.share if z.full else 0, z.rest)
        for size, ends in zip(sizes, (not z.rest, True)):
            if not size:
                made.append(None)
                continue
            part = share(self.program, size * z.outer, wanted, known, results, hook)
            known = part.known  # those that it reads: the same at every size
            self.rowwise |= self._stacked(part.program, wanted)
            partials = {k: self.partial_spec(c) for k, c in enumerate(wanted)}
            specs = Shardings(tuple(self._share_specs(part.program)), (None,) * (len(wanted) + len(results)), {})
            # A pass for early totals has no backward, for which something would be kept.
            kept = recompute(part.program, self.plan, specs) if any(not c.early for c in wanted) else part.program
            prepared = inside(kept, self.plan, self.mesh, z.axes)
            pinned = pin(prepared, self.plan, self.mesh, specs, Share(z.axes, partials))
            names = self._names([c for c in wanted if c.var in self.rowwise])
            rows = {wanted.index(c): Gradient(n, self.total_spec(c)) for n, c in names.items()}
            moved = Moved()
            if rows and ends:
                pinned, moved = layer_by_layer(pinned, rows, self.count, self._crossing(), z.full > 0 and z.rest > 0)
            if self.plan.prefetch:
                jaxpr, done = prefetch(pinned.jaxpr)
                pinned, self.ahead = dataclasses.replace(pinned, jaxpr=jaxpr), self.ahead + done
            made.append(Sized(size, hoist(islands(pinned, self.mesh, z.axes), self.plan, self.fixed), moved))
        return Pass(tuple(wanted), tuple(known), results, made[0], made[1])

    def _crossing(self) -> Crossing:
        z = self.sizes
        fast = lambda x, spec: self.over_groups("sum", x, spec, apart=True)
        return Crossing(self.mesh, z.axes, z.slow, fast, self.reduce)

    def _stacked(self, part: Program, wanted: Sequence[Cut]) -> set[Any]:
        """The gradients that a share's scans stack and the plan reduces in them, where layers are not split between
        devices (each device takes part in each layer's reduction)."""
        if not inside_loops(self.plan):
            return set()
        able = [k for k, c in enumerate(wanted) if self._apart(c) and not c.early and not self.specs[c.var][0]]
        return {wanted[k].var for k in stacked(part, able)}

    def _share_specs(self, part: Program) -> list[Spec]:
        """Specs of a share's arguments: weights as they are, its own batch over the axes that are left."""
        found = []
        for i, a in enumerate(part.arguments):
            if a.role != "batch" and i < self.count and self.split.inputs[i].kind != "B":
                copy = self.copies.get(i)
                found.append(copy.inside if copy is not None else self.shardings.arguments[i])
            else:
                found.append(whole(len(a.shape)))
        return found

    def partial_spec(self, cut: Cut) -> Spec:
        return without(self.total_spec(cut), self.sizes.axes)

    def total_spec(self, cut: Cut) -> Spec:
        """How a total leaves its reduction. A gradient that slow axes reduce is cut up over the fast ones first, also
        where the update needs it whole: parts cross, and are gathered inside."""
        spec = self.specs.get(cut.var, whole(len(shape_of(cut.var))))
        if cut.var in self.rowwise:
            return ((), *spread(self.plan, self.sizes, shape_of(cut.var)[1:], spec[1:]))
        return spread(self.plan, self.sizes, shape_of(cut.var), spec) if self._apart(cut) else spec

    def _apart(self, cut: Cut) -> bool:
        """Whether this total is a gradient that the plan reduces over its slow axes by itself."""
        return bool(self.sizes.slow) and cut.var in self.owners

    def _names(self, cuts: Sequence[Cut]) -> dict[str, Cut]:
        """The gradients among the cuts by name, the first layers' first. A tensor that is used in several places may
        have several."""
        found: dict[str, Cut] = {}
        for c in reversed([c for c in cuts if self._apart(c)]):
            path, n = self.owners[c.var], 1
            while path in found:
                n += 1
                path = f"{self.owners[c.var]}#{n}"
            found[path] = c
        return found

    def _extra(self) -> dict[str, jax.ShapeDtypeStruct]:
        if not isinstance(self.reduce, Compressed):
            return {}
        one = self.passes[-1]
        every = {n: (c.var.aval, self.total_spec(c)) for n, c in self._names(one.wanted).items()}
        self.reduce.check_used(every, self.sizes.slow)
        last = self._names(self._left(one))
        totals = {n: jax.ShapeDtypeStruct(shape_of(c.var), self._reduced_type(c)) for n, c in last.items()}
        specs = {n: self.total_spec(c) for n, c in last.items()}
        kept = self.reduce.state(totals, mesh=self.mesh, specs=specs, axes=self.sizes.slow)
        return {**kept, **one.moved.memory}

    def note(self) -> str:
        """Where gradients of scanned layers are reduced and weights gathered; empty where the plan is not about it."""
        last = self.passes[-1]
        count = sum(self._apart(c) for c in last.wanted)
        crossing = said(last.moved, count, self.sizes.slow, self.sizes.count > 1) if inside_loops(self.plan) else ""
        return "; ".join(n for n in (crossing, self.ahead.note() if self.plan.prefetch else "") if n)

    def _left(self, one: Pass) -> list[Cut]:
        """The cuts of a pass that are partial when a share is done."""
        return [c for k, c in enumerate(one.wanted) if k not in one.moved.results]

    def _reduced_type(self, cut: Cut) -> Any:
        return jax.eval_shape(lambda: wide(cut.op, jnp.zeros((), cut.var.aval.dtype))).dtype

    def _finish(self) -> Callable[[list[Any], list[Any]], list[Any]]:
        """The update as a function of the arguments `fixed`, which are no batch, and the totals."""
        arguments = (*self.shardings.arguments, (), *(self.specs[c.var] for c in self.after.known))
        results = tuple(self.shardings.results[r] for r in self.after.results)
        specs = Shardings(arguments, results, self.shardings.gradients)
        program = inside(self.after.program, self.plan, self.mesh, ())
        pinned = pin(program, self.plan, self.mesh, specs, whole=False)
        invars = _jax.open_jaxpr(pinned.jaxpr).invars
        taken = [*(invars[i] for i in self.fixed), *invars[self.count :]]
        fn = jcore.jaxpr_as_fun(_jax.close(_jax.rebuild(pinned.jaxpr, invars=taken)))
        return lambda leaves, totals: fn(*leaves, jnp.int32(0), *totals)

    # ---- running ------------------------------------------------------------------------------------------------

    def run(self, *values: Any) -> list[Any]:
        leaves, state = values[: self.count], dict(zip(self.extra, values[self.count :], strict=True))
        inputs = []
        for i, (x, s) in enumerate(zip(leaves, self.split.inputs, strict=True)):
            if s.kind == "B":
                x = self.constrain(stack(x, s, self.sizes), s.dim + 1, inner=s.dim + 2)
            elif i in self.copies:
                x = self.copies[i](x, self.mesh)
            inputs.append(x)
        totals: dict[Any, Any] = {}
        batch: list[Any] = []
        for one in self.passes:
            memory = [state[name] for name in one.moved.memory]
            sums, batch, memory = self.through(one, inputs, [totals[c.var] for c in one.known], memory)
            found, state = self.reduced(one, sums, state | dict(zip(one.moved.memory, memory)))
            totals |= found
        rest = self.finish([leaves[i] for i in self.fixed], [totals[c.var] for c in self.after.known])
        out: list[Any] = [None] * len(self.split.results)
        for r, x in zip((*self.results, *self.after.results), (*batch, *rest), strict=True):
            out[r] = x
        return [*out, *(state[name] for name in self.extra)]

    def constrain(self, x: Any, d: int, spec: Spec | None = None, inner: int | None = None) -> Any:
        """`x` split along dimension d over the shares' axes, along `inner` over the axes that split a share's batch;
        the other dimensions as `spec` says (whole where it says nothing)."""
        if self.plan.mesh.size == 1:
            return x
        entries: list[Any] = [axes or None for axes in spec] if spec is not None else [None] * (x.ndim - 1)
        entries.insert(d, self.sizes.axes or None)
        if inner is not None:
            entries[inner] = self.sizes.inside or None
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def through(
        self, one: Pass, inputs: list[Any], known: list[Any], memory: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """(sums of partial values, stacked along a leading dimension, or totals; the step's batch results; the next
        memory of loops that reduce)."""
        z = self.sizes
        sums: list[Any] | None = None
        collected: list[list[Any]] = []
        fixed: list[Any] = []
        if one.main is not None:
            main, fixed = one.main, one.main.program.before(inputs)
            if z.full == 1:
                sums, outs, more = self.trip(one, main, 0, z.local, inputs, fixed, known, memory)
                collected.append([x[None] for x in outs])
                memory = memory if one.last is not None else more
            else:
                sums, outs = self.loop(
                    one, lambda i: self.trip(one, main, i * z.share, z.local, inputs, fixed, known)[:2]
                )
                collected.append(outs)
        if one.last is not None:
            last, start = one.last, z.full * z.share
            if one.main is None or not last.program.begins_as(one.main.program):
                fixed = last.program.before(inputs)
            before = [sums[k] for k in last.moved.results] if sums is not None else []
            more, outs, memory = self.trip(one, last, start, z.local, inputs, fixed, known, memory, before)
            if sums is not None:
                pairs = enumerate(zip(one.wanted, sums, more, strict=True))
                more = [b if k in last.moved.results else combine(c.op, a, b) for k, (c, a, b) in pairs]
            sums = more
            collected.append([x[None] for x in outs])
        assert sums is not None
        joined = [join([c[k] for c in collected], self.split.results[r], z) for k, r in enumerate(one.results)]
        return sums, joined, memory

    def loop(self, one: Pass, trip: Callable[[Any], tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
        def body(sums, i):
            more, outs = trip(i)
            return [combine(c.op, a, b) for c, a, b in zip(one.wanted, sums, more)], outs

        first = []
        for c in one.wanted:
            zeros = reduction.start(c.op, c.var.aval.dtype, (self.sizes.groups, *shape_of(c.var)))
            first.append(self.constrain(zeros, 0, spec=self.partial_spec(c)))
        return jax.lax.scan(body, first, jnp.arange(self.sizes.full, dtype=jnp.int32))

    def trip(
        self, one: Pass, part: Sized, start: Any, local: Any, inputs: list[Any], fixed: list[Any], known: list[Any],
        memory: Sequence[Any] = (), before: Sequence[Any] = (),
    ) -> tuple[list[Any], list[Any], list[Any]]:  # fmt: skip
        """One share on every group of devices: (partial values, batch results), stacked along a leading dimension, and
        what was reduced on the way with its memory, which are not. It begins with example `start` of the `local` of
        each group; `inputs` have all of these, or the share's only. `before`: sums of the shares before, of what is
        reduced on the way."""
        z, statuses, count = self.sizes, self.split.inputs, len(one.wanted)
        memory = memory if part.moved.memory else ()

        def single(group, before, *batch):
            parts = iter(batch)
            args = [
                take(next(parts), s.dim + 1, start, part.size) if s.kind == "B" else x for x, s in zip(inputs, statuses)
            ]
            outs = part.program.run(args, fixed, group * local + start, [*known, *memory, *before])
            sums = [x if k in done else wide(c.op, x) for k, (x, c) in enumerate(zip(outs, one.wanted))]
            return sums, outs[count : count + len(one.results)], outs[count + len(one.results) :]

        done = part.moved.results
        batch = [(x, s.dim + 1) for x, s in zip(inputs, statuses) if s.kind == "B"]
        if z.groups == 1:
            only = [jax.lax.index_in_dim(x, 0, d, keepdims=False) for x, d in batch]
            return jax.tree.map(lambda x: x[None], single(jnp.int32(0), [], *only))
        mapped = jax.vmap(
            single,
            in_axes=(0, 0, *(d for _, d in batch)),
            out_axes=([None if k in done else 0 for k in range(count)], 0, None),
            axis_size=z.groups,
            spmd_axis_name=z.axes,
        )
        return mapped(jnp.arange(z.groups, dtype=jnp.int32), list(before), *(x for x, _ in batch))

    def reduced(self, one: Pass, sums: Sequence[Any], state: dict[str, Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
        """The totals by cut variable, and the next state: over the groups first, the fastest axes first, then the
        gradients over the plan's slow axes, together."""
        cuts = one.wanted
        totals = {
            c.var: x if k in one.moved.results else self.inside(c, x)
            for k, (c, x) in enumerate(zip(cuts, sums, strict=True))
        }
        named_cuts = self._names(self._left(one)) if self.plan.mesh.size > 1 else {}
        if named_cuts:
            stacked = {n: totals[c.var] for n, c in named_cuts.items()}
            specs = {n: self.total_spec(c) for n, c in named_cuts.items()}
            reduce = self.reduce if one is self.passes[-1] else exact  # early totals: no memory
            made, new = reduce(stacked, mesh=self.mesh, specs=specs, axes=self.sizes.slow, state=state)
            state = dict(new)
            totals |= {c.var: made[n] for n, c in named_cuts.items()}
        return {c.var: self.settled(c, totals[c.var]) for c in cuts}, state

    def settled(self, cut: Cut, x: Any) -> Any:
        x = x.astype(cut.var.aval.dtype)
        if self.plan.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, named(self.mesh, self.total_spec(cut)))

    def inside(self, cut: Cut, x: Any) -> Any:
        """The reduction over the groups; a gradient is left stacked along the plan's slow axes."""
        return self.over_groups(cut.op, x, self.total_spec(cut), self._apart(cut))

    def over_groups(self, op: str, x: Any, spec: Spec, apart: bool) -> Any:
        """[groups, ..] -> the total, split as `spec` says: first over the axes that split it, the fastest first, so
        that slower ones reduce parts only; then over the rest at once. `apart`: it is left stacked along the slow
        axes."""
        z, shape = self.sizes, self.plan.mesh.shape
        if self.plan.mesh.size == 1:
            return over(op, x)
        x = self.constrain(x, 0, spec=without(spec, z.axes))
        if op == "same":
            return own(x, self.mesh, z.axes)
        left, scattered = z.axes, {a for axes in spec for a in axes}
        while left:
            if apart and z.slow == left:
                return x
            *rest, fast = left
            if fast not in scattered and not apart:
                return over(op, x)
            left = tuple(rest)
            x = over(op, x.reshape((-1, shape[fast], *x.shape[1:])), 1)
            x = jax.lax.with_sharding_constraint(x, named(self.mesh, (left, *without(spec, left))))
        return x[0]
