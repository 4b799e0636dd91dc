"""Whether a step splits exactly, and how: its statuses, its cuts, and the two verdicts.

The program is read with more and more cuts until no new one is asked for. Nothing is computed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from lensjax.program.batch import Batch
from lensjax.program.edit import is_var, shape_of
from lensjax.program.status import contractions, control, draws, elementwise, indexing, shapes
from lensjax.program.status.interpreter import Interpreter, Rule
from lensjax.program.status.lattice import SAME, Again, Refused, Status, part
from lensjax.program.status.paired import Body, Op, pair

RULES: dict[str, Rule] = {
    **elementwise.RULES, **shapes.RULES, **contractions.RULES, **indexing.RULES, **draws.RULES, **control.RULES,
}  # fmt: skip

# A step may split its batch by itself (its own accumulation): shares then take a part of each of its pieces.
_OUTER = (1, 2, 3, 4, 8)
_READINGS = 60

# Micro-batches compute what early totals need once more: at most one such pass, at most half of the work.
MOST_PASSES = 2
MOST_REPEATED = 0.5


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether the step splits exactly; else `reason`, with the user's `line` where there is one."""

    ok: bool
    reason: str = ""
    line: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "splits exactly" if self.ok else self.reason + (f" ({self.line})" if self.line else "")


@dataclasses.dataclass(frozen=True)
class Cut:
    """A partial value that must become a total. `op`: sum, max, min, or, and; `early`: work of a share depends on it;
    `stage`: how many passes over the shares come before it is known; `inside`: in a loop, branch or region;
    `line`: of the user's code that makes the value; `asked`: the operation that needs the total."""

    var: Any
    op: str
    early: bool
    stage: int
    inside: bool
    line: str
    asked: str

    @property
    def bytes(self) -> int:
        return math.prod(shape_of(self.var)) * self.var.aval.dtype.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """How a step splits. `node`, `micro`: the verdicts; `passes` over the shares that micro-batches take, `repeated`:
    the work of the passes before the last one over that of the last.

    `statuses`: of every variable, at every depth; `inputs`, `results`: of the program's arguments and results; `cuts`;
    `fixes`: what a share does other than the program (see `interpreter`); `scalars`: the variables that scales number;
    `body`: the two traces as one; `sizes`: the batch at both; `outer`: pieces into which the step itself splits it.
    Where neither verdict holds everything but the verdicts is empty.
    """

    node: Verdict
    micro: Verdict
    passes: int = 1
    repeated: float = 0.0
    statuses: Mapping[Any, Status] = dataclasses.field(default_factory=dict)
    inputs: tuple[Status, ...] = ()
    results: tuple[Status, ...] = ()
    cuts: tuple[Cut, ...] = ()
    fixes: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    scalars: tuple[Any, ...] = ()
    body: Body | None = None
    sizes: tuple[int, int] = (0, 0)
    outer: int = 1
    readings: int = 0
    left_out: frozenset[Any] = frozenset()

    @functools.cached_property
    def cut(self) -> dict[Any, Cut]:
        return {c.var: c for c in self.cuts}


def analyze_status(jaxpr: Any, batch: Batch) -> Split:
    """How the step `jaxpr` (calls inlined, as in a Program) splits along its batch. Never raises for a step that does
    not: the verdicts say why."""
    if batch.second is None or batch.small is None:
        return _never(Refused(batch.reason or "the step was traced at one batch size only"))
    sizes = (batch.size, batch.small)
    try:
        body = pair(jaxpr, batch.second, batch.dims, sizes)
    except Refused as e:
        return _never(e)
    first: Refused | None = None
    for outer in _OUTER:
        if sizes[0] % outer or sizes[1] % outer:
            continue
        try:
            return _read(body, batch.dims, sizes, outer)
        except Refused as e:
            first = first or e
            if "splits the batch dimension" not in first.reason:
                break
    assert first is not None
    return _never(first)


def _never(why: Refused) -> Split:
    verdict = Verdict(False, why.reason, why.line)
    return Split(verdict, verdict)


def _read(body: Body, dims: Mapping[Any, tuple[int, ...]], sizes: tuple[int, int], outer: int) -> Split:
    inputs = []
    for v in body.invars:
        if len(found := dims.get(v, ())) > 1:
            raise Refused("an argument has two batch dimensions")
        inputs.append(part(found[0], 1) if found else SAME)
    cuts: dict[Any, str] = {}
    kept: set[Any] = set()
    numbers: dict[Any, int] = {}
    for reading in range(_READINGS):
        an = Interpreter(RULES, elementwise.unknown, sizes, outer, cuts, kept, numbers)
        try:
            results = an.body(body, inputs)
        except Again:
            continue
        for atom, s in zip(body.outvars, results):
            if s.kind in "PM":
                an.need(atom, s, None)
            if s.kind in "IC":
                raise Refused("the step returns indices of examples")
        fresh = {v: op for v, op in an.new.items() if v not in cuts}
        if not fresh:
            return _split(an, body, inputs, results, sizes, outer, reading + 1)
        cuts = {**cuts, **fresh}
    raise Refused("the totals that the step needs do not settle")


