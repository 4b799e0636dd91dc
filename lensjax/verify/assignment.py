"""XLA's buffer assignment as data: its allocations, which value sits where in them, and when each value lives."""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)$")
# A loop's carry and a conditional's result are marked as joining several values ("phi").
_VALUE = re.compile(r"^\s+value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^\s+(\S+?)(\{[\d,]*\})?:(\d+)-(\d+)\s*$")
_PARAMETER = re.compile(r"\bparameter (\d+)\b")


@dataclasses.dataclass(frozen=True)
class Allocation:
    """`bytes` that the runtime gets in one piece. `kind`: argument, output, temporary or constant. `kept`: it holds a
    result after the step; an argument that is kept was donated."""

    number: int
    bytes: int
    kind: str
    kept: bool


@dataclasses.dataclass(frozen=True)
class Placed:
    """A value and its place: `offset` bytes into an allocation."""

    name: str
    bytes: int
    offset: int
    shape: str
    allocation: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Life:
    """A buffer in the block of temporaries, alive from instruction `first` to instruction `last`, both included."""

    bytes: int
    first: int
    last: int


def allocations(text: str) -> tuple[Allocation, ...]:
    """The allocations in XLA's order, without those that take no device memory of their own."""
    found = (m for m in map(_ALLOCATION.match, text.splitlines()) if m)
    made = (Allocation(int(m[1]), int(m[2]), _kind(m[3]), "live-out" in m[3] or "output" in m[3]) for m in found)
    return tuple(a for a in made if a.kind)


def values(text: str) -> Iterable[Placed]:
    """Every value of an assignment, allocation by allocation."""
    allocation, kind = -1, ""
    for line in text.splitlines():
        if found := _ALLOCATION.match(line):
            allocation, kind = int(found.group(1)), _kind(found.group(3))
        elif kind and (found := _VALUE.match(line)):
            yield Placed(found.group(1), int(found.group(2)), int(found.group(3)), found.group(4), allocation, kind)
        elif line.startswith("Total bytes"):
            return


def _kind(flags: str) -> str:
    """What an allocation is for; "" for those that take no device memory of their own."""
    if "thread-local" in flags:
        return ""
    if _PARAMETER.search(flags):
        return "argument"
    for word, kind in (("constant", "constant"), ("preallocated-temp", "temporary")):
        if word in flags:
            return kind
    return "output" if "live-out" in flags or "output" in flags else "temporary"


def ranges(text: str) -> tuple[Mapping[str, tuple[int, int]], list[str]]:
    """Value name -> (first, last) instruction index, and the instructions in order."""
    found_ranges: dict[str, tuple[int, int]] = {}
    order: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.strip().endswith(":") and "-" not in line:
            section = line.strip()
        elif section == "InstructionSequence:" and (found := re.match(r"^\s+\d+:(\S+)", line)):
            order.append(found.group(1))
        elif section == "BufferLiveRange:" and (found := _RANGE.match(line)):
            index = found.group(2) if found.group(2) not in (None, "{}") else ""
            found_ranges[found.group(1) + index] = (int(found.group(3)), int(found.group(4)))
    return found_ranges, order


def key(name: str) -> str:
    """A value's name as `ranges` has it."""
    return name.removesuffix("{}")


def lives(placed: Iterable[Placed], when: Mapping[str, tuple[int, int]]) -> tuple[Life, ...]:
    """The buffers behind the values of one block: values in one place at the same moment (a loop's carry, a result
    written over its operand) are one buffer. Values of which XLA does not say when they live are left out."""
    timed = [(*when[key(v.name)], v) for v in placed if v.bytes and key(v.name) in when]
    return tuple(sorted(_merged(timed), key=lambda x: (x.first, x.last, x.bytes)))


def _merged(timed: list[tuple[int, int, Placed]]) -> Iterator[Life]:
    starts: list[int] = []  # of `open`, which are disjoint and in order: (end of address, first, last)
    opened: list[tuple[int, int, int]] = []
    for first, last, v in sorted(timed, key=lambda t: (t[0], t[2].offset)):
        low, high = v.offset, v.offset + v.bytes
        i = bisect_right(starts, low) - 1
        i += i < 0 or opened[i][0] <= low
        j = i
        while j < len(starts) and starts[j] < high:
            j += 1
        same = starts[i:j] == [low] and opened[i][0] == high
        born = first
        for start, (end, since, died) in zip(starts[i:j], opened[i:j]):
            if died >= first:  # one memory at one moment
                low, high, last = min(low, start), max(high, end), max(last, died)
                if same:
                    born = since
                    break
            if min(died, first - 1) >= since:  # what was smaller or elsewhere is another buffer from here on
                yield Life(end - start, since, min(died, first - 1))
        starts[i:j], opened[i:j] = [low], [(high, born, last)]
    yield from (Life(end - start, born, died) for start, (end, born, died) in zip(starts, opened))
