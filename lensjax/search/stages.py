"""Stages with the best plan of each: the inner search of a stage on its part of the cluster.

A stage goes through `micro` micro-batches one after the other: weights that are stored split are gathered with every
one, gradients are reduced after the last. For each mesh two ways to store everything are compared: the best with
parameters whole along the axes that split the batch (ZeRO-1, as in Megatron-LM's pipelines), and the best of all for
the last micro-batch. Of the meshes of a part those are looked at that are fastest, or hold least, for the step as a
whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from lensjax.search.build import mesh_names
from lensjax.search.inner import Case, Model
from lensjax.search.line import Line, Span, line_of
from lensjax.search.links import Links
from lensjax.search.problem import Problem
from lensjax.search.solve import Solution, solve
from lensjax.search.space import Shape, shapes
from lensjax.search.stage import Stage, cut, key_of, saved
from lensjax.search.tables import Tables
from lensjax.topology.parts import part

# Of the meshes of a part that split the batch in as many ways: so many of the fastest for the whole step, and so many
# of those that hold least.
FASTEST, SMALLEST = 4, 2


@dataclasses.dataclass(frozen=True)
class Run:
    """How a stage is run: on one of `parts` equal parts of the cluster, `micro` micro-batches, `flying` of them held at
    a time (the one that is worked on among them)."""

    parts: int
    micro: int
    flying: int = 1


@dataclasses.dataclass(frozen=True)
class Placed:
    """A stage with its plan. `layers`: of each stack that the step scans; `mesh`: as in "dp=4,tp=2". Seconds of one
    micro-batch, forward and backward (`micro_s`), and of what is done once a step after the last one (`once_s`); bytes
    per device. `ways`: in how many parts the activations at its ends are split."""

    layers: tuple[int, ...]
    mesh: str
    micro_s: float
    once_s: float
    bytes: float
    ways: int


@dataclasses.dataclass(frozen=True)
class _Cut:
    stage: Stage
    tables: Tables
    saved: np.ndarray


class Stages:
    """The stages of one problem's step, each kind of stage worked out once."""

    def __init__(self, problem: Problem):
        self.problem = problem = problem.written_out
        self.line: Line = line_of(problem.program, problem.unsplit, problem.tables)
        self._cuts: dict[tuple, _Cut] = {}
        self._models: dict[tuple, Model] = {}
        self._shapes: dict[int, tuple[Shape, ...]] = {1: problem.shapes}
        self._links: dict[int, Links] = {}
        self._ordered: dict[tuple, tuple[Model, list[tuple[float, Shape]]]] = {}
        self._found: dict[tuple, tuple[float, Solution] | None] = {}

    def stage(self, span: Span) -> Stage:
        return self._cut(span).stage

    def best(self, span: Span, run: Run, memory: float) -> Placed | None:
        """The stage on the slots `span` with the plan that takes it through all micro-batches fastest; None where none
        holds at most `memory` bytes per device."""
        free = self._search(span, dataclasses.replace(run, flying=1), math.inf)
        if free is None:
            return None
        # The fastest of all is the fastest of those that fit, if it fits: most stages need no second search.
        if self._held(span, run, free[1]) > memory:
            free = self._search(span, run, memory)
        return self._placed(span, run, *free) if free is not None else None

    def whole(self, run: Run) -> float:
        """Seconds that the whole step's kernels and what is sent between them take a micro-batch on one part, at least;
        infinite where the batch does not divide."""
        p = self.problem
        model = Model(p.program, p.tables, self._link(run.parts), run.micro, piece=True, like=p.model)
        return min((model.floor(s.pattern, s.sizes) - model.once for s in self._fitting(run)), default=math.inf)

    # ---- the search of one stage --------------------------------------------------------------------------------

    def _search(self, span: Span, run: Run, memory: float) -> tuple[float, Solution] | None:
        """(seconds of a micro-batch, solution)."""
        key = (key_of(self.line, span), run, memory)
        if key in self._found:
            return self._found[key]
        model, order = self._order(span, run)
        best: tuple[float, float, Solution] | None = None
        for floor, shape in order:
            if best is not None and run.micro * floor >= best[0]:
                break
            left = memory - self._flying(span, run, model, shape)
            if model.least(shape.pattern, shape.sizes) > left:
                continue
            for case in self._cases(model, shape, run):
                solution = solve(case, left)
                if solution is None:
                    continue
                one = case.piece(solution.chosen, model.once)
                value = (run.micro - 1) * one + solution.seconds
                if best is None or value < best[0]:
                    best = value, one, solution
        self._found[key] = best[1:] if best is not None else None
        return self._found[key]

    def _order(self, span: Span, run: Run) -> tuple[Model, list[tuple[float, Shape]]]:
        """The model of a stage's micro-batch, and its meshes by the seconds that it takes at least on them."""
        kind = key_of(self.line, span)
        key = (kind, run.parts, run.micro)
        if key not in self._ordered:
            own = self._cut(span)
            links, like = self._link(run.parts), self._models.get(kind)
            model = Model(own.stage.program, own.tables, links, run.micro, piece=True, like=like)
            self._models.setdefault(kind, model)
            floors = [(model.floor(s.pattern, s.sizes) - model.once, s) for s in self._fitting(run)]
            self._ordered[key] = model, sorted(floors, key=lambda x: x[0])
        return self._ordered[key]

    @staticmethod
    def _cases(model: Model, shape: Shape, run: Run) -> Iterator[Case]:
        case = model.case(shape.pattern, shape.sizes, True)
        if run.micro == 1:
            yield case
            yield model.case(shape.pattern, shape.sizes, False)
            return
        whole = [[o for o in options if not o.storage.params] for options in case.options]
        yield dataclasses.replace(case, options=whole)
        if any(len(a) < len(b) for a, b in zip(whole, case.options)):
            yield case

    def _flying(self, span: Span, run: Run, model: Model, shape: Shape) -> float:
        """Bytes of the micro-batches in flight but the one that is worked on."""
        if run.flying == 1:
            return 0.0
        ways = model.fixed_parts(shape.pattern, shape.sizes)[2]
        return (run.flying - 1) * float((self._cut(span).saved / ways).sum()) / run.micro

    def _held(self, span: Span, run: Run, solution: Solution) -> float:
        shape = Shape(solution.case.pattern, solution.case.sizes)
        return float(solution.bytes) + self._flying(span, run, self._order(span, run)[0], shape)

    def _placed(self, span: Span, run: Run, micro_s: float, solution: Solution) -> Placed:
        case = solution.case
        storage = [o[i].storage for o, i in zip(case.options, solution.chosen)]
        names = mesh_names(case.pattern.roles, storage)
        ends = {*self.problem.axes.batch, *self.problem.axes.sequence}
        split = {m for a, mesh in case.pattern.rules if a in ends for m in mesh}
        return Placed(
            self.stage(span).layers,
            ",".join(f"{n}={s}" for n, s in zip(names, case.sizes)),
            micro_s,
            solution.seconds - micro_s,
            self._held(span, run, solution),
            math.prod(case.sizes[m] for m in split),
        )

    # ---- what is made once --------------------------------------------------------------------------------------

    def _cut(self, span: Span) -> _Cut:
        key = key_of(self.line, span)
        if key not in self._cuts:
            p = self.problem
            stage = cut(p.program, p.unsplit, self.line, span)
            t = p.tables if stage.program is p.program else p.tables_of(stage.program, stage.unsplit)
            self._cuts[key] = _Cut(stage, t, saved(stage, t))
        return self._cuts[key]

    def _fitting(self, run: Run) -> list[Shape]:
        examples = self.problem.program.batch.size
        return [s for s in self._meshes(run.parts) if examples % (s.ways("data", "expert") * run.micro) == 0]

    def _meshes(self, parts: int) -> tuple[Shape, ...]:
        if parts not in self._shapes:
            p = self.problem
            model = Model(p.program, p.tables, self._link(parts), like=p.model)
            ways: dict[int, list[Shape]] = {}
            for s in shapes(p.program, p.axes, p.cluster.devices // parts):
                ways.setdefault(s.ways("data", "expert"), []).append(s)
            found: dict[Shape, None] = {}
            for alike in ways.values():
                for key, most in ((model.floor, FASTEST), (model.least, SMALLEST)):
                    best = sorted(alike, key=lambda s: key(s.pattern, s.sizes))[:most]
                    found.update(dict.fromkeys(best))
            self._shapes[parts] = tuple(found)
        return self._shapes[parts]

    def _link(self, parts: int) -> Links:
        if parts not in self._links:
            own = part(self.problem.cluster, parts)
            self._links[parts] = Links(own, own.devices)
        return self._links[parts]
