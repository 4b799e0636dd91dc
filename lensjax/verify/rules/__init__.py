"""What can be wrong with a compiled step: one function a fault, each from a Case to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lensjax.verify.finding import SEVERITIES, Case, Finding
from lensjax.verify.rules.batch import batch_lost, padding, repeated_work
from lensjax.verify.rules.gathers import gather_hoisted, gathered_twice, gathered_whole
from lensjax.verify.rules.memory import involuntary, near_full, remat_undone
from lensjax.verify.rules.overlap import could_move
from lensjax.verify.rules.reshard import axis_order, lookup_exchanged, resharded
from lensjax.verify.rules.state import left_replicated, not_donated, optimizer_replicated
from lensjax.verify.rules.wire import sliced_after, wide_wire

RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    batch_lost, repeated_work, padding, gathered_whole, gather_hoisted, gathered_twice, resharded, lookup_exchanged,
    axis_order, wide_wire, sliced_after, not_donated, optimizer_replicated, left_replicated, near_full, remat_undone,
    involuntary, could_move,
)  # fmt: skip


def findings(case: Case) -> tuple[Finding, ...]:
    """Everything that the rules find, worst first."""
    found = [f for rule in RULES for f in rule(case)]
    return tuple(sorted(found, key=lambda f: (SEVERITIES.index(f.severity), -f.bytes)))
