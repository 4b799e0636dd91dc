"""Peak memory of one device: liveness over the partitioned program, with XLA's fusion, order and sharing of buffers.

    peak = arguments + results that no argument was donated for + the most that temporaries ever hold

Temporaries are the stored values of `lensjax.partition.fusion`, each alive from the operation that makes it to the
last one that reads it. A loop's body is walked the same way; what it carries lives outside of it, what it stacks is one
buffer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from lensjax.partition.data import Body, Node, Partitioned, Value
from lensjax.partition.fusion import ALIASES, FREE, Fusion, captured, fuse, sources
from lensjax.partition.simplify import COLLECTIVES
from lensjax.topology.cluster import Device

# Operations that may write their result over an operand that nobody reads afterwards: loops and updates always, other
# fused chains when the sizes are equal (XLA's buffer assignment, `CanShareOperandBufferWithUser`).
_IN_PLACE = frozenset(["stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.dynamic_update_slice",
                       "stablehlo.scatter", "all_reduce", "stablehlo.sort"])  # fmt: skip
_NEVER_IN_PLACE = frozenset(["stablehlo.dot_general", "stablehlo.convolution", "stablehlo.custom_call",
                             "stablehlo.reduce_window", "stablehlo.fft", "stablehlo.transpose", "chlo.ragged_dot",
                             "stablehlo.reduce", *COLLECTIVES]) - {"all_reduce"}  # fmt: skip
_MATMULS = ("stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device. `arguments` and `results` (those without a donated argument) exist throughout; `temporaries` is
    the peak of everything else, and `held` says what that consists of at the peak: "activations" (alive around the
    operation that peaks), "communication" (what collectives returned) and "temporaries" (made where the peak is)."""

    arguments: float
    results: float
    temporaries: float
    held: Mapping[str, float]

    @property
    def peak(self) -> float:
        return self.arguments + self.results + self.temporaries


def memory(p: Partitioned, workspace: float = 0.0) -> Memory:
    """Peak memory of a partitioned step. `workspace`: bytes of scratch that a matmul asks for (see `workspace_of`)."""
    model = fuse(p.body, p.values)
    kept = {model.buffer(v) for v in p.body.results}
    arguments = sum(p.values[v].bytes for v in p.body.arguments)
    donated = {r for r in p.donated.values()}
    fresh = {r: v for r, v in enumerate(p.body.results) if r not in donated and v not in p.body.arguments}
    temporaries, held = _Walk(p.values, workspace).peak(p.body, outside=kept | set(p.body.arguments))
    return Memory(arguments, sum(p.values[v].bytes for v in fresh.values()), temporaries, dict(held))


def workspace_of(device: Device) -> float:
    """Bytes of scratch of XLA's cuBLAS calls: 32 MiB from Hopper on, 4 MiB before (xla/service/gpu/transforms/
    gemm_rewriter.cc, kHopperWorkspace and kDefaultWorkspace)."""
    if device.platform != "cuda":
        return 0.0
    return float(2**22 if device.name.startswith(("V100", "A100", "A10", "L4", "T4")) else 2**25)


class _Walk:
    """Liveness of nested bodies."""

    def __init__(self, values: Sequence[Value], workspace: float):
        self.values, self.workspace = values, workspace

    def peak(self, body: Body, outside: set[int]) -> tuple[float, Counter[str]]:
        """Most bytes that values made in a body hold at once; `outside`: buffers that are accounted for elsewhere."""
        model = fuse(body, self.values)
        steps = _sink([_step(n, model, self.values) for n in body.nodes if _matters(n, model)], self.values)
        last = _last_reads(steps, body, model)
        shared = self.carried(body, steps, last, model) | outside
        live: dict[int, float] = {}
        kinds: dict[int, str] = {}
        best, held = 0.0, Counter[str]()
        for position, step in enumerate(steps):
            made = {v: self.values[v].bytes for v in step.writes if v not in shared}
            for old, new in step.reused(last, position, live, made, self.values):
                made.pop(new)
                live[new] = live.pop(old)
                kinds[new] = kinds.get(old, "temporaries")
            inner, inside = self.inner(step.node)
            if step.node.name in _MATMULS:
                inner, inside = self.workspace, Counter(temporaries=self.workspace)
            total = sum(live.values()) + sum(made.values()) + inner
            if total > best:
                best, held = total, self.account(live, made, kinds, step, inside, last, position)
            live.update(made)
            kinds.update((v, "communication" if step.node.name in COLLECTIVES else "temporaries") for v in made)
            for v in [v for v in live if last.get(v, position) <= position]:
                del live[v]
        return best, held

    def account(self, live, made, kinds, step, inside, last, position) -> Counter[str]:
        held = Counter(inside)
        around = step.node.bodies
        for v, size in live.items():
            kind = kinds.get(v, "temporaries")
            held["activations" if around and kind != "communication" else kind] += size
        kind = "activations" if around else "communication" if step.node.name in COLLECTIVES else "temporaries"
        held[kind] += sum(made.values())
        return held

    def inner(self, node: Node) -> tuple[float, Counter[str]]:
        """The peak inside a loop's body or the worst branch."""
        peaks = [self.peak(b, set(b.arguments)) for b in node.bodies]
        return max(peaks, key=lambda x: x[0], default=(0.0, Counter()))

    def carried(self, body: Body, steps: list[_Step], last: dict[int, int], model: Fusion) -> set[int]:
        """Values of a loop body that are written over the carried value that they replace: nobody reads it any more."""
        made_at = {v: i for i, s in enumerate(steps) for v in s.writes}
        found = set()
        for argument, result in zip(body.arguments, body.results):
            value = model.buffer(result)
            if value in made_at and self.values[value].bytes == self.values[argument].bytes:
                step = steps[made_at[value]]
                gone = last.get(argument, -1)
                if gone < made_at[value] or (gone == made_at[value] and step.may_overwrite(argument)):
                    found.add(value)
        return found


