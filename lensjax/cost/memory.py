"""Peak memory of one device: liveness over the partitioned program, with XLA's fusion, order, sharing and packing.

    peak = arguments + results that no argument was donated for + the heap of temporaries

Temporaries are the stored values of `lensjax.partition.fusion`, each alive from the step that makes it to the last one
that reads it. A loop's body is walked in its place; what it carries lives around it, what it stacks is one buffer.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from lensjax.cost.heap import Buffer, live, pack
from lensjax.cost.layout import inner_gather, transposed_stacks
from lensjax.cost.schedule import Step, steps_of
from lensjax.partition.data import Body, Partitioned, Value
from lensjax.partition.fusion import Fusion, Fusions
from lensjax.partition.simplify import COLLECTIVES
from lensjax.topology.cluster import Device

_MATMULS = ("stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device. `arguments` and `results` (those without a donated argument) exist throughout; `temporaries` is
    the heap of everything else, and `held` says what that consists of when most is alive: "activations" (made around
    the loop that is running), "communication" (what collectives returned), "temporaries" (made where it happens) and
    "fragments" (lost between buffers)."""

    arguments: float
    results: float
    temporaries: float
    held: Mapping[str, float]

    @property
    def peak(self) -> float:
        return self.arguments + self.results + self.temporaries


def memory(p: Partitioned, workspace: float = 0.0) -> Memory:
    """Peak memory of a partitioned step. `workspace`: bytes of scratch that a matmul asks for (see `workspace_of`)."""
    buffers = temporaries(p, workspace)
    peak, when = live(buffers)
    heap = pack(buffers)
    there = [b for b in buffers if b.start <= when <= b.end]
    inside = max((b.depth for b in there), default=0)
    held: defaultdict[str, float] = defaultdict(float)
    for b in there:
        held["activations" if b.kind == "temporaries" and b.depth < inside else b.kind] += b.size
    held["fragments"] = heap - peak
    donated = set(p.donated.values())
    fresh = [v for r, v in enumerate(p.body.results) if r not in donated and v not in p.body.arguments]
    arguments = sum(p.values[v].bytes for v in p.body.arguments)
    return Memory(arguments, sum(p.values[v].bytes for v in fresh), heap, {k: v for k, v in held.items() if v})


def workspace_of(device: Device) -> float:
    """Bytes of scratch of XLA's cuBLAS calls: 32 MiB from Hopper on, 4 MiB before (xla/service/gpu/transforms/
    gemm_rewriter.cc, kHopperWorkspace and kDefaultWorkspace)."""
    if device.platform != "cuda":
        return 0.0
    return float(2**22 if device.name.startswith(("V100", "A100", "A10", "L4", "T4")) else 2**25)


def temporaries(p: Partitioned, workspace: float = 0.0) -> list[Buffer]:
    """Every temporary buffer with the steps between which it lives, loops written out once in their place."""
    # The schedule's, unless values were moved since (to the host).
    fusions = p.fusions if p.fusions is not None and p.fusions.values is p.values else Fusions(p.values)
    model = fusions(p.body)
    transposed = {v for n in p.body.nodes if inner_gather(n, p.values) for v in n.outputs}
    outside = {model.buffer(v) for v in p.body.results} - transposed | set(p.body.arguments)
    walk = _Walk(fusions, workspace)
    walk.body(p.body, outside, 0)
    return walk.buffers


class _Walk:
    """Numbers the steps of nested bodies and collects their buffers."""

    def __init__(self, fusions: Fusions, workspace: float):
        self.fusions, self.values, self.workspace = fusions, fusions.values, workspace
        self.clock = 0
        self.buffers: list[Buffer] = []

    def body(self, body: Body, outside: set[int], depth: int) -> None:
        """`outside`: values whose memory is accounted for elsewhere."""
        model = self.fusions(body)
        steps = steps_of(body, model, self.values, depth > 0)
        last = _last_reads(steps, body, model)
        shared = outside | (self.carried(body, steps, last, model) if depth else set())
        ends: list[int] = []
        born: dict[int, tuple[int, str]] = {}  # value that owns a buffer -> when, what for
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
            for v in made:
                if v not in owner:
                    owner[v] = v
                    born[v] = (start, "communication" if step.node.name in COLLECTIVES else "temporaries")
                    until[v] = last[v]
                    dying[last[v]].append(v)
            if step.node.name in _MATMULS:
                self.buffers.append(Buffer(start, start, self.workspace, "temporaries", depth))
            for inner in step.node.bodies:
                self.body(inner, set(inner.arguments), depth + 1)
            if step.node.bodies and not depth:
                for v in transposed_stacks(step.node, self.values) & set(body.arguments):
                    copies[v] = (copies.get(v, (start, 0))[0], self.clock)
            ends.append(self.clock)
        for v, (start, kind) in born.items():
            end = ends[until[v]] if until[v] < len(ends) else self.clock
            self.buffers.append(Buffer(start, end, self.values[v].bytes, kind, depth, v))
        for v, (start, end) in copies.items():
            self.buffers.append(Buffer(start, end, self.values[v].bytes, "temporaries", depth, v))

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


def _last_reads(steps: list[Step], body: Body, model: Fusion) -> dict[int, int]:
    """Buffer -> position of its last reader; results are read at the end."""
    last: dict[int, int] = {}
    for position, step in enumerate(steps):
        for value in (*step.reads, *step.writes):
            last[value] = position
    for value in body.results:
        last[model.buffer(value)] = len(steps)
    return last
