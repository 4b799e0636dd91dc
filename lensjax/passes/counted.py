"""A step in micro-batches as programs that do not know how many there are.

    cut      (start, batch) -> the micro-batch at `start`; moves data, and is the only program that has the batch's size
    prepare  (arguments without a batch) -> what is made of them once: gathered weights, second copies
    begin    () -> (0, partial values that change nothing)
    share    (start, local, partial values, ..., micro-batch) -> (next start, partial values, results of examples)
    totals   (partial values) -> the totals that a later pass reads
    update   (arguments without a batch, partial values, totals, hidden state) -> (the other results, hidden state)
    join     (results of examples of all micro-batches) -> the step's

They are made from `passes.shares`, which runs the same equations as one program. What depends on the number of examples
is an argument of each: the literals (see `passes.lift`), and the examples of each group of devices, `local`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lensjax.passes import reduce as reduction
from lensjax.passes.lift import lift
from lensjax.passes.reduce import Reducer, combine
from lensjax.passes.shardings import Shardings, named, whole
from lensjax.passes.share_layout import join, stack
from lensjax.passes.shares import Pass, Shares, Sized
from lensjax.plan.plan import Plan, Spec
from lensjax.program.edit import shape_of
from lensjax.program.program import Program


class Counted:
    """The programs of a step of one batch size under a plan. `shares`: what they are made from; `arguments`: where all
    arguments lie; `batch`, `fixed`: positions of those with and without a batch; `copied`: of
    `fixed`, those that a second copy stands for, `copied_at` among them; `values`: the numbers that belong to
    the size, the last of `fixed`. Raises PlanError as `passes.shares` does."""

    def __init__(self, program: Program, plan: Plan, mesh: Any, shardings: Shardings, reduce: Reducer):
        lifted = lift(program)
        more = tuple(whole(v.ndim) for v in lifted.values)
        self.values = lifted.values
        self.mesh = mesh
        self.arguments = self.named([*shardings.arguments, *more])
        self.shares = Shares(
            lifted.program, plan, mesh, dataclasses.replace(shardings, arguments=(*shardings.arguments, *more)), reduce
        )
        self.fixed = self.shares.fixed
        self.batch = tuple(i for i in range(self.shares.count) if i not in set(self.fixed))
        self.copied = tuple(i for i in self.fixed if i in self.shares.copies)
        self.copied_at = tuple(self.fixed.index(i) for i in self.copied)
        last = self.shares.passes[-1]
        self.early = [c for c in self.shares.after.known if c not in last.wanted]

    # ---- where values lie between the programs ----------------------------------------------------------------------

    def cut_specs(self) -> list[Spec]:
        """Of a micro-batch, [.., outer, groups, size, inner, ..]."""
        found = []
        for i in self.batch:
            spec = list(whole(len(self.shares.program.arguments[i].shape) + 3))
            spec[self.shares.split.inputs[i].dim + 1] = self.shares.sizes.axes
            found.append(tuple(spec))
        return found

    def sum_specs(self, one: Pass) -> list[Spec]:
        """Of partial values, [groups, ..]."""
        return [(self.shares.sizes.axes, *self.shares.partial_spec(c)) for c in one.wanted]

    def total_specs(self, one: Pass) -> list[Spec]:
        return [self.shares.total_spec(c) for c in one.wanted]

    def named(self, specs: Sequence[Spec]) -> list[Any]:
        return [named(self.mesh, s) for s in specs]

    # ---- the programs -----------------------------------------------------------------------------------------------

    def cut(self, size: int) -> Callable[..., list[Any]]:
        statuses = [self.shares.split.inputs[i] for i in self.batch]

        def cut(start, batch):
            made = []
            for x, s in zip(batch, statuses, strict=True):
                x = self.shares.constrain(stack(x, s, self.shares.sizes), s.dim + 1)
                made.append(jax.lax.dynamic_slice_in_dim(x, start, size, s.dim + 2))
            return made

        return cut

    def prepare(self, part: Sized) -> Callable[..., Any]:
        def prepare(fixed):
            inputs = self._inputs(fixed, [])
            copies = [self.shares.copies[i](inputs[i], self.mesh) for i in self.copied]
            for i, x in zip(self.copied, copies):
                inputs[i] = x
            return copies, part.program.before(inputs)

        return prepare

    def begin(self, one: Pass) -> Callable[[], Any]:
        def begin():
            groups = self.shares.sizes.groups
            sums = [reduction.start(c.op, c.var.aval.dtype, (groups, *shape_of(c.var))) for c in one.wanted]
            return jnp.int32(0), sums

        return begin

    def share(self, one: Pass, part: Sized) -> Callable[..., Any]:
        def micro_batch(start, local, sums, read, made, known, batch):
            inputs = self._inputs(read, batch)
            more, outs, _ = self.shares.trip(one, part, start, local, inputs, made, known)
            return start + part.size, [combine(c.op, a, b) for c, a, b in zip(one.wanted, sums, more)], outs

        return micro_batch

    def totals(self, one: Pass) -> Callable[..., list[Any]]:
        def totals(sums):
            found, _ = self.shares.reduced(one, sums, {})
            return [found[c.var] for c in one.wanted]

        return totals

    def update(self) -> Callable[..., Any]:
        shares = self.shares

        def update(fixed, sums, early, hidden):
            found, state = shares.reduced(shares.passes[-1], sums, dict(zip(shares.extra, hidden, strict=True)))
            found |= {c.var: x for c, x in zip(self.early, early, strict=True)}
            rest = shares.finish(list(fixed), [found[c.var] for c in shares.after.known])
            return rest, [state[name] for name in shares.extra]

        return update

    def join(self) -> Callable[..., list[Any]]:
        """Takes the results of the examples of each size of micro-batch: a list of one list for each."""
        shares = self.shares

        def join_results(pieces):
            stacked = [[jnp.stack(xs) for xs in zip(*outs, strict=True)] for outs in pieces]
            return [
                join([s[k] for s in stacked], shares.split.results[r], shares.sizes)
                for k, r in enumerate(shares.passes[-1].results)
            ]

        return join_results

    def _inputs(self, fixed: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        inputs: list[Any] = [None] * self.shares.count
        for i, x in (*zip(self.fixed, fixed), *zip(self.batch, batch)):
            inputs[i] = x
        return inputs
