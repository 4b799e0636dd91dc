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
from lensjax.verify.hlo import Instruction, Module
from lensjax.verify.lines import origin, where

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)$")
_VALUE = re.compile(r"^\s+value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^\s+(\S+?)(\{[\d,]*\})?:(\d+)-(\d+)\s*$")


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


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str
    bytes: int
    offset: int
    shape: str
    allocation: int
    kind: str


def peak(artifact: Artifact, module: Module, count: int = 10, names: Mapping[int, str] | None = None) -> Peak:
    """The peak of an artifact and its `count` largest buffers; none where the backend does not say which there are.

    `names`: parameter number -> the user's name of an argument, where JAX's own is only a number.
    """
    values = tuple(_values(artifact.assignment))
    ranges, order = _ranges(artifact.liveness)
    now = _densest([v for v in values if v.kind == "temporary"], ranges, len(order))
    alive = [v for v in values if v.kind != "temporary" or _lives(v, ranges, now)]
    buffers = [_named(v, module, names or {}) for v in _distinct(alive)]
    buffers.sort(key=lambda b: (-b.bytes, b.name))
    at = order[now] if now < len(order) else ""
    return Peak(artifact.memory.peak, artifact.memory.host, tuple(buffers[:count]), at)


def _values(text: str) -> Iterable[_Value]:
    allocation, kind = -1, ""
    for line in text.splitlines():
        if found := _ALLOCATION.match(line):
            allocation, kind = int(found.group(1)), _kind(found.group(3))
        elif kind and (found := _VALUE.match(line)):
            yield _Value(found.group(1), int(found.group(2)), int(found.group(3)), found.group(4), allocation, kind)
        elif line.startswith("Total bytes"):
            return


def _kind(flags: str) -> str:
    """What an allocation is for; "" for those that take no device memory of their own."""
    if "thread-local" in flags:
        return ""
    for word, kind in (("parameter", "argument"), ("constant", "constant"), ("preallocated-temp", "temporary")):
        if word in flags:
            return kind
    return "output" if "live-out" in flags or "output" in flags else "temporary"


def _ranges(text: str) -> tuple[Mapping[str, tuple[int, int]], list[str]]:
    """Value name -> (first, last) instruction index, and the instructions in order."""
    ranges: dict[str, tuple[int, int]] = {}
    order: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.strip().endswith(":") and "-" not in line:
            section = line.strip()
        elif section == "InstructionSequence:" and (found := re.match(r"^\s+\d+:(\S+)", line)):
            order.append(found.group(1))
        elif section == "BufferLiveRange:" and (found := _RANGE.match(line)):
            index = found.group(2) if found.group(2) not in (None, "{}") else ""
            ranges[found.group(1) + index] = (int(found.group(3)), int(found.group(4)))
    return ranges, order


def _lives(value: _Value, ranges: Mapping[str, tuple[int, int]], now: int) -> bool:
    first, last = ranges.get(_key(value.name), (-1, -1))
    return first <= now <= last


def _key(name: str) -> str:
    return name.removesuffix("{}")


def _densest(values: list[_Value], ranges: Mapping[str, tuple[int, int]], length: int) -> int:
    """Index of the instruction at which the live values reach highest in their block, then fill it most."""
    if not length:
        return 0
    filled = np.zeros(length + 1)
    for value in values:
        first, last = ranges.get(_key(value.name), (-1, -1))
        if first >= 0:
            filled[first] += value.bytes
            filled[min(last + 1, length)] -= value.bytes
    return int(np.cumsum(filled)[:length].argmax())


def _distinct(values: Iterable[_Value]) -> list[_Value]:
    """One value for each place in memory: a loop's carry is several values in one place."""
    found: dict[tuple[int, int], _Value] = {}
    for value in values:
        place = (value.allocation, value.offset)
        if place not in found or value.bytes > found[place].bytes:
            found[place] = value
    return list(found.values())


def _named(value: _Value, module: Module, names: Mapping[int, str]) -> Buffer:
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
