"""An HLO module as frozen data."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

from lensjax.verify.hlo.shapes import Shape, arrays, total_bytes
from lensjax.verify.hlo.text import attribute

_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation|select|scatter|comparator)"
    r"=%?([\w.\-]+)"
)
_CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count\\?"?\s*[:=]\s*\{\\?"?n\\?"?\s*:\s*\\?"?(\d+)')


@dataclasses.dataclass(frozen=True)
class Frame:
    """One source line of the user's Python: file, function, line (1-based)."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation. `tail` is the text of its attributes, read on demand; `literal` that of its operands."""

    name: str
    opcode: str
    shape_text: str
    operands: tuple[str, ...]
    literal: str
    tail: str
    computation: str
    root: bool = False

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Arrays of the result, all leaves of a tuple."""
        return arrays(self.shape_text)

    @property
    def is_tuple(self) -> bool:
        return self.shape_text.startswith("(")

    @property
    def bytes(self) -> int:
        return total_bytes(self.shapes)

    def attr(self, key: str) -> str | None:
        """The text of an attribute, or None."""
        return attribute(self.tail, key)

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name of what this came from: "jit(step)/transpose(jvp())/while/body/dot_general"."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.tail)
        return found.group(1) if found else ""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction runs or applies."""
        tail = _without_quotes(self.tail)
        lists = [n.strip().lstrip("%") for text in _CALLED_LISTS.findall(tail) for n in text.split(",") if n.strip()]
        return tuple(dict.fromkeys([*_CALLED.findall(tail), *lists]))

    @functools.cached_property
    def trip_count(self) -> int | None:
        """How often a while loop runs, None where the compiler does not know."""
        found = _TRIPS.search(self.tail)
        return int(found.group(1)) if found else None


def _without_quotes(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text) if '"' in text else text


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, in the order in which they run where the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]
    entry: bool = False

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instruction name -> those that read it."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return {k: tuple(v) for k, v in found.items()}

    @property
    def root(self) -> Instruction | None:
        marked = [i for i in self.instructions if i.root]
        return marked[-1] if marked else (self.instructions[-1] if self.instructions else None)

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions that this one reads, where they are in this computation."""
        for name in instruction.operands:
            if name in self.by_name:
                yield self.by_name[name]


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program of one device. `unread` holds lines that the parser could not read, to be reported."""

    name: str
    computations: Mapping[str, Computation]
    entry_name: str
    devices: int
    header: str
    frames: Mapping[int, tuple[Frame, ...]]
    scheduled: bool
    unread: tuple[str, ...] = ()

    @property
    def entry(self) -> Computation:
        return self.computations[self.entry_name]

    @functools.cached_property
    def aliases(self) -> Mapping[int, int]:
        """Output leaf index -> parameter number, of donated buffers that were re-used."""
        text = attribute(self.header, "input_output_alias") or ""
        pairs = re.findall(r"\{([\d,\s]*)\}:\s*\((\d+)", text)
        return {(int(out.split(",")[0]) if out.strip() else 0): int(arg) for out, arg in pairs}

    @functools.cached_property
    def callers(self) -> Mapping[str, Instruction]:
        """Computation -> an instruction that calls it."""
        return {name: i for c in self.computations.values() for i in c.instructions for name in i.called}

    def instructions(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions

    def stack(self, instruction: Instruction) -> tuple[Frame, ...]:
        """Python frames of an instruction, innermost first; empty where the compiler lost them."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.tail)
        if found and (frames := self.frames.get(int(found.group(1)))):
            return frames
        file = re.search(r'source_file="((?:[^"\\]|\\.)*)"', instruction.tail)
        line = re.search(r"source_line=(\d+)", instruction.tail)
        return (Frame(file.group(1), "", int(line.group(1)) if line else 0),) if file else ()
