"""The last word on what is chosen: a plan priced by its layers (`lensjax.cost.by_layers`) is priced as it runs.

Many plans are compared by the cheaper price; only the best one needs the other, and those before it that may fit.
Should that differ, the next best is asked, until the best is one whose price is that of the whole step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lensjax.cost.by_layers import LayerPricer
from lensjax.cost.pricer import Pricer
from lensjax.search.candidates import Candidate, preferred, rank

# What holds so much more than there is by the cheaper price holds too much by the other.
NEAR = 1.05


def settled(
    candidates: Sequence[Candidate],
    pricer: Pricer,
    limit: float,
    progress: Callable[[str], None] | None = None,
) -> list[Candidate]:
    """The candidates, best first; the one to choose within `limit` bytes, and what is faster and holds hardly more, are
    exactly priced."""
    out = sorted(candidates, key=rank)
    while isinstance(pricer, LayerPricer):
        best = preferred(out, limit)
        until = out.index(best) if best is not None else len(out)
        ask = [best, *(c for c in out[:until] if c.fits(NEAR * limit))]
        guessed = next((c for c in ask if c and c.plan is not None and not pricer.is_known(c.plan)), None)
        if guessed is None or guessed.plan is None:
            break
        if progress is not None:
            progress(f"{guessed.name}, all layers")
        exact = dataclasses.replace(guessed, plan=pricer.exactly(guessed.plan))
        out = sorted((exact if c is guessed else c for c in out), key=rank)
    return out
