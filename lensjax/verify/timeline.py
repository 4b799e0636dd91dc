"""When everything runs: a walk over the compiled schedule of one device, compute on one stream, each tier on another.

The instructions of a computation run in the order of the schedule. Compute follows compute; a collective begins when it
is issued and when the links that it uses are free, and compute waits for it at its `-done` (at once for one without).
Two that share a tier run one after the other: that takes as long as sharing its bandwidth would. Nothing crosses the
edge of a loop body (HLO has no such pair), so a body is walked once and repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from lensjax.verify.collectives import Collective, Found
from lensjax.verify.hlo import Computation, Instruction, Module
from lensjax.verify.lines import origin, where
from lensjax.verify.roofline import Efficiency, seconds
from lensjax.verify.work import work

if TYPE_CHECKING:
    from lensjax.topology.cluster import Device

COMPUTE = "compute"

Price = Callable[[Collective], tuple[float, tuple[str, ...]]]
"""A collective -> seconds of one run, and the tiers whose links it uses (outermost last)."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One instruction on a stream. Seconds; `waited` is how long compute stood still for it."""

    name: str
    stream: str
    start: float
    seconds: float
    what: str = ""
    line: str = ""
    waited: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Block:
    """A computation walked once: its events, and what it repeats (start, block, times)."""

    seconds: float
    events: tuple[Event, ...]
    inner: tuple[tuple[float, Block, int], ...]
    longest: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]

    def flat(self, start: float = 0.0, limit: int = 200_000) -> Iterator[tuple[float, Event]]:
        """(time, event) of every run of everything, up to about `limit` events; of a longer loop the first runs."""
        yield from ((start + e.start, e) for e in self.events)
        for at, block, times in self.inner:
            size = block.size
            for run in range(min(times, max(1, limit // max(size, 1)))):
                yield from block.flat(start + at + run * block.seconds, limit)

    @property
    def size(self) -> int:
        return len(self.events) + sum(b.size * n for _, b, n in self.inner)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of one device. Seconds.

    busy:     stream ("compute" or a tier) -> time in use
    exposed:  tier -> time that compute waits for it
    longest:  the longest chain of dependencies, were there any number of streams
    critical: what compute waited for or did, largest first: (name, seconds, line)
    """

    step: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    longest: float
    critical: tuple[tuple[str, float, str], ...]
    block: Block
    notes: tuple[str, ...] = ()

    @property
    def compute(self) -> float:
        return self.busy.get(COMPUTE, 0.0)

    @property
    def bubble(self) -> float:
        """Seconds in which compute stands still, for whatever reason."""
        return self.step - self.compute


def timeline(
    module: Module,
    found: Found,
    device: Device,
    price: Price,
    efficiency: Efficiency | None = None,
    overlap: bool = True,
) -> Timeline:
    """Walks the schedule of a module. `overlap=False` runs every collective where it is issued, alone."""
    walk = _Walk(module, found, device, price, efficiency or Efficiency(), overlap)
    block = walk.block(module.entry_name)
    notes = () if module.scheduled else ("the module is not scheduled: the order of its text is taken as the schedule",)
    return Timeline(block.seconds, block.busy, block.exposed, block.longest, _critical(block), block, notes)


class _Walk:
    """The state of a walk: blocks already walked, and the collectives by instruction."""

    def __init__(self, module, found, device, price, efficiency, overlap):
        self.module, self.device, self.price = module, device, price
        self.efficiency, self.overlap = efficiency, overlap
        self.collectives: dict[tuple[str, str], list[Collective]] = {}
        for c in found.collectives:
            self.collectives.setdefault((c.computation, c.name), []).append(c)
        self.blocks: dict[str, Block] = {}

    def block(self, name: str) -> Block:
        if name not in self.blocks:
            self.blocks[name] = _Lane(self, self.module.computations[name]).run()
        return self.blocks[name]

    def cost(self, collectives: list[Collective]) -> tuple[float, tuple[str, ...]]:
        """Seconds and tiers of the collectives of one instruction (several only where groups differ in size)."""
        priced = [self.price(c) for c in collectives]
        slowest = max(priced, key=lambda p: p[0])
        tiers = dict.fromkeys(t for _, used in priced for t in used)
        return slowest[0], tuple(tiers)


class _Lane:
    """The walk of one computation."""

    def __init__(self, walk: _Walk, computation: Computation):
        self.walk, self.computation = walk, computation
        self.now = 0.0
        self.free: dict[str, float] = {}
        self.pending: dict[str, tuple[float, float, tuple[str, ...], int]] = {}
        self.events: list[Event] = []
        self.inner: list[tuple[float, Block, int]] = []
        self.busy: dict[str, float] = {}
        self.exposed: dict[str, float] = {}
        self.ready: dict[str, float] = {}

    def run(self) -> Block:
        for instruction in self.computation.instructions:
            before = max((self.ready.get(o, 0.0) for o in instruction.operands), default=0.0)
            self.ready[instruction.name] = before + self._step(instruction)
        for start in list(self.pending):
            self._wait(start)
        longest = max(self.ready.values(), default=0.0)
        events = tuple(self.events)
        return Block(self.now, events, tuple(self.inner), longest, self.busy, self.exposed)

    def _step(self, instruction: Instruction) -> float:
        """Runs one instruction; returns its seconds on a dependency chain."""
        if instruction.opcode.endswith("-done"):
            self._wait(instruction.operands[0] if instruction.operands else "")
            return 0.0
        if found := self._communication(instruction):
            return self._issue(instruction, found)
        if instruction.opcode == "while":
            return self._repeat(instruction)
        if instruction.opcode == "conditional":
            return self._branch(instruction)
        if instruction.opcode == "call" or (instruction.opcode.endswith("-start") and instruction.called):
            return self._call(instruction)
        return self._compute(instruction)

    def _communication(self, instruction: Instruction) -> list[Collective]:
        """Collectives that this instruction runs itself or (TPU) inside its fusion or asynchronous computation."""
        found = list(self.walk.collectives.get((self.computation.name, instruction.name), ()))
        if instruction.opcode == "fusion" or instruction.opcode.endswith("-start"):
            for name in instruction.called:
                inside = self.walk.module.computations.get(name)
                for inner in inside.instructions if inside else ():
                    found += self.walk.collectives.get((name, inner.name), ())
        return found

    def _issue(self, instruction: Instruction, found: list[Collective]) -> float:
        took, tiers = self.walk.cost(found)
        if not took or not tiers:
            return 0.0
        start = max([self.now, *(self.free.get(t, 0.0) for t in tiers)])
        for tier in tiers:
            self.free[tier] = start + took
        stream = tiers[-1]
        self.busy[stream] = self.busy.get(stream, 0.0) + took
        sent = float(sum(c.payload for c in found))
        self._note(instruction, stream, start, took, bytes=sent)
        self.pending[instruction.name] = (start, start + took, tiers, len(self.events) - 1)
        if not self.walk.overlap or not instruction.opcode.endswith("-start"):
            self._wait(instruction.name)
        return took

    def _wait(self, start: str) -> None:
        if start not in self.pending:
            return
        _, end, tiers, index = self.pending.pop(start)
        waited = max(0.0, end - self.now)
        if waited:
            self.exposed[tiers[-1]] = self.exposed.get(tiers[-1], 0.0) + waited
            self.events[index] = dataclasses.replace(self.events[index], waited=waited)
            self.now = end

    def _compute(self, instruction: Instruction) -> float:
        amount = work(self.walk.module, self.computation, instruction)
        took = seconds(amount, self.walk.device, self.walk.efficiency)
        if took:
            self._note(instruction, COMPUTE, self.now, took, flops=amount.flops, bytes=amount.bytes)
            self.busy[COMPUTE] = self.busy.get(COMPUTE, 0.0) + took
            self.now += took
        return took

    def _call(self, instruction: Instruction) -> float:
        return sum(self._run(c, 1) for c in instruction.called if c in self.walk.module.computations)

    def _branch(self, instruction: Instruction) -> float:
        blocks = [c for c in instruction.called if c in self.walk.module.computations]
        return self._run(max(blocks, key=lambda c: self.walk.block(c).seconds), 1) if blocks else 0.0

    def _repeat(self, instruction: Instruction) -> float:
        trips = instruction.trip_count or 1
        body = (instruction.attr("body") or "").lstrip("%")
        return self._run(body, trips) if body in self.walk.module.computations else 0.0

    def _run(self, name: str, times: int) -> float:
        """A computation `times` over, after all that is under way: its own walk starts with free links."""
        block = self.walk.block(name)
        if block.busy.keys() - {COMPUTE}:
            for start in [s for s, (_, _, tiers, _) in self.pending.items() if set(tiers) & set(block.busy)]:
                self._wait(start)
        if block.seconds:
            self.inner.append((self.now, block, times))
            self.now += block.seconds * times
            _add(self.busy, block.busy, times)
            _add(self.exposed, block.exposed, times)
        return block.longest * times

    def _note(self, instruction: Instruction, stream: str, start: float, took: float, **facts: float) -> None:
        what, stack = origin(self.walk.module, self.computation, instruction)
        self.events.append(Event(instruction.name, stream, start, took, what, where(stack), **facts))


def _add(total: dict[str, float], part: Mapping[str, float], times: int) -> None:
    for key, value in part.items():
        total[key] = total.get(key, 0.0) + value * times


def _critical(block: Block, count: int = 20) -> tuple[tuple[str, float, str], ...]:
    """Where the time of the step goes: compute events and waits, summed over runs, largest first."""
    total: dict[tuple[str, str], float] = {}
    todo = [(block, 1)]
    while todo:
        at, times = todo.pop()
        for event in at.events:
            took = event.seconds if event.stream == COMPUTE else event.waited
            if took:
                key = (event.name, event.line)
                total[key] = total.get(key, 0.0) + took * times
        todo.extend((inner, times * n) for _, inner, n in at.inner)
    ranked = sorted(total.items(), key=lambda kv: -kv[1])[:count]
    return tuple((name, took, line) for (name, line), took in ranked)
