"""The recompute pass: each layer keeps, makes again, or moves to the host what its level in the plan says.

The program holds forward and backward of the whole step, so nothing hooks into JAX: scanned layers are recut
(`recompute_scans`), layers that are written out get slices and gates (`recompute_layers`), also inside the body of an
accumulation loop. Branches, while loops, kernels and the user's own `jax.checkpoint` stay whole, and equations with
effects run once. A key gives the same draw the second time: random numbers do not change.
"""

from __future__ import annotations

import fnmatch
import os.path
from collections.abc import Mapping, Sequence, Set
from typing import Any

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.passes.recompute_constants import sink_constants
from lensjax.passes.recompute_copy import Copies, live, with_facts
from lensjax.passes.recompute_layers import REMAT, Gates, Layer, recompute_layers
from lensjax.passes.recompute_scans import Pair, recompute_scan, scan_pairs
from lensjax.passes.recompute_split import split_scan
from lensjax.passes.shardings import Shardings, batch_axes, ways
from lensjax.plan.levels import KEEP, Level, for_stack, level_of
from lensjax.plan.plan import Plan
from lensjax.program.boundary import BackwardPass, backward_passes, densest_place, direction
from lensjax.program.edit import is_var, map_bodies
from lensjax.program.program import Program
from lensjax.program.segments import Segment, named_views, regrouped, segments
from lensjax.program.values import results, table


def recompute(program: Program, plan: Plan, shardings: Shardings) -> Program:
    """`program` with the plan's levels carried out; the same object where every layer keeps everything. Raises
    PlanError for a level that is none, or for a layer that the program does not have."""
    if all(text == KEEP.kind for text in plan.layers.values()):
        return program
    work = _Recompute(program, plan, shardings)
    jaxpr = work.top()
    _check_names(plan, work.seen)
    return with_facts(program, jaxpr, work.copies, not set(plan.rules.activations) <= {"batch"})


def layer_names(program: Program, plan: Plan, shardings: Shardings) -> tuple[str, ...]:
    """The layers that `plan.layers` may name, in program order."""
    work = _Recompute(program, plan, shardings)
    work.top()
    return tuple(dict.fromkeys(n for n in work.seen if n))


def layers_at(program: Program, plan: Plan, shardings: Shardings) -> tuple[Layer, ...]:
    """What every layer keeps and makes again under the plan's levels, in program order of each body. Where every level
    is keep, segments that are written out are not told apart and not listed."""
    work = _Recompute(program, plan, shardings)
    work.top()
    return tuple(work.record)


def _check_names(plan: Plan, seen: Sequence[str]) -> None:
    for pattern in plan.layers:
        if pattern not in ("*", "") and not any(fnmatch.fnmatchcase(n, pattern) or n == pattern for n in seen):
            raise PlanError(
                f"field 'layers.{pattern}' names a layer that the step does not have",
                hint=f"layers of this step: {', '.join(dict.fromkeys(n for n in seen if n)) or 'none'}; "
                "'*' stands for all",
            )


