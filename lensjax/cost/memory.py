"""Peak memory of one device: liveness over the partitioned program, with XLA's fusion, order, sharing and packing.

    peak = arguments + results that no argument was donated for + the heap of temporaries

Temporaries are the stored values of `lensjax.partition.fusion`, each alive from the step that makes it to the last one
that reads it. A loop's body is walked in its place; what it carries lives around it, what it stacks is one buffer.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lensjax.cost.heap import Buffer, live, pack
from lensjax.cost.layout import inner_gather, inner_scatter, transposed_stacks
from lensjax.cost.purpose import Purposes
from lensjax.cost.schedule import Step, steps_of
from lensjax.partition.data import Body, Partitioned, Value
from lensjax.partition.fusion import Fusion, Fusions
from lensjax.topology.cluster import Device

_MATMULS = ("stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device. `arguments` and `results` (those without a donated argument) exist throughout; `temporaries` is
    the heap of everything else, and `held` says what that consists of when most is alive: "gradients", "activations",
    "communication", "temporaries" (see `lensjax.cost.purpose`) and "fragments" (lost between buffers)."""

    arguments: float
    results: float
    temporaries: float
    held: Mapping[str, float]

    @property
    def peak(self) -> float:
        return self.arguments + self.results + self.temporaries


@dataclasses.dataclass(frozen=True)
class Habits:
    """What the compiler of a device does that shows in its memory.

    workspace: bytes of scratch of a matmul. XLA's cuBLAS calls have 32 MiB from Hopper on, 4 MiB before (xla/service/
        gpu/transforms/gemm_rewriter.cc, kHopperWorkspace and kDefaultWorkspace).
    prompt: operations run about where the program has them, and what reads nothing comes first. On Hopper XLA weighs
        what hides behind what by a model of device and network (xla/service/gpu/model/sol_latency_estimator.cc), and
        then puts work off until it is read; seen in programs compiled for A100, H100 and GB200.
    """

    workspace: float = 0.0
    prompt: bool = False


PLAIN = Habits()


def habits_of(device: Device, alone: bool = False) -> Habits:
    """`alone`: the program has no collectives, so that there is nothing for which work would be put off."""
    if device.platform != "cuda":
        return Habits()
    old = device.name.startswith(("V100", "A100", "A10", "L4", "T4"))
    hopper = device.name.startswith(("H", "GH"))
    return Habits(float(2**22 if old else 2**25), prompt=alone or not hopper)


def memory(p: Partitioned, habits: Habits = PLAIN, roles: Sequence[str] | None = None) -> Memory:
    """Peak memory of a partitioned step. `habits`: of its device's compiler (see `habits_of`); `roles`: what its
    arguments are for, in order, to tell gradients from other temporaries."""
    heap = heap_of(p, habits, roles)
    peak, when = live(heap.buffers)
    packed = pack(heap.buffers)
    held: defaultdict[str, float] = defaultdict(float)
    for b in heap.pieces:
        if b.start <= when <= b.end:
            held[b.kind] += b.size
    held["fragments"] = packed - peak
    arguments, results = outside(p)
    return Memory(arguments, results, packed, {k: v for k, v in held.items() if v})


def outside(p: Partitioned) -> tuple[float, float]:
    """Bytes per device of the arguments, and of the results for which none was donated."""
    donated = set(p.donated.values())
    fresh = [v for r, v in enumerate(p.body.results) if r not in donated and v not in p.body.arguments]
    return sum(p.values[v].bytes for v in p.body.arguments), sum(p.values[v].bytes for v in fresh)


class Heap(NamedTuple):
    """Temporary buffers with the steps between which they live, loops written out once in their place. `pieces` are
    the same bytes by what they are for: a buffer that is written over with something else of its size is several."""

    buffers: list[Buffer]
    pieces: list[Buffer]


def temporaries(p: Partitioned, habits: Habits = PLAIN) -> list[Buffer]:
    """Every temporary buffer of a partitioned step."""
    return heap_of(p, habits).buffers


def heap_of(p: Partitioned, habits: Habits = PLAIN, roles: Sequence[str] | None = None) -> Heap:
    """The temporary buffers of a partitioned step, and what they are for."""
    # The schedule's, unless values were moved since (to the host).
    fusions = p.fusions if p.fusions is not None and p.fusions.values is p.values else Fusions(p.values, p.body)
    model = fusions(p.body)
    results = {model.buffer(v) for v in p.body.results}
    transposed = {v for n in p.body.nodes if inner_gather(n, p.values) for v in n.outputs} & results
    outside = results - transposed | set(p.body.arguments)
    walk = _Walk(fusions, habits, Purposes(p, fusions, roles), transposed)
    walk.body(p.body, outside, 0)
    return Heap(walk.buffers, walk.pieces)


