"""The price of a step whose layers are cut into pipeline stages.

Stage s of S runs on part s of S equal parts of the cluster; micro-batches go through the stages one after the other,
one forward and one backward at a time (1F1B, PipeDream-flush). From Narayanan et al. 2021 (SC '21, arXiv:2104.04473,
section 2.2), for stages that need not be equal:

    step = sum of t_s + 2 * sum of p_b + (m - 1) * max(t_s, p_b) + max of u_s
    held by stage s = state + gradients in float32 + one micro-batch at work + (min(m, S - s) - 1) * what one keeps

t_s is a micro-batch's forward and backward in stage s. p_b is what crosses from part b to the next: activations one
way, their gradients the other, at the same time and beside the work of other micro-batches. u_s is what a stage does
once, after its last micro-batch: the part of the gradients' reduction that the last backward does not hide, and the
optimizer. For equal stages and no sends the first and third terms are (m - 1 + S) t: a bubble of (S - 1) / m of the
work, as in that section. One stage and one micro-batch are the inner model's own price.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lensjax._errors import ClusterError
from lensjax._units import duration, size
from lensjax.plan.plan import Pipeline
from lensjax.search.cuts import partition
from lensjax.search.line import Span
from lensjax.search.problem import Problem
from lensjax.search.stages import Placed, Run, Stages
from lensjax.topology.parts import joints, part

SCHEDULE = "1f1b"


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A plan with stages and what the search's model says of it. `pipeline.sizes`: units (scanned layers, or pieces
    between narrow places of an unrolled step) of each stage; `devices` of each stage; `micro` micro-batches. Seconds
    per step, bytes of the device that holds most; `sends`: seconds of one send across each boundary. `bubble`: part of
    the step in which the slowest stage waits."""

    pipeline: Pipeline
    devices: int
    micro: int
    stages: tuple[Placed, ...]
    sends: tuple[float, ...]
    step_s: float
    peak_bytes: float
    bubble: float

    def __str__(self) -> str:
        return (
            f"{self.pipeline.stages} stages x {self.devices} device{'s' if self.devices > 1 else ''}, "
            f"{self.micro} micro-batches, {self.pipeline.schedule}: {duration(self.step_s)} per step, "
            f"bubble {self.bubble:.0%}, peak {size(self.peak_bytes)} per device"
        )


def step_seconds(micro: Sequence[float], sends: Sequence[float], once: Sequence[float], count: int) -> float:
    """Seconds of a step by the module's formula. micro, once: t_s and u_s; sends: p_b; count: m."""
    return sum(micro) + 2 * sum(sends) + (count - 1) * _period(micro, sends) + max(once)


def bubble(micro: Sequence[float], sends: Sequence[float], count: int) -> float:
    """The part of a step's micro-batches in which the slowest stage does nothing: (S-1)/(m+S-1) where all are equal."""
    total = step_seconds(micro, sends, (0.0,), count)
    return 1 - count * max(micro) / total if total else 0.0


def in_flight(stage: int, stages: int, count: int) -> int:
    """Micro-batches that stage `stage` (from 0) holds at most: it is as many forwards ahead as stages follow it."""
    return min(count, stages - stage)


def _period(micro: Sequence[float], sends: Sequence[float]) -> float:
    return max((*micro, *sends))


