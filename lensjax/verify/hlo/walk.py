"""How often each computation runs in one step: through calls, fusions, branches, and loops times their trip count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lensjax.verify.hlo.module import Module
from lensjax.verify.hlo.trips import trip_count

# The computation of an asynchronous operation is named by its start and again by its update and done.
_SECOND_MENTION = ("async-update", "async-done")


@dataclasses.dataclass(frozen=True)
class Runs:
    """`times`: computation -> runs per step (0 = never reached). `loops`: names of loops whose trip count is not known
    and was taken as 1. `branches`: computations reached only through a conditional (each counted as if it were taken).
    `parallel`: computations of asynchronous operations; `fused`: computations of fusions.
    """

    times: Mapping[str, int]
    loops: tuple[str, ...]
    branches: frozenset[str]
    parallel: frozenset[str]
    fused: frozenset[str]


def runs(module: Module) -> Runs:
    """Runs per step of every computation, from the entry down."""
    times = dict.fromkeys(module.computations, 0)
    times[module.entry_name] = 1
    loops: list[str] = []
    branches: set[str] = set()
    parallel: set[str] = set()
    fused: set[str] = set()
    for name in _callers_first(module):
        for instruction in module.computations[name].instructions:
            if not instruction.called or instruction.opcode in _SECOND_MENTION or not times[name]:
                continue
            trips = 1
            if instruction.opcode == "while":
                known = trip_count(module, module.computations[name], instruction)
                trips = 1 if known is None else known
                if known is None:
                    loops.append(instruction.name)
            for called in instruction.called:
                if called not in times:
                    continue
                times[called] += times[name] * trips
                if instruction.opcode == "conditional" or name in branches:
                    branches.add(called)
                if instruction.opcode.endswith("-start") or name in parallel:
                    parallel.add(called)
                if instruction.opcode == "fusion" or name in fused:
                    fused.add(called)
    return Runs(times, tuple(loops), frozenset(branches), frozenset(parallel), frozenset(fused))


def _callers_first(module: Module) -> list[str]:
    """Computations in an order in which every caller comes before what it calls (HLO has no recursion)."""
    order: list[str] = []
    state: dict[str, int] = {}
    todo: list[tuple[str, bool]] = [(module.entry_name, False)]
    while todo:
        name, finished = todo.pop()
        if finished:
            order.append(name)
            continue
        if state.get(name):
            continue
        state[name] = 1
        todo.append((name, True))
        for instruction in module.computations[name].instructions:
            todo.extend((c, False) for c in instruction.called if c in module.computations and not state.get(c))
    return order[::-1]


def is_collective_name(opcode: str) -> bool:
    """True for opcodes that talk to other devices, known or not."""
    words = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective")
    return opcode in ("send", "recv") or any(w in opcode for w in words)