class _Walk:
    """Numbers the steps of nested bodies and collects their buffers."""

    def __init__(self, fusions: Fusions, habits: Habits, purposes: Purposes, transposed: set[int]):
        self.fusions, self.values, self.habits, self.purposes = fusions, fusions.values, habits, purposes
        self.transposed = transposed  # results that are copied into their place
        self.clock = 0
        self.buffers: list[Buffer] = []
        self.pieces: list[Buffer] = []

    def body(self, body: Body, outside: set[int], depth: int) -> None:
        """`outside`: values whose memory is accounted for elsewhere."""
        model = self.fusions(body)
        steps = steps_of(body, model, self.values, depth > 0, self.habits.prompt)
        purpose = self.purposes.of(body, steps, model)
        last = _last_reads(steps, body, model)
        if self.habits.prompt and not depth:
            last |= {v: i + 1 for i, step in enumerate(steps) for v in step.writes if v in self.transposed}
        shared = outside | (self.carried(body, steps, last, model) if depth else set())
        ends: list[int] = []
        owns: dict[int, list[tuple[int, str]]] = {}  # value that owns a buffer -> what it is for from when on
        until: dict[int, int] = {}  # and the position of the last step that reads it
        owner: dict[int, int] = {}
        dying: defaultdict[int, list[int]] = defaultdict(list)  # position -> values that own a buffer, read there last
        copies: dict[int, tuple[int, int]] = {}  # argument -> the steps between which its transposed copy lives
        for position, step in enumerate(steps):
            self.clock += 1
            start = self.clock
            made = [v for v in step.writes if v not in shared]
            for old, new in reused(step, dying.pop(position, []), made, self.values):
                owner[new] = owner[old]
                until[owner[new]] = last[new]
                dying[last[new]].append(new)
                owns[owner[new]].append((start, purpose[new]))
            for v in made:
                if v not in owner:
                    owner[v] = v
                    owns[v] = [(start, purpose[v])]
                    until[v] = last[v]
                    dying[last[v]].append(v)
            if step.node.name in _MATMULS:
                self.add(Buffer(start, start, self.habits.workspace, "temporaries", depth))
            if copied := self.scattered_copy(step, model):
                self.add(Buffer(start, start, copied, "temporaries", depth))
            for inner in step.node.bodies:
                self.body(inner, set(inner.arguments), depth + 1)
            if step.node.bodies and not depth:
                for v in transposed_stacks(step.node, self.values) & set(body.arguments):
                    copies[v] = (copies.get(v, (start, 0))[0], self.clock)
            ends.append(self.clock)
        for v, uses in owns.items():
            end = ends[until[v]] if until[v] < len(ends) else self.clock
            whole = Buffer(uses[0][0], end, self.values[v].bytes, uses[0][1], depth, v)
            self.add(whole, [whole._replace(start=a, end=b, kind=k) for a, b, k in _spans(uses, end)])
        for v, (start, end) in copies.items():
            self.add(Buffer(start, end, self.values[v].bytes, "temporaries", depth, v))

    def add(self, buffer: Buffer, pieces: Sequence[Buffer] = ()) -> None:
        self.buffers.append(buffer)
        self.pieces += pieces or (buffer,)

    def scattered_copy(self, step: Step, model: Fusion) -> float:
        """Bytes of the largest operand of reduce-scatters that is copied into another layout: one is at a time."""
        if step.node.name != "reduce_scatter":
            return 0.0
        pairs = [(v, out) for v, out in zip(step.direct, step.writes) if v in model.maker]
        return max(
            (self.values[v].bytes for v, out in pairs
             if model.maker[v].name == "stablehlo.convolution" and inner_scatter(self.values[v], self.values[out])),
            default=0.0,
        )  # fmt: skip

    def carried(self, body: Body, steps: list[Step], last: Mapping[int, int], model: Fusion) -> set[int]:
        """Values of a loop body that are written over the carried value that they replace: nobody reads it any more."""
        made_at = {v: i for i, s in enumerate(steps) for v in s.writes}
        found = set()
        for argument, result in zip(body.arguments, body.results):
            value = model.buffer(result)
            if value in made_at and self.values[value].bytes == self.values[argument].bytes:
                gone = last.get(argument, -1)
                at = made_at[value]
                if gone < at or (gone == at and steps[at].may_overwrite(argument)):
                    found.add(value)
        return found


def reused(step: Step, free: list[int], made: list[int], values: Sequence[Value]) -> list[tuple[int, int]]:
    """(old, new): operands that die at a step, and the results that take their buffers."""
    pairs = []
    left = [v for v in dict.fromkeys((*step.direct, *step.reads)) if v in free and step.may_overwrite(v)]
    in_order = step.node.name == "stablehlo.while"
    for new in made:
        own = step.direct[step.node.outputs.index(new)] if in_order else None
        old = next((v for v in left if values[v].bytes == values[new].bytes and own in (None, v)), None)
        if old is not None:
            pairs.append((old, new))
            left.remove(old)
    return pairs


def _spans(uses: Sequence[tuple[int, str]], end: int) -> list[tuple[int, int, str]]:
    """(first, last, what for) of the uses of a buffer that lives until `end`, from when each begins."""
    stops = [start - 1 for start, _ in uses[1:]] + [end]
    return [(start, stop, kind) for (start, kind), stop in zip(uses, stops)]


def _last_reads(steps: list[Step], body: Body, model: Fusion) -> dict[int, int]:
    """Buffer -> position of its last reader; results are read at the end."""
    last: dict[int, int] = {}
    for position, step in enumerate(steps):
        for value in (*step.reads, *step.writes):
            last[value] = position
    for value in body.results:
        last[model.buffer(value)] = len(steps)
    return last
