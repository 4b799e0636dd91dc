"""How much memory an allocator needs for a compiled step, over what is ever in use at once.

XLA plans all temporaries of a program into one block before it runs. So what JAX's allocator on a GPU is asked for at
run time is little: the donated state once, the rest of the arguments and results anew each step, and that one block.
`steps` replays exactly these requests. `buffers` replays what a runtime that does not plan ahead would ask for: each
temporary buffer when it is made, back when nobody reads it any more.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from lensjax.verify.allocator import Event, Replay, replay
from lensjax.verify.artifact import Artifact
from lensjax.verify.assignment import Allocation, Life, allocations, lives, ranges, values
from lensjax.verify.finding import size

STEPS = 4
# Part of a device's memory that JAX's client takes when it starts, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
# (jax.readthedocs.io, "GPU memory allocation").
PREALLOCATED = 0.75
# Part that no setting may take: the CUDA context, cuBLAS and NCCL live outside of the client's memory.
LARGEST = 0.95
# Need over use from which holes between blocks are worth a word.
WASTEFUL = 1.05


@dataclasses.dataclass(frozen=True)
class Fragmentation:
    """Bytes per device. `block`: XLA's one block of temporaries, in which at most `live` are in use at once. `steps`:
    what the runtime asks for over STEPS steps; `buffers`: each temporary by itself (see the module)."""

    block: int
    live: int
    steps: Replay
    buffers: Replay

    def to_json(self) -> dict[str, Any]:
        def of(need: float, peak: float) -> dict[str, float]:
            return {"need_bytes": need, "peak_bytes": peak, "ratio": need / peak if peak else 1.0}

        return {
            "steps": of(self.steps.need, self.steps.peak),
            "planned_block": of(self.block, self.live),
            "without_planning": of(self.buffers.need, self.buffers.peak),
        }


def fragmentation(artifact: Artifact) -> Fragmentation | None:
    """None where the backend does not say which buffers there are, or has no such allocator (only GPUs have)."""
    if artifact.backend != "cuda" or not artifact.assignment or not artifact.liveness:
        return None
    found = allocations(artifact.assignment)
    when, _ = ranges(artifact.liveness)
    block = max((a for a in found if a.kind == "temporary"), key=lambda a: a.bytes, default=None)
    inside = (v for v in values(artifact.assignment) if block is not None and v.allocation == block.number)
    alive = lives(inside, when)
    at_once = replay(buffer_events(alive), unit=1).peak
    size_of = block.bytes if block is not None else 0
    return Fragmentation(size_of, at_once, replay(step_events(found)), replay(buffer_events(alive)))


def buffer_events(alive: Sequence[Life]) -> Iterator[Event]:
    """Each buffer taken at the instruction that makes it and returned after the last one that needs it."""
    made: defaultdict[int, list[int]] = defaultdict(list)
    gone: defaultdict[int, list[int]] = defaultdict(list)
    for i, x in enumerate(alive):
        made[x.first].append(i)
        gone[x.last].append(i)
    for moment in sorted({*made, *gone}):
        yield from (Event(i, alive[i].bytes) for i in made[moment])
        yield from (Event(i, None) for i in gone[moment])


def step_events(found: Sequence[Allocation], steps: int = STEPS) -> Iterator[Event]:
    """What the runtime asks for over some steps of a training loop.

    The arguments are there before the first step. Each step takes its results and the block of temporaries in XLA's
    order, and returns the block at its end. A donated argument stays; of the others, one that a result of its size can
    replace is the state of a step that does not donate, and is returned when the step has ended; the rest is the batch,
    of which the next one arrives while a step runs. A result that replaces nothing (the loss) is held until there is a
    new one.
    """
    fresh = [a for a in found if a.kind in ("output", "temporary")]
    state, batch = _split(found)
    heir = dict(_heirs(state, [a for a in fresh if a.kept]))
    yield from (Event((a.number, "state"), a.bytes) for a in found if a.kind == "argument" and a.kept)
    now = {a.number: (a.number, "state", 0) for a in state}
    yield from (Event(now[a.number], a.bytes) for a in state)
    yield from (Event((a.number, "batch", 0), a.bytes) for a in batch)
    for step in range(steps):
        yield from (Event((a.number, "made", step), a.bytes) for a in fresh)
        yield from (Event((a.number, "batch", step + 1), a.bytes) for a in batch)
        yield from (Event((a.number, "made", step), None) for a in fresh if not a.kept)
        yield from (Event((a.number, "batch", step), None) for a in batch)
        for a in state:
            yield Event(now[a.number], None)
            now[a.number] = (heir[a.number], "made", step)
        inherited = set(heir.values())
        yield from (
            Event((a.number, "made", step - 1), None)
            for a in fresh
            if step and a.kept and a.number not in inherited
        )  # fmt: skip


def _split(found: Sequence[Allocation]) -> tuple[list[Allocation], list[Allocation]]:
    """The arguments that are not donated: those that results replace, and the rest."""
    left = Counter(a.bytes for a in found if a.kind == "output" and a.kept)
    state, batch = [], []
    for a in found:
        if a.kind == "argument" and not a.kept:
            (state if left[a.bytes] > 0 else batch).append(a)
            left[a.bytes] -= 1
    return state, batch


def _heirs(state: Sequence[Allocation], results: Sequence[Allocation]) -> Iterator[tuple[int, int]]:
    """(argument, result) pairs of equal size."""
    left = list(results)
    for a in state:
        b = next(r for r in left if r.bytes == a.bytes)
        left.remove(b)
        yield a.number, b.number


def advice(found: Fragmentation, memory: float) -> str:
    """What to set for a device with `memory` bytes, or that nothing has to be."""
    need = found.steps.need
    if need > LARGEST * memory:
        return f"the step does not fit: {size(need)} of {size(memory)}, some of which lies outside of JAX's reach"
    if need > PREALLOCATED * memory:
        fraction = min(math.ceil(100 * (need / memory + 0.01)) / 100, LARGEST)
        return (
            f"set XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f}: JAX takes {PREALLOCATED:.0%} of the memory by default "
            f"({size(PREALLOCATED * memory)}), the step needs {size(need)}; leave XLA_PYTHON_CLIENT_PREALLOCATE on"
        )
    if found.steps.ratio > WASTEFUL:
        return (
            "leave XLA_PYTHON_CLIENT_PREALLOCATE on: memory that is taken piece by piece is not joined again, and "
            "holes would cost more than they do; donate the state if nothing else needs it"
        )
    return f"nothing to set: the step fits what JAX takes by default ({size(PREALLOCATED * memory)})"
