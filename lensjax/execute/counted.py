"""Micro-batches of any number, by programs that are compiled once.

A plan that gives the size of the micro-batches and not their number (`Micro(share=16)`) runs as several programs (see
`passes.counted`), called one after the other: each micro-batch adds its partial values to those before. A batch of
another size traces the step again, and runs what is compiled already where the programs are the same, letter by letter,
as those that are at hand; any that is not is compiled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax.execute.ahead import ahead
from lensjax.execute.place import place
from lensjax.passes.compress import reducer
from lensjax.passes.counted import Counted
from lensjax.passes.emit import Emitted
from lensjax.passes.shardings import resolve
from lensjax.passes.shares import Pass, Sized


@dataclasses.dataclass(frozen=True)
class _Trip:
    """Micro-batches of one size in one pass: `count` of them. `prepare` is None where nothing is made once."""

    count: int
    cut: Any
    prepare: Any
    share: Any


@dataclasses.dataclass(frozen=True)
class _Through:
    """One pass. `known`: the totals that it reads, (pass, position) of each; `totals`: None for the last pass."""

    begin: Any
    trips: tuple[_Trip, ...]
    known: tuple[tuple[int, int], ...]
    totals: Any


class Parts:
    """A step of one batch size as compiled programs: called as the one program would be, with flat leaves (captured
    arrays included), then the hidden state. `store`: programs that are compiled already, of any size, by what they are;
    `compiled`: the names of those that were not there."""

    def __init__(self, emitted: Emitted, store: dict[str, Any]):
        self.emitted, self.store = emitted, store
        self.compiled: list[str] = []
        program, plan, mesh = emitted.program, emitted.plan, emitted.mesh
        self.counted = Counted(program, plan, mesh, resolve(program, plan), reducer(plan))
        self.passes: list[_Through] = []
        self.ahead = ahead(mesh)  # each of these programs waits in the devices' queues as a whole step does

    @property
    def said(self) -> str:
        """What of this size had to be compiled, for the user."""
        again = sorted({n.replace("_", " ") for n in self.compiled} - {"cut", "join results"})
        if not again:
            return ", its micro-batches are not compiled again"
        return f", compiled again were: {', '.join(again)}"

    # ---- compiling --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compiles what is not there."""
        if self.passes:
            return
        c, z = self.counted, self.counted.shares.sizes
        whole = NamedSharding(self.emitted.mesh, PartitionSpec())
        everything = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type, sharding=sharding)
            for v, sharding in zip(_jax.open_jaxpr(c.shares.program.jaxpr).invars, c.arguments, strict=True)
        ]
        self.values = [place(v, whole) for v in c.values]
        self.local = place(np.asarray(z.local, np.int32), whole)
        fixed, batch = [everything[i] for i in c.fixed], [everything[i] for i in c.batch]
        count = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
        passes, totals, outs = [], [], []
        for one in c.shares.passes:
            where = (whole, c.named(c.sum_specs(one)))
            begin, (_, sums) = self._compile(c.begin(one), (), where)
            trips, outs = [], []
            known = tuple(_place(cut, c.shares.passes) for cut in one.known)
            given = [totals[p][k] for p, k in known]
            for part, times in ((one.main, z.full), (one.last, 1)):
                if part is not None:
                    trip, made = self._trip(one, part, times, fixed, batch, sums, given, count)
                    trips.append(trip)
                    outs.append([made] * times)
            reduce = None
            if one is not c.shares.passes[-1]:
                reduce, found = self._compile(c.totals(one), (sums,), c.named(c.total_specs(one)), (0,))
                totals.append(found)
            passes.append(_Through(begin, tuple(trips), known, reduce))
        self.early = [_place(cut, c.shares.passes) for cut in c.early]
        self._finish(fixed, sums, [totals[p][k] for p, k in self.early], outs)
        self.passes = passes

    def _trip(
        self,
        one: Pass,
        part: Sized,
        times: int,
        fixed: list[Any],
        batch: list[Any],
        sums: list[Any],
        known: list[Any],
        count: Any,
    ) -> tuple[_Trip, list[Any]]:
        """(the programs of micro-batches of one size, the results of the examples of one)."""
        c = self.counted
        cut, micro = self._compile(c.cut(part.size), (count, batch), c.named(c.cut_specs()))
        prepare, copies, made = None, [], []
        if c.copied or _jax.open_jaxpr(part.program.first).outvars:
            prepare, (copies, made) = self._compile(c.prepare(part), (fixed,), None)
        read = self._read(fixed, copies)
        where = (count.sharding, [s.sharding for s in sums], None)
        share, (_, _, outs) = self._compile(
            c.share(one, part), (count, count, sums, read, made, known, micro), where, (2,)
        )
        return _Trip(times, cut, prepare, share), outs

    def _finish(self, fixed: list[Any], sums: list[Any], early: list[Any], outs: list[Any]) -> None:
        c, e = self.counted, self.emitted
        hidden = list(e.extra.values())
        donated = set(e.donated)
        gone = [k for k, i in enumerate(c.fixed) if i in donated]
        kept = [k for k, i in enumerate(c.fixed) if i not in donated]
        self.gone, self.kept, update = gone, kept, c.update()

        def update_state(given, held, sums, early, hidden):
            leaves: list[Any] = [None] * len(c.fixed)
            for k, x in (*zip(gone, given), *zip(kept, held)):
                leaves[k] = x
            return update(leaves, sums, early, hidden)

        results = [e.results[r] for r in c.shares.after.results]
        args = ([fixed[k] for k in gone], [fixed[k] for k in kept], sums, early, hidden)
        self.update, _ = self._compile(update_state, args, (results, [x.sharding for x in hidden]), (0, 2, 4))
        self.join = None
        if c.shares.results:
            self.join, _ = self._compile(c.join(), (outs,), [e.results[r] for r in c.shares.results])

    def _compile(
        self, fn: Callable[..., Any], args: tuple[Any, ...], where: Any, donate: tuple[int, ...] = ()
    ) -> tuple[Any, Any]:
        """(`fn` compiled for arguments given as shapes with shardings, its results as such). `where`: shardings of the
        results, None where the compiler chooses; `donate`: arguments whose buffers it may take."""
        options = self.emitted.options()
        jitted = jax.jit(fn, out_shardings=where, donate_argnums=donate, keep_unused=True, compiler_options=options)
        traced = jitted.trace(*args)
        with warnings.catch_warnings():  # a partial value may find no result of its layout
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            lowered = traced.lower()
        out = jax.tree.structure(traced.out_info)
        types = [x.aval for x in _jax.open_jaxpr(traced.jaxpr).outvars]
        said = (lowered.as_text(), str(types), str(jax.tree.structure(args)), str(out), str(options))
        key = hashlib.sha256("\0".join(said).encode()).hexdigest()
        if key not in self.store:
            self.store[key] = lowered.compile()
            self.compiled.append(fn.__name__)
        made = self.store[key]
        lies = jax.tree.leaves(made.output_shardings)
        flat = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type, sharding=s) for t, s in zip(types, lies)]
        return made, jax.tree.unflatten(out, flat)

    # ---- running ----------------------------------------------------------------------------------------------------

    def __call__(self, *given: Any) -> list[Any]:
        self.prepare()
        c, e = self.counted, self.emitted
        count = len(e.arguments)
        leaves = [
            x if a.result is not None and a.role != "batch" else place(x, s)
            for x, a, s in zip(given[:count], e.program.arguments, e.arguments)
        ]
        leaves += self.values
        fixed, batch = [leaves[i] for i in c.fixed], [leaves[i] for i in c.batch]
        totals: list[list[Any]] = []
        sums, pieces = [], []
        for one in self.passes:
            start, sums = self.ahead(one.begin())
            pieces = []
            for trip in one.trips:
                copies, made = self.ahead(trip.prepare(fixed)) if trip.prepare is not None else ([], [])
                read, known, outs = self._read(fixed, copies), [totals[p][k] for p, k in one.known], []
                for _ in range(trip.count):
                    micro = self.ahead(trip.cut(start, batch))
                    start, sums, results = self.ahead(trip.share(start, self.local, sums, read, made, known, micro))
                    outs.append(results)
                pieces.append(outs)
            if one.totals is not None:
                totals.append(self.ahead(one.totals(sums)))
        copies = made = read = micro = None  # gathered weights: gone before the update needs memory
        early = [totals[p][k] for p, k in self.early]
        gone, kept = [fixed[k] for k in self.gone], [fixed[k] for k in self.kept]
        rest, hidden = self.ahead(self.update(gone, kept, sums, early, list(given[count:])))
        results: list[Any] = [None] * len(e.results)
        joined = self.ahead(self.join(pieces)) if self.join is not None else []
        for r, x in zip((*c.shares.results, *c.shares.after.results), (*joined, *rest), strict=True):
            results[r] = x
        return [*results, *hidden]

    def _read(self, fixed: Sequence[Any], copies: Sequence[Any]) -> list[Any]:
        """What a share reads of the arguments without a batch: second copies in place of weights that have one."""
        read = list(fixed)
        for k, x in zip(self.counted.copied_at, copies, strict=True):
            read[k] = x
        return read


def _place(cut: Any, passes: Sequence[Pass]) -> tuple[int, int]:
    """(the pass, the position among its totals) in which a total is found."""
    return next((p, k) for p, one in enumerate(passes) for k, other in enumerate(one.wanted) if other is cut)
