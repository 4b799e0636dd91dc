"""A stage of a pipeline as a step of its own: the unsplit step without what stands elsewhere on the line.

Loops over a stack run over the stage's layers, stacks are as long, parameters and optimizer state that no kept
operation reads are absent. What comes from other stages is received. So everything that prices a step prices a stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from lensjax.cost.memory import temporaries
from lensjax.partition.data import Node, Partitioned, Region, Value
from lensjax.partition.whole import Whole
from lensjax.program.program import Program
from lensjax.search.line import Line, Span, reads
from lensjax.search.tables import ACTIVATION, Tables

RECEIVE = "stablehlo.recv"


@dataclasses.dataclass(frozen=True)
class Stage:
    """`program` has the stage's arguments (their roles, sizes and layers; the jaxpr is the whole step's), `unsplit` its
    operations. `forward`: the values that its forward makes or receives. `layers`: how many of each stack."""

    program: Program
    unsplit: Whole
    forward: frozenset[int]
    layers: tuple[int, ...]


def key_of(line: Line, span: Span) -> tuple:
    """Equal for stages that are equal: a run of layers is the same wherever it lies in its stack."""
    stacks = {line.spans[i] for i in line.loops}
    inside = next((s for s in stacks if s and s[0] <= span[0] and span[1] <= s[1]), None)
    if inside is None:
        return span
    return inside, span[1] - span[0], span[0] == inside[0], span[1] == inside[1]


def cut(program: Program, unsplit: Whole, line: Line, span: Span) -> Stage:
    """The stage on the slots [from, to) of a step's line; the step itself for all of them."""
    counts = {s: overlap(s, span) for s in line.stacks.values()}
    layers = tuple(n for _, n in sorted(counts.items()))
    nodes = unsplit.body.nodes
    if span == (0, line.length):
        made = {v for n in nodes[: line.turn] for v in _all_results(n)}
        return Stage(program, unsplit, frozenset(made), layers)
    kept = _kept(unsplit, line, span)
    values = _shrunk(unsplit.values, line, counts)
    new: list[Node] = []
    known = set(unsplit.body.arguments)
    later = {v for i in kept for v in nodes[i].outputs}
    forward: set[int] = set()
    for i in kept:
        node = nodes[i]
        missing = sorted(v for v in reads(node) - known if v not in later)
        if missing:
            new.append(Node(RECEIVE, (), tuple(missing), "", ""))
            known.update(missing)
            forward.update(missing if i < line.turn else ())
        if i in line.loops:
            node = dataclasses.replace(node, trips=overlap(line.spans[i] or span, span))
        new.append(node)
        known.update(node.outputs)
        forward.update(_all_results(node) if i < line.turn else ())
    body = dataclasses.replace(
        unsplit.body, nodes=tuple(new), results=tuple(v for v in unsplit.body.results if v in known)
    )
    part = dataclasses.replace(unsplit, values=values, body=body)
    read = {v for n in new for v in reads(n)}
    return Stage(_program(program, part, line, counts, read), part, frozenset(forward), layers)


def overlap(a: Span, b: Span) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _kept(unsplit: Whole, line: Line, span: Span) -> list[int]:
    """Nodes of a stage, in order: those that stand in it, and those without a place that they read."""
    nodes, needed, kept = unsplit.body.nodes, set[int](), []
    for i in reversed(range(len(nodes))):
        own = line.spans[i]
        if overlap(own, span) if own is not None else not needed.isdisjoint(nodes[i].outputs):
            kept.append(i)
            needed |= reads(nodes[i])
    return kept[::-1]


def _shrunk(values: tuple[Value, ...], line: Line, counts: Mapping[Span, int]) -> tuple[Value, ...]:
    out = list(values)
    for v, own in line.stacks.items():
        old, count = values[v], counts[own]
        out[v] = dataclasses.replace(
            old,
            shape=(count, *old.shape[1:]),
            local=(count, *old.local[1:]),
            bytes=old.bytes * count / (own[1] - own[0]),
        )
    return tuple(out)


def _program(program: Program, part: Whole, line: Line, counts: Mapping[Span, int], read: set[int]) -> Program:
    """The step's arguments as a stage has them."""
    invars = part.body.arguments
    present = {i for i in program.parameters if invars[i] in read}
    arguments = []
    for i, (a, v) in enumerate(zip(program.arguments, invars)):
        owner = i if a.role == "parameter" else a.follows if a.role == "optimizer" else None
        if v in line.stacks:
            a = dataclasses.replace(a, shape=(counts[line.stacks[v]], *a.shape[1:]))
        if owner is not None and (owner not in present or 0 in a.shape):
            a = dataclasses.replace(a, role="absent")
        arguments.append(a)
    layers = []
    for layer in program.layers:
        own = line.stacks.get(invars[layer.parameters[0]])
        members = tuple(i for i in layer.parameters if arguments[i].role == "parameter")
        count = counts[own] if own is not None else layer.count
        if members:
            layers.append(dataclasses.replace(layer, count=count, parameters=members))
    return dataclasses.replace(program, arguments=tuple(arguments), layers=tuple(layers))


def saved(stage: Stage, t: Tables) -> np.ndarray:
    """float [classes]: bytes (unsplit) of the activations that a stage keeps from the end of its forward to the start
    of its backward: what each micro-batch in flight holds."""
    buffers = temporaries(Partitioned({}, stage.unsplit.values, stage.unsplit.body, Region(1, ()), {}, 0))
    turn = min((b.start for b in buffers if b.value >= 0 and b.value not in stage.forward), default=math.inf)
    number = {dims: c for c, (kind, dims) in enumerate(t.classes) if kind == ACTIVATION}
    out = np.zeros(len(t.classes))
    for b in buffers:
        c = number.get(t.value_dims[b.value]) if b.value in stage.forward else None
        if c is not None and b.start < turn <= b.end:
            out[c] += b.size
    return out


def _all_results(node: Node) -> Iterable[int]:
    yield from node.outputs
    for body in node.bodies:
        yield from body.arguments
        for n in body.nodes:
            yield from _all_results(n)