@dataclasses.dataclass(frozen=True)
class _Step:
    """A node that makes buffers: what it writes, and what it reads through the chain fused into it."""

    node: Node
    writes: tuple[int, ...]
    reads: frozenset[int]
    direct: tuple[int, ...]

    def may_overwrite(self, value: int) -> bool:
        if self.node.name == "stablehlo.dynamic_update_slice" or self.node.name == "stablehlo.scatter":
            return bool(self.direct) and self.direct[0] == value
        return self.node.name not in _NEVER_IN_PLACE

    def reused(self, last, position, live, made, values) -> list[tuple[int, int]]:
        """(old, new): operands that die here, and the results that take their buffers."""
        pairs = []
        free = [v for v in dict.fromkeys((*self.direct, *self.reads)) if v in live and last.get(v) == position]
        in_order = self.node.name == "stablehlo.while"
        for new in made:
            for old in free:
                if values[old].bytes != values[new].bytes or not self.may_overwrite(old):
                    continue
                if in_order and self.direct[self.node.outputs.index(new)] != old:
                    continue
                pairs.append((old, new))
                free.remove(old)
                break
        return pairs


def _matters(node: Node, model: Fusion) -> bool:
    if node.name in ALIASES or node.name in FREE:
        return False
    return not node.outputs or any(v in model.stored for v in node.outputs) or bool(node.bodies)


def _step(node: Node, model: Fusion, values: Sequence[Value]) -> _Step:
    reads = set(sources(node, values, model))
    for inner in node.bodies:
        reads |= {model.buffer(v) for v in captured(inner)}
    return _Step(node, node.outputs, frozenset(reads), tuple(model.buffer(v) for v in node.inputs))


def _last_reads(steps: list[_Step], body: Body, model: Fusion) -> dict[int, int]:
    """Buffer -> position of its last reader; results are read at the end."""
    last: dict[int, int] = {}
    for position, step in enumerate(steps):
        for value in (*step.reads, *step.writes):
            last[value] = position
    for value in body.results:
        last[model.buffer(value)] = len(steps)
    return last


def _sink(steps: list[_Step], values: Sequence[Value]) -> list[_Step]:
    """The steps with each as late as its first reader allows, where that frees more than it keeps alive.

    A stand-in for XLA's memory-aware list scheduler (xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc): programs
    gather all weights of a layer first, the compiler gathers each where it is used.
    """
    time = {id(s): float(i) for i, s in enumerate(steps)}
    readers: dict[int, list[_Step]] = defaultdict(list)
    for step in steps:
        for value in step.reads:
            readers[value].append(step)
    for i, step in reversed(list(enumerate(steps))):
        users = [time[id(u)] for v in step.writes for u in readers[v]]
        if not users or min(users) <= i + 1 or step.node.bodies:
            continue
        target = min(users) - 0.5
        kept = sum(
            values[v].bytes
            for v in step.reads
            if max((time[id(u)] for u in readers[v] if u is not step), default=-1.0) < target
        )
        if kept < sum(values[v].bytes for v in step.writes):
            time[id(step)] = target - 1e-6 * (len(steps) - i)
    return sorted(steps, key=lambda s: time[id(s)])
