"""The order in which one device works, as far as it decides what is alive: combined collectives, late gathers."""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Sequence

from lensjax.cost.communication import COMBINE
from lensjax.partition.data import Body, Node, Value
from lensjax.partition.fusion import ALIASES, FREE, Fusion, captured, sources
from lensjax.partition.simplify import COLLECTIVES

# Operations whose result never takes the place of an operand; every other one may when sizes are equal and nobody reads
# the operand afterwards (XLA's buffer assignment, CanShareOperandBufferWithUser).
_APART = frozenset(["stablehlo.dot_general", "stablehlo.convolution", "stablehlo.custom_call", "stablehlo.fft",
                    "stablehlo.reduce_window", "stablehlo.transpose", "stablehlo.reduce", "chlo.ragged_dot",
                    *COLLECTIVES]) - {"all_reduce"}  # fmt: skip
_UPDATES = ("stablehlo.dynamic_update_slice", "stablehlo.scatter")
_COMBINED = ("all_gather", "all_reduce", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class Step:
    """A node that makes buffers: what it writes, what it reads through the chain fused into it, its own operands;
    `apart`: it never writes over an operand."""

    node: Node
    writes: tuple[int, ...]
    reads: frozenset[int]
    direct: tuple[int, ...]
    apart: bool = False

    def may_overwrite(self, value: int) -> bool:
        """Whether a result may be written over this operand."""
        if self.node.name in _UPDATES:
            return bool(self.direct) and self.direct[0] == value
        return not self.apart and self.node.name not in _APART


def steps_of(
    body: Body, model: Fusion, values: Sequence[Value], looped: bool = False, prompt: bool = False
) -> list[Step]:
    """A body's steps in the order in which XLA would run them; `looped`: the body is a loop's; `prompt`: work is not
    put off (see `lensjax.cost.memory.Habits`)."""
    steps = [_step(n, model, values) for n in body.nodes if _matters(n, model)]
    results = {model.buffer(v) for v in body.results}
    steps = _combine(steps, values)
    if not prompt:
        return _sink(steps, values, results, looped)
    made = {v for step in steps for v in step.writes}
    return steps if looped else sorted(steps, key=lambda s: not made.isdisjoint(s.reads))


def _matters(node: Node, model: Fusion) -> bool:
    if node.name in ALIASES or node.name in FREE:
        return False
    return not node.outputs or any(v in model.stored for v in node.outputs) or bool(node.bodies)


def _step(node: Node, model: Fusion, values: Sequence[Value]) -> Step:
    reads = set(sources(node, values, model))
    for inner in node.bodies:
        reads |= {model.buffer(v) for v in captured(inner)}
    direct = tuple(model.buffer(v) for v in node.inputs)
    return Step(node, node.outputs, frozenset(reads), direct, apart=not model.rows.isdisjoint(node.outputs))


def _combine(steps: list[Step], values: Sequence[Value]) -> list[Step]:
    """Collectives of one kind as one call, whose operands wait for the last of them and whose results come together
    (xla/service/all_reduce_combiner.cc and its siblings)."""
    made = {v: i for i, s in enumerate(steps) for v in s.writes}
    depth: list[int] = []
    bundle: dict[tuple, int] = {}
    size: dict[int, float] = defaultdict(float)
    merged: dict[int, int] = {}
    for i, step in enumerate(steps):
        before = [made[v] for v in step.reads if v in made]
        depth.append(max((depth[j] + (steps[j].node.name in COLLECTIVES) for j in before), default=0))
        if step.node.name not in _COMBINED:
            continue
        key = (step.node.name, step.node.axes, values[step.writes[0]].dtype, depth[i])
        bytes_ = sum(values[v].bytes for v in step.writes)  # XLA's limit is on what the calls return
        if key not in bundle or size[bundle[key]] + bytes_ > COMBINE:
            bundle[key] = i
        merged[i] = bundle[key]
        size[bundle[key]] += bytes_
    return _in_order(steps, merged, made)


def _in_order(steps: list[Step], merged: dict[int, int], made: dict[int, int]) -> list[Step]:
    """Steps with `merged` ones (member -> first) as one, each as early in the program as what it reads allows."""
    new: dict[int, Step] = {}
    for i, step in enumerate(steps):
        first = merged.get(i, i)
        if first in new:
            old = new[first]
            step = Step(old.node, old.writes + step.writes, old.reads | step.reads, old.direct + step.direct)
        new[first] = step
    waits = {i: {merged.get(made[v], made[v]) for v in s.reads if v in made} - {i} for i, s in new.items()}
    after: dict[int, list[int]] = defaultdict(list)
    for i, before in waits.items():
        for j in before:
            after[j].append(i)
    ready = [i for i, before in waits.items() if not before]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(new[i])
        for j in after[i]:
            waits[j].discard(i)
            if not waits[j]:
                heapq.heappush(ready, j)
    return order


def _sink(steps: list[Step], values: Sequence[Value], results: set[int], looped: bool) -> list[Step]:
    """The steps with each as late as its first reader allows, where that frees more than it keeps alive, or where a
    loop lies between.

    A stand-in for XLA's memory-aware list scheduler (xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc): programs
    gather the weights of a layer first, the compiler gathers them where they are used. Its latency-hiding scheduler
    (xla/service/latency_hiding_scheduler.cc) then goes backward from the end: what only the end reads, the gradient of
    an output layer above all, is not made before the loop over the layers has run, and its operands wait.
    """
    time = [float(i) for i in range(len(steps))]
    loops = [i for i, step in enumerate(steps) if step.node.name == "stablehlo.while"]
    readers: dict[int, list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        for value in step.reads:
            readers[value].append(i)
    for i in reversed(range(len(steps))):
        step = steps[i]
        users = [time[u] for v in step.writes for u in readers[v]]
        if not users and step.node.name in COLLECTIVES and not results.isdisjoint(step.writes):
            users = [float(len(steps))]  # a total that is only returned
        if not users or min(users) <= i + 1 or step.node.bodies:
            continue
        after = [w for w in loops if i < w < min(users)]
        target = after[-1] + 0.25 if after else min(users) - 0.5
        # The last readers are seldom before it: asked first.
        kept = sum(values[v].bytes for v in step.reads if all(time[u] < target for u in reversed(readers[v]) if u != i))
        if after and (step.node.name != "stablehlo.reduce" or kept < sum(values[v].bytes for v in step.writes)):
            time[i] = target + 1e-6 * i
            continue
        if looped or kept < sum(values[v].bytes for v in step.writes):
            time[i] = target - 1e-6 * (len(steps) - i)
    return [steps[i] for i in sorted(range(len(steps)), key=lambda i: time[i])]
