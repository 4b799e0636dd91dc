"""What the head in chunks would save, where logits dominate the memory: a proposal, never done unasked."""

from __future__ import annotations

import dataclasses

from lensjax._errors import BatchError, PlanError
from lensjax.cost.levels import share_of
from lensjax.passes.chunks import head_of
from lensjax.passes.share_sizes import splits
from lensjax.plan.plan import Plan
from lensjax.program.head import Head, NoHead
from lensjax.program.program import Program
from lensjax.report.units import duration, size
from lensjax.search.choose import Choice

DOMINATE = 0.1  # of the peak: what one value of the logits' shape takes of it before it is worth a word
GAIN = 0.05  # of the peak: what the chunks must save
PARTS = (4, 8, 16)  # tried in this order, for as long as the peak falls by more than a hundredth: each costs time


@dataclasses.dataclass(frozen=True)
class Chunked:
    """`plan`: the chosen plan with its head in chunks, priced; None where it cannot be, for `reason`. `logits`: bytes
    per device of one value of their shape; `saved`: bytes of the peak; `slower`: seconds per step."""

    logits: float
    plan: Plan | None
    saved: float = 0.0
    slower: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        found = f"logits take {size(self.logits)} per device, several times"
        if self.plan is None:
            return f"{found}; they cannot be computed in chunks: {self.reason}"
        more = f"{duration(abs(self.slower))} {'longer' if self.slower > 0 else 'shorter'}"
        return (
            f"{found}: with the head in {self.plan.chunks} chunks (plan.replace(chunks={self.plan.chunks})) the peak "
            f"is {size(self.saved)} less, and a step takes {more}"
        )


def proposal(program: Program, choice: Choice) -> Chunked | None:
    """The chosen plan with its head in chunks; None where logits take little, or where it saves little."""
    plan, predicted = choice.plan, choice.plan.predicted
    if predicted is None or choice.pricer is None or plan.chunks > 1 or splits(plan):
        return None
    head = head_of(program, plan)
    values = head.large if isinstance(head, Head) else [head.logits] if head.logits is not None else []
    logits = max(map(share_of(program, plan), values), default=0.0)
    if logits < DOMINATE * predicted.peak_bytes:
        return None
    if isinstance(head, NoHead):
        return Chunked(logits, None, reason=head.reason)
    try:
        made = _least(choice, [n for n in PARTS if head.length % n == 0])
    except (PlanError, BatchError) as e:
        return Chunked(logits, None, reason=e.message)
    if made is None or made.predicted is None:
        return Chunked(logits, None, reason=f"their {head.length} positions do not divide by {PARTS[0]}")
    saved = predicted.peak_bytes - made.predicted.peak_bytes
    if saved < GAIN * predicted.peak_bytes:
        return None
    return Chunked(logits, made, saved, made.predicted.step_s - predicted.step_s)


def _least(choice: Choice, parts: list[int]) -> Plan | None:
    best: Plan | None = None
    for n in parts:
        made = choice.what_if(choice.plan.replace(chunks=n))
        if best is not None and made.predicted.peak_bytes > 0.99 * best.predicted.peak_bytes:  # type: ignore[union-attr]
            break
        best = made
    return best
