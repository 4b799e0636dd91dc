"""What fills the memory at the peak, by name: XLA's own buffer assignment, read from its dump.

The dump lists every value with its place in an allocation, and the instructions between which it lives. Arguments and
outputs live throughout; the temporaries share one block, and the moment at which most of it is in use is the peak.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from lensjax.verify.artifact import Artifact
from lensjax.verify.assignment import Life, Placed, key, lives, ranges, values
from lensjax.verify.hlo import Instruction, Module
from lensjax.verify.lines import origin, where


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer alive at the peak. `kind`: argument, output, temporary or constant; `what`: JAX's name of its origin."""

    name: str
    bytes: int
    kind: str
    shape: str
    what: str
    line: str


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes per device at the peak, what is alive then (largest first), and the instruction that runs."""

    bytes: int
    host_bytes: int
    buffers: tuple[Buffer, ...]
    at: str = ""


def peak(artifact: Artifact, module: Module, count: int = 10, names: Mapping[int, str] | None = None) -> Peak:
    """The peak of an artifact and its `count` largest buffers; none where the backend does not say which there are.

    `names`: parameter number -> the user's name of an argument, where JAX's own is only a number.
    """
    placed = tuple(values(artifact.assignment))
    when, order = ranges(artifact.liveness)
    now = _densest(lives((v for v in placed if v.kind == "temporary"), when), len(order))
    alive = [v for v in placed if v.kind != "temporary" or _lives(v, when, now)]
    buffers = [_named(v, module, names or {}) for v in _distinct(alive)]
    buffers.sort(key=lambda b: (-b.bytes, b.name))
    at = order[now] if now < len(order) else ""
    return Peak(artifact.memory.peak, artifact.memory.host, tuple(buffers[:count]), at)


def _lives(value: Placed, when: Mapping[str, tuple[int, int]], now: int) -> bool:
    first, last = when.get(key(value.name), (-1, -1))
    return first <= now <= last


def _densest(alive: Iterable[Life], length: int) -> int:
    """Index of the instruction at which most of the temporaries' block is in use."""
    if not length:
        return 0
    filled = np.zeros(length + 1)
    for x in alive:
        filled[x.first] += x.bytes
        filled[min(x.last + 1, length)] -= x.bytes
    return int(np.cumsum(filled)[:length].argmax())


def _distinct(placed: Iterable[Placed]) -> list[Placed]:
    """One value for each place in memory: a loop's carry is several values in one place."""
    found: dict[tuple[int, int], Placed] = {}
    for value in placed:
        place = (value.allocation, value.offset)
        if place not in found or value.bytes > found[place].bytes:
            found[place] = value
    return list(found.values())


def _named(value: Placed, module: Module, names: Mapping[int, str]) -> Buffer:
    name = re.sub(r"\{[\d,]*\}$", "", value.name)
    instruction = _find(module, name)
    if instruction is None:
        return Buffer(value.name, value.bytes, value.kind, value.shape, "", "")
    what, stack = origin(module, module.computations[instruction.computation], instruction)
    if instruction.opcode == "parameter" and instruction.computation == module.entry_name:
        what = names.get(int(instruction.literal), what) if instruction.literal.strip().isdigit() else what
    return Buffer(value.name, value.bytes, value.kind, value.shape.split("{")[0], what, where(stack))


def _find(module: Module, name: str) -> Instruction | None:
    for computation in module.computations.values():
        if name in computation.by_name:
            return computation.by_name[name]
    return None