def _split(
    an: Interpreter,
    body: Body,
    inputs: list[Status],
    results: list[Status],
    sizes: tuple[int, int],
    outer: int,
    readings: int,
) -> Split:
    top = {*body.invars, *(v for o in body.ops for v in o.outvars)}
    stages: dict[Any, int] = {}
    cuts = []
    early = {v for v in an.taken if an.shared >> an.number(v) & 1}
    for v, deps in an.taken.items():  # in program order: what a cut depends on comes before it
        stages[v] = max((stages[u] + 1 for u in early if u in stages and deps >> an.number(u) & 1), default=0)
        asked, maker = an.asked.get(v), an.made.get(v)
        cuts.append(
            Cut(v, an.cuts[v], v in early, stages[v], v not in top, maker[0].line if maker else "",
                asked.name if asked is not None else "a result of the step")
        )  # fmt: skip
    cuts = tuple(cuts)
    passes = 1 + len({c.stage for c in cuts if c.early})
    repeated = _repeated(body, cuts, results) if passes > 1 else 0.0
    return Split(
        node=Verdict(True),
        micro=_micro(cuts, passes, repeated, an.asked),
        passes=passes,
        repeated=repeated,
        statuses=an.env,
        inputs=tuple(inputs),
        results=tuple(results),
        cuts=cuts,
        fixes=an.fixes,
        scalars=tuple(an.variables),
        body=body,
        sizes=sizes,
        outer=outer,
        readings=readings,
        left_out=frozenset(an.left_out - an.kept),
    )


def _micro(cuts: tuple[Cut, ...], passes: int, repeated: float, asked: Mapping[Any, Op | None]) -> Verdict:
    if inner := [c for c in cuts if c.inside]:
        why = (
            "a total over the batch is needed inside a loop, branch or recomputed region, by "
            f"{inner[0].asked}: one share alone does not know it"
        )
        return Verdict(False, why, inner[0].line)
    early = [c for c in cuts if c.early]
    for c in early:
        if c.op in ("max", "min") and c.asked == "eq":
            why = f"compares examples with the batch's {c.op}: a repeated pass does not reproduce it bit for bit"
            return Verdict(False, why, c.line)
    needed = f"{len(early)} totals over the batch are needed before a share is done"
    if passes > MOST_PASSES:
        return Verdict(
            False,
            f"{needed}, one after the other: {passes} passes over the batch, at most {MOST_PASSES} are made",
            early[0].line,
        )
    if repeated > MOST_REPEATED:
        why = f"{needed}: computing them first repeats {repeated:.0%} of the work, at most {MOST_REPEATED:.0%} is made"
        return Verdict(False, why, early[0].line)
    return Verdict(True)


def _repeated(body: Body, cuts: tuple[Cut, ...], results: list[Status]) -> float:
    """Products and convolutions of the passes for early totals, over those of the last pass."""
    early = {c.var for c in cuts if c.early}
    last = {c.var for c in cuts if not c.early} | {
        a for a, s in zip(body.outvars, results) if is_var(a) and s.kind == "B"
    }
    before = 0.0
    for stage in sorted({c.stage for c in cuts if c.early}):
        known = {c.var for c in cuts if c.early and c.stage < stage}
        before += _work(body, {c.var for c in cuts if c.early and c.stage == stage}, known)
    return before / max(_work(body, last, early), 1.0)


def _work(body: Body, wanted: set[Any], known: set[Any]) -> float:
    needed, total = set(wanted), 0.0
    for op in reversed(body.ops):
        if any(v in needed and (v in wanted or v not in known) for v in op.outvars):
            needed.update(a for a in op.invars if is_var(a) and a not in known)
            total += _flops(op)
    return total


def _flops(op: Op) -> float:
    if op.name == "dot_general":
        (contracted, _), _ = op.params["dimension_numbers"]
        left = shape_of(op.invars[0])
        return 2.0 * math.prod(shape_of(op.outvars[0])) * math.prod(left[d] for d in contracted)
    if op.name == "conv_general_dilated":
        right = shape_of(op.invars[1])
        out = right[op.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(shape_of(op.outvars[0])) * math.prod(right) / max(out, 1)
    trips = op.params.get("length", 1) if op.name == "scan" else 1
    return trips * sum(_flops(o) for b in op.bodies for o in b.ops)
