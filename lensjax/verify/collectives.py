"""Every collective of a compiled step: its kind, among whom, bytes and type, how often, from which line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from lensjax.verify.hlo import Computation, Frame, Instruction, Module
from lensjax.verify.hlo.groups import UnknownGroups, replica_groups, source_target_pairs
from lensjax.verify.hlo.shapes import Shape, total_bytes, unknown_types
from lensjax.verify.hlo.walk import Runs, is_collective_name, runs
from lensjax.verify.lines import origin

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip
_OPCODE = re.compile(rf"^({'|'.join(KINDS)})(-start|-done)?$")


@dataclasses.dataclass(frozen=True, eq=False)
class Collective:
    """One collective operation of a step.

    groups:    int [groups, members], positions in the step's flattened mesh; for a permute int [pairs, 2] (from, to)
    operands:  what one device puts in (several arrays where XLA combined collectives)
    trips:     how often a step runs it
    parallel:  True for a start/done pair, which may overlap with compute
    op_name:   JAX's name of the operation; `stack` its Python frames, innermost first
    """

    name: str
    kind: str
    computation: str
    groups: np.ndarray
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    trips: int
    parallel: bool
    in_branch: bool
    op_name: str
    stack: tuple[Frame, ...]

    @property
    def payload(self) -> int:
        """Bytes that one device puts in, each time."""
        return total_bytes(self.operands)

    @property
    def members(self) -> int:
        """Devices in one group (2 for a permute)."""
        return self.groups.shape[1]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """HLO names of the types on the wire."""
        return tuple(dict.fromkeys(s.dtype for s in self.operands))


@dataclasses.dataclass(frozen=True)
class Found:
    """Collectives of a module, and what was not understood, one sentence each (nothing is dropped in silence)."""

    collectives: tuple[Collective, ...]
    unknown: tuple[str, ...]
    runs: Runs


def collectives(module: Module) -> Found:
    """All collectives of a compiled step, in program order within each computation."""
    counted = runs(module)
    found: list[Collective] = []
    unknown = [f"line not read: {line}" for line in module.unread]
    unknown += [f"loop {name} with an unknown trip count, taken as 1" for name in counted.loops]
    for computation in module.computations.values():
        if counted.times[computation.name]:
            for instruction in computation.instructions:
                found.extend(_read(module, computation, instruction, counted, unknown))
    return Found(tuple(found), tuple(unknown), counted)


def _read(
    module: Module, computation: Computation, instruction: Instruction, counted: Runs, unknown: list[str]
) -> Iterator[Collective]:
    known = _OPCODE.match(instruction.opcode)
    if known is None:
        if is_collective_name(instruction.opcode):
            unknown.append(f"operation {instruction.opcode} {instruction.name}: traffic not counted")
        return
    if known.group(2) == "-done":
        return
    kind = known.group(1)
    try:
        groups = _groups(module, instruction, kind)
    except UnknownGroups as e:
        unknown.append(f"{instruction.name}: {e.message}")
        return
    operands = tuple(s for o in computation.operands(instruction) for s in o.shapes)
    if len(instruction.operands) != sum(1 for _ in computation.operands(instruction)):
        unknown.append(f"{instruction.name}: operands not found")
        return
    for dtype in sorted(unknown_types(instruction.shape_text)):
        unknown.append(f"{instruction.name}: element type {dtype}, counted as 0 bytes")
    op_name, stack = origin(module, computation, instruction)
    yield from (
        Collective(
            instruction.name, kind, computation.name, rows, operands, instruction.shapes,
            trips=counted.times[computation.name],
            parallel=known.group(2) == "-start" or computation.name in counted.parallel,
            in_branch=computation.name in counted.branches,
            op_name=op_name, stack=stack,
        )
        for rows in groups
    )  # fmt: skip


def _groups(module: Module, instruction: Instruction, kind: str) -> list[np.ndarray]:
    """The groups as arrays; several where XLA mixes groups of different sizes in one operation."""
    key = "source_target_pairs=" if kind == "collective-permute" else "replica_groups="
    at = instruction.tail.find(key)
    if at < 0:
        raise UnknownGroups(f"no {key.rstrip('=')} in {instruction.opcode}")
    text = instruction.tail[at + len(key) :]
    if kind == "collective-permute":
        return [source_target_pairs(text)]
    groups = replica_groups(text, module.devices)
    if isinstance(groups, np.ndarray):
        return [groups]
    sizes = sorted({len(g) for g in groups})
    return [np.array([g for g in groups if len(g) == size]) for size in sizes]