class Pricing:
    """Prices pipelines of one problem: how many stages, how many micro-batches."""

    def __init__(self, problem: Problem):
        self.problem = problem.written_out
        self.stages = Stages(self.problem)
        self.units, self.seconds = self.stages.line.units()
        self._sizes: dict[int, tuple[int, ...]] = {}

    def counts(self) -> list[int]:
        """Numbers of stages that the step and the cluster allow, one among them."""
        return [s for s in range(1, len(self.units) + 1) if self._parts(s)]

    def _parts(self, count: int) -> bool:
        if self.problem.cluster.devices % count:
            return False
        try:
            part(self.problem.cluster, count)
        except ClusterError:
            return False
        return True

    def floor(self, count: int, micro: int) -> float:
        """Seconds that no pipeline of so many stages undercuts: its kernels without what they send, and the bubble."""
        whole = float(self.seconds.sum()) * count / self.problem.cluster.devices / micro
        return whole * self._slots(count, micro)

    def estimate(self, count: int, micro: int) -> float:
        """About the seconds of a pipeline whose stages all have one mesh and send nothing: what the whole step takes on
        a part, shared out."""
        return self.stages.whole(Run(count, micro)) * self._slots(count, micro)

    def sizes(self, count: int) -> tuple[int, ...]:
        """Units of each stage."""
        if count not in self._sizes:
            self._sizes[count] = partition(list(self.seconds), count)
        return self._sizes[count]

    def _slots(self, count: int, micro: int) -> float:
        """Seconds of a step for each second that a micro-batch takes in all stages together."""
        slowest = max(self.stages.line.seconds[a:b].sum() for a, b in self.spans(self.sizes(count)))
        return 1 + (micro - 1) * float(slowest / self.seconds.sum())

    def spans(self, sizes: Sequence[int]) -> list[Span]:
        """The slots of stages with so many units."""
        out, at = [], 0
        for n in sizes:
            out.append((self.units[at][0], self.units[at + n - 1][1]))
            at += n
        return out

    def price(self, count: int, micro: int, memory: float = math.inf, beat: float = math.inf) -> Pipelined | None:
        """The pipeline of `count` stages and `micro` micro-batches, each stage with its best plan that holds at most
        `memory` bytes; None where a stage has none, or where the step takes `beat` seconds for certain."""
        sizes = self.sizes(count)
        placed = []
        for s, span in enumerate(self.spans(sizes)):
            found = self.stages.best(span, Run(count, micro, in_flight(s, count, micro)), memory)
            if found is None:
                return None
            placed.append(found)
            if sum(p.micro_s for p in placed) + (micro - 1) * max(p.micro_s for p in placed) >= beat:
                return None
        sends = self._sends(sizes, placed, micro)
        times = [p.micro_s for p in placed]
        shared = self._shared(sizes)
        once = [p.once_s + shared for p in placed]
        return Pipelined(
            Pipeline(count, SCHEDULE, sizes),
            self.problem.cluster.devices // count,
            micro,
            tuple(placed),
            sends,
            step_seconds(times, sends, once, micro),
            max(p.bytes for p in placed),
            bubble(times, sends, micro),
        )

    def _sends(self, sizes: Sequence[int], placed: Sequence[Placed], micro: int) -> tuple[float, ...]:
        """Seconds of one send across each boundary: every device sends its part to the one in its place."""
        found = []
        links = joints(self.problem.cluster, len(sizes))
        for span, (latency, bandwidth), a, b in zip(self.spans(sizes)[1:], links, placed, placed[1:]):
            nbytes = self.stages.line.crossing[span[0]] / micro / min(a.ways, b.ways)
            found.append(latency + nbytes / bandwidth)
        return tuple(found)

    def _shared(self, sizes: Sequence[int]) -> float:
        """Seconds in which stages that have the same tensor (a tied embedding) add up its gradients, once a step: each
        device sends and receives its part."""
        count = len(sizes)
        if count == 1:
            return 0.0
        names = [
            {a.path: a.nbytes for a in self.stages.stage(span).program.arguments if a.role == "parameter" and a.nbytes}
            for span in self._ends(sizes)
        ]
        stacked = {self.problem.program.arguments[i].path for x in self.problem.program.layers for i in x.parameters}
        both = sum(n for path, n in names[0].items() if path in names[1] and path not in stacked)
        latency, bandwidth = joints(self.problem.cluster, count)[-1]
        return 2 * (latency + both * count / self.problem.cluster.devices / bandwidth) if both else 0.0

    def _ends(self, sizes: Sequence[int]) -> tuple[Span, Span]:
        spans = self.spans(sizes)
        return spans[0], spans[-1]


def scaled(p: Pipelined, seconds: float, bytes_: float) -> Pipelined:
    """The same pipeline with all its seconds and bytes times a factor."""
    stages = tuple(
        dataclasses.replace(s, micro_s=s.micro_s * seconds, once_s=s.once_s * seconds, bytes=s.bytes * bytes_)
        for s in p.stages
    )
    return dataclasses.replace(
        p,
        stages=stages,
        sends=tuple(s * seconds for s in p.sends),
        step_s=p.step_s * seconds,
        peak_bytes=p.peak_bytes * bytes_,
    )
