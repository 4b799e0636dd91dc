"""What pipeline stages would gain: priced beside the choice, never chosen, since no executor runs them yet.

The inner model prices stages. Where the partitioner found that it takes a plan without stages for too fast or too
small, its prices of pipelines are raised by as much, so that the two compare.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from lensjax._errors import PlanError
from lensjax.plan.plan import Micro, Plan
from lensjax.search.pipeline import Pipelined, Pricing, scaled
from lensjax.search.problem import Problem
from lensjax.search.reading import solution_of

# A pipeline that gains less than this part of a step is not worth telling.
GAIN = 0.01
# By how much stages with meshes of their own may undercut the estimate that they are left out by.
SLACK = 0.01
# No more stages are tried.
MOST_STAGES = 64


@dataclasses.dataclass(frozen=True)
class Scale:
    """What the partitioner predicts over what the inner model does, for one plan: seconds, and bytes (never below one:
    the model's packing of memory is the tighter)."""

    seconds: float = 1.0
    bytes: float = 1.0


def scale_of(problem: Problem, plans: Iterable[Plan]) -> Scale:
    """The scale of the first plan that the model knows: no recompute levels of its own, the batch at once."""
    for plan in plans:
        if plan.predicted is None or plan.layers or plan.micro != Micro():
            continue
        solution = solution_of(problem, plan)
        if solution is not None and solution.seconds > 0:
            p = plan.predicted
            return Scale(p.step_s / solution.seconds, max(1.0, p.peak_bytes / solution.bytes))
    return Scale()


def pipelines(
    problem: Problem,
    best_s: float,
    plans: Sequence[Plan] = (),
    progress: Callable[[str], None] | None = None,
) -> tuple[Pipelined, ...]:
    """Pipelines that fit the problem's memory and are more than GAIN faster than `best_s` seconds (infinite: any that
    fits), fastest first: for more and more stages the best, where it is faster than those of fewer stages. `plans`:
    priced ones without stages, to compare with (see `scale_of`).

    Empty where there is none, and for steps that cannot be cut: without a backward, with a mesh of their own, or too
    few layers; and for clusters whose parts are not alike."""
    try:
        pricing = Pricing(problem)
    except PlanError:
        return ()
    found: list[Pipelined] = []
    scale, wanted = scale_of(problem, plans), best_s / (1 + GAIN)
    for stages in pricing.counts():
        if not 1 < stages <= MOST_STAGES or problem.stop():
            continue
        most = max(_micro_batches(problem, stages), default=0)
        if not most or pricing.floor(stages, most) * scale.seconds > wanted:
            continue
        if progress is not None:
            progress(f"{stages} pipeline stages")
        best = best_of(pricing, stages, scale, wanted)
        if best is not None:
            found.append(best)
            wanted = min(wanted, best.step_s)
    return tuple(sorted(found, key=lambda f: f.step_s))


def best_of(pricing: Pricing, stages: int, scale: Scale = Scale(), beat: float = math.inf) -> Pipelined | None:
    """The fastest number of micro-batches for so many stages that fits; None where none does in less than `beat`
    seconds."""
    problem, best = pricing.problem, None
    for micro in _micro_batches(problem, stages):
        wanted = best.step_s if best is not None else beat
        if pricing.floor(stages, micro) * scale.seconds >= wanted:
            continue
        if pricing.estimate(stages, micro) * scale.seconds * (1 - SLACK) >= wanted:
            continue
        made = pricing.price(stages, micro, problem.memory / scale.bytes, wanted / scale.seconds)
        made = scaled(made, scale.seconds, scale.bytes) if made is not None else None
        if made is not None and made.step_s < wanted:
            best = made
    return best


def _micro_batches(problem: Problem, stages: int) -> list[int]:
    """Numbers of micro-batches that fill a pipeline: the stages, or one, times a power of two, and those that leave a
    power of two of examples in each."""
    size = problem.program.batch.size
    powers = [2**i for i in range(size.bit_length())]
    counts = {*(stages * p for p in powers), *powers, *(size // p for p in powers if size % p == 0)}
    return sorted(m for m in counts if stages <= m <= size and size % m == 0)
