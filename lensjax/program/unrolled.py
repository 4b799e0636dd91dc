"""Layers of unrolled code: a model whose Python loop writes its blocks out one after the other.

`find_unrolled` looks at every body of the program (the step itself, an accumulation loop, a remat) for runs of repeats
that compute with the batch, pairs each forward run with the backward run that belongs to it, and names each layer by
the parameters that it reads. Blocks that take turns (every second layer differs) are one repeat of two blocks; a first
or last block that differs stands outside.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lensjax import _jax
from lensjax.program.edit import bodies, body_operands, is_var
from lensjax.program.repeats import Run, find_runs

# A run of repeats is a run of layers if it computes with one of these.
_COMPUTE = frozenset(
    """dot_general conv_general_dilated ragged_dot ragged_dot_general scan while pallas_call
    custom_partitioning""".split()
)
_VIEWS = frozenset({"convert_element_type", "copy", "transpose", "reshape", "squeeze", "sharding_constraint"})


# The way from the program to one of its bodies: (equation, number of its body), from the outside in.
Way = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """One layer.

    `name`: the common path of its own parameters ("state/params/block_3"); for layers that share their parameters the
    line they start at and a number. `forward`, `backward`: the positions of its equations in the body (`backward` is
    empty where none was found). `parameters`: the arguments that it reads and its neighbours do not.
    """

    name: str
    forward: range
    backward: range
    parameters: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """A stack of layers written out one after the other.

    `body`: the way to the body they stand in, empty for the program itself; `repeats`: the layers, in the order of the
    forward pass. Equation k of every repeat does the same on the same shapes, with operands from the same places in
    its own repeat or one before, or from outside.
    """

    name: str
    body: Way
    repeats: tuple[Repeat, ...]

    @property
    def count(self) -> int:
        return len(self.repeats)

    def first(self, i: int) -> int | None:
        """The equation of the first repeat (forward or backward) that equation `i` is a copy of; None outside."""
        for side in ("forward", "backward"):
            spans = [s for s in (getattr(r, side) for r in self.repeats) if s]
            for span in spans:
                if i in span:
                    return spans[0][i - span.start]
        return None


def body_of(jaxpr: Any, way: Sequence[tuple[int, int]]) -> Any:
    """The open jaxpr at the end of a way (`Unrolled.body`)."""
    inner = _jax.open_jaxpr(jaxpr)
    for i, k in way:
        inner = _jax.open_jaxpr(list(bodies(inner.eqns[i]))[k])
    return inner


def inputs(body: Any, spans: Sequence[range]) -> list[list[Any]]:
    """For each of several repeats: the variables that it reads and does not make. Position j plays the same part in
    every repeat; a variable that two parts share in one repeat but not in another is listed twice."""
    columns = []
    for span in spans:
        own = {v for i in span for v in body.eqns[i].outvars}
        reads = [a if is_var(a) and a not in own else None for i in span for a in body.eqns[i].invars]
        columns.append(reads)
    rows = [c for c in zip(*columns) if any(v is not None for v in c)]
    distinct = list(dict.fromkeys(rows))
    return [list(c) for c in zip(*distinct)] if distinct else [[] for _ in spans]


def outputs(body: Any, spans: Sequence[range]) -> list[list[Any]]:
    """For each of several repeats: the variables that it makes and that are read outside of it, by any of the repeats.
    Position j plays the same part in every repeat."""
    readers: dict[Any, list[int]] = collections.defaultdict(list)
    for i, eqn in enumerate(body.eqns):
        for a in eqn.invars:
            if is_var(a):
                readers[a].append(i)
    results = {v for v in body.outvars if is_var(v)}
    made = [[v for i in span for v in body.eqns[i].outvars] for span in spans]
    rows = [
        row for row in zip(*made)
        if any(v in results or any(i not in span for i in readers[v]) for v, span in zip(row, spans))
    ]  # fmt: skip
    return [list(c) for c in zip(*rows)] if rows else [[] for _ in spans]


def find_unrolled(
    jaxpr: Any, batch: Mapping[Any, Any], parameters: Sequence[int], paths: Sequence[str]
) -> tuple[Unrolled, ...]:
    """The stacks of unrolled layers at every depth, in program order. `batch`: {variable: its batch dimensions}."""
    inner = _jax.open_jaxpr(jaxpr)
    origin = {inner.invars[i]: i for i in parameters}
    _origins(inner, origin)
    found: list[Unrolled] = []
    for way, body in _every_body(inner, ()):
        found += _stacks(body, way, batch, origin, paths)
    return tuple(found)


def _every_body(jaxpr: Any, way: Way) -> Iterator[tuple[Way, Any]]:
    yield way, jaxpr
    for i, eqn in enumerate(jaxpr.eqns):
        for k, body in enumerate(bodies(eqn)):
            yield from _every_body(_jax.open_jaxpr(body), (*way, (i, k)))


def _origins(jaxpr: Any, origin: dict[Any, int]) -> None:
    """Adds the variables, at every depth, that are a parameter or a view of one."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _VIEWS and is_var(eqn.invars[0]) and eqn.invars[0] in origin:
            origin[eqn.outvars[0]] = origin[eqn.invars[0]]
        for body, operands, _ in body_operands(eqn):
            body = _jax.open_jaxpr(body)
            origin.update((v, origin[a]) for v, a in zip(body.invars, operands) if is_var(a) and a in origin)
            _origins(body, origin)


