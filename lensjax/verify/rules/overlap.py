"""Collectives that compute waits for although other work is at hand."""

from __future__ import annotations

from collections.abc import Iterator

from lensjax.verify.finding import Case, Finding, size
from lensjax.verify.hlo import Computation
from lensjax.verify.lines import where
from lensjax.verify.timeline import COMPUTE, Block
from lensjax.verify.traffic import step_bytes

_WORTH = 0.05  # part of a step that moving one collective has to save


def could_move(case: Case) -> Iterator[Finding]:
    """A collective on the critical path, with later work that does not need it and could run meanwhile.

    A note: the order is the compiler's, and the times are estimates.
    """
    if case.timeline is None or not case.timeline.step:
        return
    waited, took = _seconds(case.timeline.block)
    best: tuple[float, Finding] | None = None
    for c in case.found.collectives:
        if waited.get(c.name, 0.0) <= 0.0:
            continue
        computation = case.module.computations[c.computation]
        free = sum(took.get(name, 0.0) for name in _independent_later(computation, c.name))
        gain = c.trips * min(waited[c.name], free)
        if gain > _WORTH * case.timeline.step and (best is None or gain > best[0]):
            best = gain, Finding(
                "could_move", "note", where(c.stack), step_bytes(c),
                f"compute waits {c.trips * waited[c.name] * 1e3:.3g} ms per step for this {c.kind} "
                f"({size(step_bytes(c))}), and {gain * 1e3:.3g} ms of later work in the same body does not need it",
                "a scheduler that hides latency moves it: --xla_gpu_enable_latency_hiding_scheduler=true",
            )  # fmt: skip
    if best is not None:
        yield best[1]


def _seconds(block: Block) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds that compute waits for each collective, seconds of each compute instruction), in one run of its body."""
    waited: dict[str, float] = {}
    took: dict[str, float] = {}
    todo = [block]
    while todo:
        at = todo.pop()
        for event in at.events:
            (took if event.stream == COMPUTE else waited)[event.name] = (
                event.seconds if event.stream == COMPUTE else event.waited
            )
        todo.extend(inner for _, inner, _ in at.inner)
    return waited, took


def _independent_later(computation: Computation, start: str) -> Iterator[str]:
    """Names of the instructions after the end of a collective that do not depend on it."""
    needs, ended = {start}, False
    for instruction in computation.instructions:
        if instruction.name == start:
            ended = not instruction.opcode.endswith("-start")
        elif needs & set(instruction.operands):
            needs.add(instruction.name)
            ended = ended or (instruction.opcode.endswith("-done") and start in instruction.operands)
        elif ended:
            yield instruction.name
