"""The line of a step: where along its forward every operation stands, so that it can be cut into stages.

Forward operations that compute (matmuls, lookups, loops) or depend on one stand one after the other, each in a slot of
its own; a loop over a stack of layers has a slot for each layer. A backward operation stands where the forward values
that it reads are read in the forward: the gradient of a layer's weight in that layer. The backward goes from late to
early, so it stands no later than the cotangents that it reads. The optimizer stands where its gradients do. What is
made of scalars, constants and the step's arguments alone by element-wise operations (masks, casts, b1 * mu) has no
place: every stage that reads it makes it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from lensjax._errors import PlanError
from lensjax.partition.data import Node
from lensjax.partition.fusion import KERNELS, captured
from lensjax.partition.whole import Whole
from lensjax.program.program import Program
from lensjax.search.sums import MATMULS
from lensjax.search.tables import PASSING, Tables

Span = tuple[int, int]
# A piece that takes less than this part of the longest one is no stage of its own (an embedding, a final norm).
SMALL = 0.05
# What holds less than this part of the largest activation (positions, masks) goes along with the one tensor that stages
# hand over.
LIGHT = 0.005
_SLICES = ("stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice")


@dataclasses.dataclass(frozen=True)
class Line:
    """length: slots. turn: the first node of the backward.

    spans:   of each node of the step's body, the slots [from, to) where it stands; None where it has no place.
    loops:   nodes that run over a stack of layers: a stage has as many trips of them as slots.
    stacks:  values whose leading dimension counts the layers of a stack -> that stack's slots.
    crossing: bytes (unsplit) that the forward hands over between slots c - 1 and c, for each c where that is one
             tensor: there a stage may begin.
    seconds: [length] of kernels, forward and backward, unsplit.
    """

    length: int
    turn: int
    spans: tuple[Span | None, ...]
    loops: frozenset[int]
    stacks: Mapping[int, Span]
    crossing: Mapping[int, float]
    seconds: np.ndarray

    def units(self) -> tuple[list[Span], np.ndarray]:
        """The pieces between places where a stage may begin, and their seconds; small ones go with what follows."""
        edges = [0, *sorted(self.crossing), self.length]
        seconds = [self.seconds[a:b].sum() for a, b in itertools.pairwise(edges)]
        kept, since = [0], 0.0
        for edge, s in zip(edges[1:], seconds):
            since += s
            if since >= SMALL * max(seconds):
                kept, since = [*kept, edge], 0.0
        kept = [*kept[: -1 if len(kept) > 1 else None], self.length]
        pieces = list(itertools.pairwise(kept))
        return pieces, np.array([self.seconds[a:b].sum() for a, b in pieces])


def line_of(program: Program, unsplit: Whole, t: Tables) -> Line:
    """The line of a step. Raises PlanError for one without a backward: where it would be cut is not known."""
    return _Liner(program, unsplit, t).make()


def reads(node: Node) -> set[int]:
    """Everything that a node reads, in its bodies too."""
    return set(node.inputs).union(*(captured(b) for b in node.bodies))


class _Liner:
    def __init__(self, program: Program, unsplit: Whole, t: Tables):
        self.program, self.whole, self.t = program, unsplit, t
        self.nodes, self.values = unsplit.body.nodes, unsplit.values
        self.reads = [reads(n) for n in self.nodes]
        self.made = {v: i for i, n in enumerate(self.nodes) for v in n.outputs}
        self.parameter = {unsplit.body.arguments[i]: i for i in program.parameters}
        self.stacks: dict[int, Span] = {}
        self.loops: dict[int, Span] = {}
        self.spans: list[Span | None] = [None] * len(self.nodes)

    def active(self, v: int) -> bool:
        return any(a in self.t.inputs for d in self.t.value_dims[v] for a in d)

    def make(self) -> Line:
        self.local = self._local()
        turn = self._turn()
        self._origins()
        length = self._forward(turn)
        self._stacked()
        self._backward(turn)
        seconds = np.zeros(length)
        for i, s in enumerate(self._kernels()):
            span = self.spans[i]
            if span is not None:
                seconds[span[0] : span[1]] += s / (span[1] - span[0])
        return Line(
            length, turn, tuple(self.spans), frozenset(self.loops), self.stacks, self._crossing(turn, length), seconds
        )

    def _local(self) -> set[int]:
        """Nodes that have no place."""
        placed: set[int] = set()  # values of nodes that have one
        found = set()
        for i, node in enumerate(self.nodes):
            if node.name in KERNELS or node.name == "stablehlo.gather" or not placed.isdisjoint(self.reads[i]):
                placed.update(node.outputs)
            else:
                found.add(i)
        return found

    def _turn(self) -> int:
        """The first node that makes a weight's gradient: it sums over the batch."""
        made = {
            c.result for c in self.t.contractions if c.weight and not c.passes and any(map(self.active, c.operands))
        }
        for i, node in enumerate(self.nodes):
            if not made.isdisjoint(_multiplied(node)):
                return i
        raise PlanError("the step makes no gradient of a weight: where its forward ends is not known")

    def _origins(self) -> None:
        """Values that are a parameter, cast or reshaped."""
        for node in self.nodes:
            if node.name in PASSING and node.inputs and node.inputs[0] in self.parameter:
                self.parameter[node.outputs[0]] = self.parameter[node.inputs[0]]

    def _sliced(self, node: Node) -> tuple[set[int], set[int]]:
        """(values from outside, positions of operands) that a loop takes one layer of in each trip, or writes one."""
        if node.name != "stablehlo.while" or len(node.bodies) != 1 or not node.trips or node.trips < 2:
            return set(), set()
        body = node.bodies[0]
        inside = {v: j for j, v in enumerate(body.arguments)}
        taken = {
            n.inputs[0] for n in body.nodes if n.name in _SLICES and self.values[n.inputs[0]].shape[0] == node.trips
        }
        made = {v for n in body.nodes for v in n.outputs}
        positions = {inside[v] for v in taken if v in inside}
        return taken - inside.keys() - made, positions

    def _forward(self, turn: int) -> int:
        slot = 0
        owner: dict[int, Span] = {}  # parameter -> the slots of its stack
        for i, node in enumerate(self.nodes):
            outside, positions = self._sliced(node)
            read = {node.inputs[j] for j in positions} | outside
            stacked = {self.parameter[v] for v in read if v in self.parameter}
            if i < turn and i not in self.local:
                trips = node.trips or 1 if stacked else 1
                self.spans[i] = span = (slot, slot + trips)
                slot = span[1]
                for p in stacked:
                    owner.setdefault(p, span)
            span = next((owner[p] for p in sorted(stacked) if p in owner), None)
            if span is None or span[1] - span[0] != node.trips:
                continue
            self.spans[i] = self.loops[i] = span if i >= turn else self.spans[i] or span
            own = self.loops[i]
            body = node.bodies[0]
            through = {x for j in positions for x in (node.inputs[j], node.outputs[j], body.arguments[j])}
            written = {
                n.outputs[0] for n in body.nodes
                if n.name == "stablehlo.dynamic_update_slice" and n.inputs[0] in through
            }  # fmt: skip
            self.stacks.update(dict.fromkeys(outside | through | written, own))
        for a, v in zip(self.program.arguments, self.whole.body.arguments):
            if a.follows is not None and self.whole.body.arguments[a.follows] in self.stacks:
                span = self.stacks[self.whole.body.arguments[a.follows]]
                if a.shape[:1] == (span[1] - span[0],):
                    self.stacks.setdefault(v, span)
        return slot

    def _stacked(self) -> None:
        """What is made of stacks element by element is a stack too, and so is what meets one so."""
        for i, node in enumerate(self.nodes):
            if i in self.loops or node.name in ("stablehlo.dot_general", "stablehlo.convolution"):
                continue
            for v in node.inputs:
                if v not in self.stacks:
                    continue
                count = self.stacks[v][1] - self.stacks[v][0]
                for o in node.outputs:
                    if self.values[o].shape[:1] == (count,) and not self.active(o):
                        self.stacks.setdefault(o, self.stacks[v])
        for i, node in reversed(list(enumerate(self.nodes))):
            for o in [] if i in self.loops else node.outputs:
                for v in node.inputs if o in self.stacks else ():
                    if v in self.made and self.values[v].shape == self.values[o].shape and not self.active(v):
                        self.stacks.setdefault(v, self.stacks[o])

    def _backward(self, turn: int) -> None:
        first: dict[int, int] = {}  # value of the forward -> the first slot that reads it
        for i in range(turn):
            if self.spans[i] is not None:
                for v in self.reads[i]:
                    first[v] = min(first.get(v, self.spans[i][0]), self.spans[i][0])  # type: ignore[index]

        def place(v: int) -> int:
            low, high = self.spans[self.made[v]]  # type: ignore[misc]
            if self.made[v] < turn:
                return max(low, first.get(v, high - 1))
            return low

        for i in range(turn, len(self.nodes)):
            if i in self.local or i in self.loops:
                continue
            stack = next((self.stacks[v] for v in sorted(self.reads[i]) if v in self.stacks), None)
            if stack is not None:
                self.spans[i] = stack
                continue
            read = [v for v in self.reads[i] if v in self.made and self.spans[self.made[v]] is not None]
            # A scalar (the norm of all gradients) is known everywhere; weights stand where activations meet them.
            read = [v for v in read if self.values[v].shape]
            read = [v for v in read if self.active(v)] or read
            if read:
                at = min(map(place, read))
                self.spans[i] = (at, at + 1)

    def _kernels(self) -> np.ndarray:
        """Seconds of each node's kernels, all trips, unsplit."""
        t = self.t
        each = np.maximum(t.kernel_seconds, t.kernel_bytes.sum(axis=1) / t.bandwidth) + t.kernel_launch
        idle = (t.kernel_seconds == 0) & ~t.kernel_bytes.any(axis=1)  # the optimizer's: once a step
        weights = np.where(idle, 0.0, each * t.kernel_trips)
        return np.bincount(t.kernel_node, weights=weights, minlength=len(self.nodes))

    def _crossing(self, turn: int, length: int) -> dict[int, float]:
        last: dict[int, int] = defaultdict(int)  # value of the forward -> the last slot that reads it
        for i in range(turn):
            span = self.spans[i]
            if span is None:
                continue
            carried = {v for v in self.nodes[i].inputs if v not in self.stacks} if i in self.loops else set()
            for v in self.reads[i]:
                # A loop replaces what it carries (the same bytes, trip after trip) and reads the rest in every trip.
                last[v] = max(last[v], span[1] - 1 if i in self.loops or v in carried else span[0])
        count, bytes_ = np.zeros(length + 2, int), np.zeros(length + 2)
        heaviest = max((self.values[v].bytes for v in last if self.active(v)), default=0.0)
        for v, end in last.items():
            span = self.spans[self.made[v]] if v in self.made and self.made[v] < turn else None
            if span is None or v in self.stacks or not self.active(v) or end < span[1]:
                continue
            bytes_[span[1]] += self.values[v].bytes
            bytes_[end + 1] -= self.values[v].bytes
            if self.values[v].bytes >= LIGHT * heaviest:
                count[span[1]] += 1
                count[end + 1] -= 1
        count, bytes_ = np.cumsum(count), np.cumsum(bytes_)
        # Behind the last weight (the output layer) there is nothing to share out, and logits are large.
        end = max(
            (self.spans[i][1] for i in range(turn) if self.spans[i] and not self.reads[i].isdisjoint(self.parameter)),  # type: ignore[index]
            default=0,
        )
        inside = {c for i in self.loops if i < turn for c in range(self.spans[i][0] + 1, self.spans[i][1])}  # type: ignore[index]
        apart = self._recomputed(turn)
        return {c: float(bytes_[c]) for c in range(1, end) if (count[c] == 1 or c in inside) and c not in apart}

    def _recomputed(self, turn: int) -> set[int]:
        """Slots inside of a stretch that is recomputed as one: its whole backward stands at its first slot, and so
        must its weights."""
        forward: dict[int, int] = {}  # parameter -> the first slot that reads it, forward and backward
        backward: dict[int, int] = {}
        for i, span in enumerate(self.spans):
            if span is None or i in self.loops:
                continue
            first = forward if i < turn else backward
            for v in self.reads[i] & self.parameter.keys():
                first[self.parameter[v]] = min(first.get(self.parameter[v], span[0]), span[0])
        return {c for p in forward for c in range(backward.get(p, forward[p]) + 1, forward[p] + 1)}


def _multiplied(node: Node) -> set[int]:
    """The results of matmuls and of additions into tables, in the bodies of a node too."""
    own = set(node.outputs) if node.name in (*MATMULS, "stablehlo.scatter") else set()
    return own.union(*(_multiplied(n) for b in node.bodies for n in b.nodes))