def _stacks(
    body: Any,
    way: tuple[tuple[int, int], ...],
    batch: Mapping[Any, Any],
    origin: Mapping[Any, int],
    paths: Sequence[str],
) -> list[Unrolled]:
    def computes(eqn: Any) -> bool:
        return eqn.primitive.name in _COMPUTE and any(is_var(v) and v in batch for v in (*eqn.invars, *eqn.outvars))

    def reads(eqn: Any) -> set[int]:
        return {origin[a] for a in eqn.invars if is_var(a) and a in origin}

    def has_compute(eqn: Any) -> bool:
        return computes(eqn) or any(has_compute(e) for b in bodies(eqn) for e in _jax.open_jaxpr(b).eqns)

    runs = find_runs(body.eqns, has_compute)
    read = {run: [set().union(*(reads(body.eqns[i]) for i in run.span(r))) for r in range(run.count)] for run in runs}
    pairs = _pairs(body, runs, read)
    backward = set(pairs.values())
    stacks = []
    for run in runs:
        if run in backward:
            continue
        other = pairs.get(run)
        partner = _partners(body, run, other, read) if other is not None else {}
        own = [tuple(sorted(_own(read[run], r))) for r in range(run.count)]
        names = [_common([paths[i] for i in mine]) for mine in own if mine]
        named = len(set(names)) == run.count
        stem = _pattern(names) if names else f"repeats at {_jax.user_line(body.eqns[run.start])}"
        repeats = []
        for r in range(run.count):
            q = partner.get(r)
            back = other.span(q) if other is not None and q is not None else range(0)
            name = names[r] if named else f"{stem}, number {r}"
            repeats.append(Repeat(name, run.span(r), back, own[r]))
        stacks.append(Unrolled(stem, way, tuple(repeats)))
    return stacks


def _own(read: Sequence[set[int]], r: int) -> set[int]:
    """Parameters of repeat `r` that no other repeat reads."""
    others = set().union(*(s for k, s in enumerate(read) if k != r)) if len(read) < 3 else set()
    if len(read) < 3:
        return read[r] - others
    near = read[r - 1] if r else read[r + 1]
    far = read[r + 1] if r + 1 < len(read) else read[r - 2]
    return read[r] - near - far


def _pairs(body: Any, runs: Sequence[Run], read: Mapping[Run, Sequence[set[int]]]) -> dict[Run, Run]:
    """{forward run: its backward run}: a later run of which most repeats have a partner, in the opposite order."""
    pairs: dict[Run, Run] = {}
    for n, run in enumerate(runs):
        best = None
        for other in runs[n + 1 :]:
            if run in pairs.values() or other in pairs.values():
                continue
            partner = _partners(body, run, other, read)
            order = [partner[r] for r in sorted(partner)]
            if len(order) >= 2 and order == sorted(order, reverse=True) and len(order) > (best[0] if best else 0):
                best = (len(order), other)
        if best is not None:
            pairs[run] = best[1]
    return pairs


def _partners(body: Any, run: Run, other: Run, read: Mapping[Run, Sequence[set[int]]]) -> dict[int, int]:
    """{repeat of `run`: the repeat of `other` that is its backward}: the one that reads the same parameters, and, where
    layers share them all, the one that reads its values."""
    votes: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    owner = {i: r for r in range(run.count) for i in _own(read[run], r)}
    for q in range(other.count):
        for i in read[other][q]:
            if i in owner:
                votes[q][owner[i]] += 1
    if not votes:
        at = {i: place[0] for i in range(run.start, run.stop) if (place := run.where(i)) is not None}
        made = {v: repeat for i, repeat in at.items() for v in body.eqns[i].outvars}
        for q in range(other.count):
            for i in other.span(q):
                for a in body.eqns[i].invars:
                    if is_var(a) and a in made:
                        votes[q][made[a]] += 1
    found: dict[int, int] = {}
    for q, counter in sorted(votes.items()):
        r = counter.most_common(1)[0][0]
        if r not in found or counter[r] > votes[found[r]][r]:
            found[r] = q
    return found


def _common(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0].rpartition("/")[0] or paths[0]
    return os.path.commonpath(["/" + p for p in paths]).strip("/")


def _pattern(names: Sequence[str]) -> str:
    """What the names have in common: "params/block_0" and "params/block_1" are "params/block_*"."""
    if len({n.count("/") for n in names}) > 1:
        return os.path.commonpath(["/" + n for n in names]).strip("/") + "/*"
    parts = []
    for column in zip(*(n.split("/") for n in names)):
        start = _alike(column)
        end = _alike([c[len(start) :][::-1] for c in column])[::-1]
        parts.append(column[0] if len(set(column)) == 1 else f"{start}*{end}")
    return "/".join(parts)


def _alike(words: Sequence[str]) -> str:
    """The letters that all words begin with."""
    columns = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*words))
    return "".join(letters[0] for letters in columns)