class _Recompute:
    def __init__(self, program: Program, plan: Plan, shardings: Shardings):
        self.program, self.plan = program, plan
        self.copies = Copies()
        self.seen: list[str] = []
        self.record: list[Layer] = []
        inner = _jax.open_jaxpr(program.jaxpr)
        roles = ("parameter", "constant")
        self.names = {v: a.path for v, a in zip(inner.invars, program.arguments) if a.role in roles}
        self.split = {v for v, a, s in zip(inner.invars, program.arguments, shardings.arguments) if any(s)}
        self.late = ways(plan, batch_axes(plan)) > 1

    def top(self) -> Any:
        jaxpr = sink_constants(self.program.jaxpr, self.copies)
        return live(self._body(jaxpr, self.names, self.split, top=True))

    # ---- one body -------------------------------------------------------------------------------------------------

    def _body(
        self, jaxpr: Any, names: Mapping[Any, str], split: Set[Any], around: Set[str] = frozenset(), top: bool = False
    ) -> Any:
        """`around`: names of the stacks of layers in whose bodies this one is."""
        names = named_views(jaxpr, names)
        name_of = lambda atoms: common_path([names[a] for a in atoms if is_var(a) and a in names])
        jaxpr = self._layer_scans(jaxpr, name_of, around)
        names = named_views(jaxpr, names)  # a stack in parts reads slices of its parameters
        pairs = scan_pairs(jaxpr, name_of)
        around = around | {p.name for p in pairs if p.layers}
        jaxpr, repeated = self._written_out(jaxpr, names, split, pairs, top)
        for pair in sorted(scan_pairs(jaxpr, name_of), key=lambda p: -p.backward):  # what is recut may grow
            first = _jax.open_jaxpr(jaxpr).eqns[pair.forward].outvars
            if not pair.layers and not any(v in repeated or v in self.copies.old for v in first):
                self.seen.append(pair.name)
                levels = level_of(self.plan.layers, pair.name or "loop")
                level = levels[0] if len(levels) == 1 else KEEP  # counts are for layers, not for steps in time
                jaxpr = recompute_scan(jaxpr, pair, level, self.copies, self.record)
        return self._inside(jaxpr, names, split, around)

    def _layer_scans(self, jaxpr: Any, name_of: Any, around: Set[str]) -> Any:
        """Stacks of layers, recut at their levels; a stack with several levels is split first."""
        done: set[int] = set()
        while True:
            todo = [p for p in scan_pairs(jaxpr, name_of) if p.layers and self._id(jaxpr, p) not in done]
            if not todo:
                return jaxpr
            pair = todo[0]
            self.seen.append(pair.name)
            length = _jax.open_jaxpr(jaxpr).eqns[pair.forward].params["length"]
            levels = level_of(self.plan.layers, pair.name)
            if pair.name in around and len(levels) > 1:
                levels = (KEEP,)  # the counts were for the stack around this one
            levels = for_stack(levels, length, pair.name)
            jaxpr, parts = split_scan(jaxpr, pair, [p.count or 0 for p in levels], self.copies)
            for part, level in zip(parts, levels):
                done.add(self._id(jaxpr, part))
                jaxpr = recompute_scan(jaxpr, part, level, self.copies, self.record)

    @staticmethod
    def _id(jaxpr: Any, pair: Pair) -> int:
        """What stays of a pair while it is recut: the backward scan's first result."""
        return id(results(_jax.open_jaxpr(jaxpr).eqns[pair.backward])[0])

    def _written_out(
        self, jaxpr: Any, names: Mapping[Any, str], split: Set[Any], pairs: Sequence[Pair], top: bool
    ) -> tuple[Any, set[Any]]:
        """Layers that are written out; also the results of equations that are made again there."""
        inner = _jax.open_jaxpr(jaxpr)
        spans = backward_passes(jaxpr)
        if not spans and top and not pairs and not any(direction(e) for e in inner.eqns):
            found = densest_place(jaxpr, table(jaxpr))
            spans = (found,) if found is not None else ()
        # Layers that the user recomputes (jax.checkpoint) are left as they are.
        spans = tuple(s for s in spans if not any(e.primitive.name in REMAT for e in inner.eqns[s.split : s.stop]))
        whole = frozenset(p.forward for p in pairs if p.layers)
        work = []
        for span in spans:
            parts = segments(jaxpr, span, table(jaxpr), names, whole)
            levels = [(s, self._level(s)) for s in parts]
            if any(level.kind != KEEP.kind for _, level in levels[:-1]):
                work.append((span, merged(jaxpr, span, levels, names, whole)))
        if not work:
            return jaxpr, set()
        held = set(split)
        for eqn in inner.eqns:  # views of split weights: the pin pass gathers them where they are used
            source = eqn.invars[0] if eqn.invars else None
            if (
                eqn.primitive.name in ("convert_element_type", "copy", "transpose")
                and is_var(source)
                and source in held
            ):
                held.add(eqn.outvars[0])
        gates = Gates(held, self.late, lambda v: self.copies.root(v)[0] in self.program.batch.dims)
        made = recompute_layers(jaxpr, work, whole, self.copies, gates, self.record)
        return made, self._repeated(jaxpr, work)

    def _level(self, segment: Segment) -> Level:
        if segment.name:
            self.seen.append(segment.name)
        levels = level_of(self.plan.layers, segment.name)
        if len(levels) > 1 and segment.name not in self.plan.layers:
            return KEEP  # a pattern with counts is about stacks
        return for_stack(levels, 1, segment.name)[0]

    def _repeated(self, jaxpr: Any, work: Any) -> set[Any]:
        eqns = _jax.open_jaxpr(jaxpr).eqns
        return {
            v
            for _, levels in work
            for s, level in levels[:-1]
            if level.kind != KEEP.kind
            for e in eqns[s.start : s.stop]
            for v in e.outvars
        }

    def _inside(self, jaxpr: Any, names: Mapping[Any, str], split: Set[Any], around: Set[str]) -> Any:
        """Bodies of loops: an accumulation loop holds a whole backward pass, a recut scan may hold another pair."""
        inner = _jax.open_jaxpr(jaxpr)
        eqns = []
        for eqn in inner.eqns:
            if eqn.primitive.name == "scan":
                passed = list(eqn.invars)

                def rewrite(body: Any, _: int, passed: list[Any] = passed) -> Any:
                    args = _jax.open_jaxpr(body).invars
                    known = {v: names[a] for v, a in zip(args, passed) if is_var(a) and a in names}
                    apart = {v for v, a in zip(args, passed) if is_var(a) and a in split}
                    return self._body(body, known, apart, around)

                eqn = map_bodies(eqn, rewrite)
            eqns.append(eqn)
        return _jax.rebuild(jaxpr, eqns=eqns)


def merged(
    jaxpr: Any, span: BackwardPass, levels: Sequence[tuple[Segment, Level]], names: Any, whole: frozenset[int]
) -> list[tuple[Segment, Level]]:
    """Levels with neighbours at the level `recompute` cut anew where that holds least."""
    out: list[tuple[Segment, Level]] = []
    run: list[Segment] = []

    def close() -> None:
        if run:
            out.extend((s, Level("recompute")) for s in regrouped(jaxpr, span, run, whole))
            run.clear()

    for segment, level in levels[:-1]:
        if level.kind == "recompute" and not any(segment.start <= i < segment.stop for i in whole):
            run.append(segment)
        else:
            close()
            out.append((segment, level))
    close()
    return [*out, levels[-1]]


def common_path(paths: Sequence[str]) -> str:
    """The common directory of paths; the directory of one."""
    if len(set(paths)) == 1:
        return os.path.dirname(paths[0])
    return os.path.commonpath(["/" + p for p in paths]).strip("/") if paths else ""
