"""Choosing: every preset that applies is priced by one scorer, and the fastest that fits is taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from lensjax._errors import BatchError, DoesNotFit, PlanError
from lensjax._units import size
from lensjax.cost.price import price
from lensjax.passes.shardings import resolve, ways
from lensjax.plan.grammar import AXES
from lensjax.plan.levels import parse
from lensjax.plan.pins import Pin, check_applicable
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.search.levels import levels
from lensjax.search.presets import enumerate_presets, pinnable, preset
from lensjax.topology.cluster import Cluster

# Plans that do not fit, fastest first, that are tried with recompute and offload.
RECOMPUTED = 3


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan with its price (`plan.predicted`), or the reason why it does not apply."""

    name: str
    plan: Plan | None
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Predicted seconds per step; infinite where the plan does not apply."""
        return self.plan.predicted.step_s if self.plan is not None and self.plan.predicted else float("inf")

    def fits(self, memory: float) -> bool:
        return self.plan is not None and self.plan.predicted is not None and self.plan.predicted.peak_bytes <= memory


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen plan and everything it was compared with, best first. `memory`: bytes per device that were allowed."""

    plan: Plan
    candidates: tuple[Candidate, ...]
    memory: float


def price_all(
    program: Program,
    makers: Iterable[tuple[str, Callable[[], Plan]]],
    cluster: Cluster,
    progress: Callable[[str], None] | None = None,
) -> list[Candidate]:
    """Prices named plans in turn; what does not apply keeps its reason."""
    out = []
    for name, make in makers:
        if progress is not None:
            progress(name)
        try:
            out.append(Candidate(name, price(program, make(), cluster)))
        except (PlanError, BatchError) as e:
            out.append(Candidate(name, None, e.message))
    return out


def tier_names(cluster: Cluster) -> dict[int, str]:
    return {t.size: t.name for t in cluster.tiers}


def choose(
    program: Program,
    cluster: Cluster,
    *,
    memory: float | None = None,
    pins: Sequence[Pin] = (),
    progress: Callable[[str], None] | None = None,
) -> Choice:
    """The fastest preset that fits `memory` bytes per device (the device's own where not given).

    Raises DoesNotFit, with what binds and the nearest plan, when none does.
    """
    check_applicable(pins, {a.path: a.shape for a in pinnable(program)}, AXES)
    limit = cluster.device.memory if memory is None else memory
    names = enumerate_presets(cluster.devices, [t.size for t in cluster.tiers])
    tiers = tier_names(cluster)
    makers = [(n, lambda n=n: preset(n, program, cluster.devices, pins=pins, tier_of=tiers)) for n in names]
    candidates = sorted(price_all(program, makers, cluster, progress), key=_rank)
    candidates = sorted([*candidates, *_with_levels(program, candidates, cluster, limit)], key=_rank)
    fitting = [c for c in candidates if c.fits(limit)]
    if not fitting:
        raise nothing_fits(program, candidates, limit)
    best = fitting[0].plan
    assert best is not None
    return Choice(best, tuple(candidates), limit)


def _with_levels(program: Program, candidates: Sequence[Candidate], cluster: Cluster, limit: float) -> list[Candidate]:
    """The fastest plans that do not fit, with levels under which they do; those slower than one that fits are left."""
    best = min((c.step_s for c in candidates if c.fits(limit)), default=math.inf)
    out = []
    for c in [c for c in candidates if c.plan is not None and not c.fits(limit) and c.step_s < best][:RECOMPUTED]:
        assert c.plan is not None
        made = levels(program, c.plan, cluster, limit)
        if made is not None:
            kinds = "+".join(sorted({p.kind for text in made.layers.values() for p in parse(text)}))
            out.append(Candidate(f"{c.name} {kinds}", made))
    return out


def _rank(candidate: Candidate) -> tuple[float, float]:
    """The faster first, and of two that are equally fast the one that holds less."""
    p = candidate.plan.predicted if candidate.plan is not None else None
    return candidate.step_s, p.peak_bytes if p is not None else math.inf


def nothing_fits(program: Program, candidates: Sequence[Candidate], limit: float) -> Exception:
    """The error for a step that no candidate makes fit: what binds, by how much, and the nearest plan."""
    applicable = [c for c in candidates if c.plan is not None]
    if not applicable:
        names: dict[str, list[str]] = {}
        for c in candidates:
            names.setdefault(c.reason, []).append(c.name)
        if len(names) == 1:
            return PlanError(f"no plan applies to this step: {next(iter(names))}")
        reasons = "\n".join(f"  {', '.join(who)}: {reason}" for reason, who in names.items())
        return PlanError(f"no plan applies to this step:\n{reasons}")
    nearest = min(applicable, key=lambda c: c.plan.predicted.peak_bytes)  # type: ignore[union-attr]
    plan = nearest.plan
    assert plan is not None and plan.predicted is not None
    over = plan.predicted.peak_bytes - limit
    parts = sorted(((k, v) for k, v in plan.predicted.memory.items() if k != "host"), key=lambda kv: -kv[1])
    parts_held = ", ".join(f"{k} {size(v)}" for k, v in parts if v > 0)
    largest = "\n".join(f"    {path}: {size(held)}" for path, held in largest_leaves(program, plan))
    return DoesNotFit(
        f"nothing fits {size(limit)} per device. The nearest plan is {nearest.name}: "
        f"peak {size(plan.predicted.peak_bytes)}, {size(over)} too much.\n  it holds: {parts_held}\n"
        f"  the largest state tensors per device:\n{largest}",
        hint="use more devices, a smaller batch or sequence, or recompute (jax.checkpoint / nn.remat around the "
        "layers); "
        f'plan="{nearest.name}" runs it all the same',
    )


def largest_leaves(program: Program, plan: Plan, count: int = 5) -> list[tuple[str, float]]:
    """(path, bytes per device) of the largest tensors of the state under a plan."""
    sizes = []
    for a, spec in zip(program.arguments, resolve(program, plan).arguments):
        if a.role != "batch":
            sizes.append((a.path, a.nbytes / math.prod(ways(plan, axes) for axes in spec)))
    return sorted(sizes, key=lambda x: -x[1])[:count]
