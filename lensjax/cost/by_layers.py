"""Prices of a step with many equal layers written out, from two shorter steps (`lensjax.program.folded`).

Seconds and bytes sent grow by the same amount with every layer: what is found so differs from the price of the whole
step by less than a thousandth where only the batch is split, by less than half a percent under tensor parallelism,
whose calls are combined over layers (tests/cost/test_by_layers.py). Bytes held may come out too large: gradients wait
for the call that they are combined into, of COMBINE bytes at most, so that not all layers' wait. `exactly` is the price
of the whole step; what is chosen has it (`lensjax.search.settle`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lensjax._errors import LensjaxError
from lensjax.cost.price import price
from lensjax.cost.pricer import Pricer
from lensjax.plan.plan import Plan, Predicted, Rules
from lensjax.program.folded import PLAIN, TURNS, Apart, Folded, folded
from lensjax.program.program import Program
from lensjax.program.shorten import Short
from lensjax.topology.cluster import Cluster


def pricer_of(program: Program, cluster: Cluster) -> Pricer:
    """What prices many plans of a program in the least time."""
    folds = folded(program), folded(program, PLAIN)
    return Pricer(program, cluster) if None in folds else LayerPricer(program, cluster)


class LayerPricer(Pricer):
    """Prices plans of a step that is folded. Where that cannot be (a plan that says something about single layers, or
    that a shorter step does not take), the whole step is priced."""

    def __init__(self, program: Program, cluster: Cluster):
        super().__init__(program, cluster)
        self.shorter: dict[Apart, Pricer] = {}
        self.longer: dict[Apart, Pricer] = {}
        for apart in (TURNS, PLAIN):
            fold = folded(program, apart)
            assert fold is not None
            self.shorter[apart] = Pricer(fold.shorter.program, cluster)
            self.longer[apart] = Pricer(fold.longer.program, cluster)

    def __call__(self, plan: Plan) -> Plan:
        found = None if self.is_known(plan) else self._by_layers(plan)
        return super().__call__(plan) if found is None else dataclasses.replace(plan, predicted=found)

    def _fold(self, plan: Plan) -> tuple[Apart, Folded]:
        """The two steps that tell of a plan."""
        apart = TURNS if _ruled(plan) else PLAIN
        fold = folded(self.program, apart)
        assert fold is not None
        return apart, fold

    def _by_layers(self, plan: Plan) -> Predicted | None:
        """None where the two steps do not tell."""
        apart, fold = self._fold(plan)
        few, more = (restricted(plan, s, self.program) for s in (fold.shorter, fold.longer))
        if few is None or more is None:
            return None
        try:
            few, more = self.shorter[apart](few).predicted, self.longer[apart](more).predicted
        except LensjaxError:  # the whole step says why
            return None
        assert few is not None and more is not None
        return further(few, more, fold)

    def exactly(self, plan: Plan) -> Plan:
        """The plan with the price of the whole step. It is seldom asked for: nothing is kept for other plans."""
        return self.known(plan, lambda p: price(self.program, p, self.cluster))

    def constraints(self, plan: Plan) -> int:
        apart, fold = self._fold(plan)
        own = restricted(plan, fold.longer, self.program)
        try:
            return self.longer[apart].constraints(own) if own is not None else super().constraints(plan)
        except LensjaxError:
            return super().constraints(plan)


def exact(pricer: Pricer) -> Pricer:
    """A pricer that prices whole steps, with what another one knows of them."""
    if not isinstance(pricer, LayerPricer):
        return pricer
    other = Pricer(pricer.program, pricer.cluster)
    other.share(pricer)
    return other


def restricted(plan: Plan, short: Short, program: Program) -> Plan | None:
    """A plan of the whole step as one of a shorter step: without what it says of layers that are gone. None where
    that is not possible: it says something else of them."""
    path = lambda i: program.arguments[i].path
    pairs = [(path(gone), path(i)) for gone, i in short.like.items()]
    if plan.layers or plan.host or plan.reduce or plan.secondary or plan.prefetch or set(plan.gather) - {"", "*"}:
        return None
    if any(plan.leaves.get(a) != plan.leaves.get(b) for a, b in pairs):
        return None
    paths = {a.path for a in short.program.arguments}
    names = set(short.program.logical.names) if _ruled(plan) else set()
    keep = lambda rules: {n: m for n, m in rules.items() if n in names or n == "batch"}
    rules = Rules(**{f.name: keep(getattr(plan.rules, f.name)) for f in dataclasses.fields(Rules)})
    return plan.replace(rules=rules, leaves={p: s for p, s in plan.leaves.items() if p in paths})


def expanded(plan: Plan, fold: Folded) -> Plan:
    """A plan of the longer step as one of the whole step: layers that it lacks are split like the one that plays their
    part."""
    whole, own = fold.program.arguments, fold.longer.program.arguments
    leaves, twins = dict(plan.leaves), dict[str, list[str]]()
    for gone, k in sorted(fold.like.items()):
        path, like = whole[gone].path, own[k].path
        twins.setdefault(_inner(like), []).append(_inner(path))
        if like in plan.leaves:
            leaves[path] = plan.leaves[like]

    def every(rules: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        out: dict[str, tuple[str, ...]] = {}
        for name, mesh in rules.items():
            stem, bracket, rest = name.partition("[")  # a logical axis is named by an argument that has it
            out.update({n: mesh for n in (name, *(t + bracket + rest for t in twins.get(stem, ())))})
        return out

    rules = Rules(**{f.name: every(getattr(plan.rules, f.name)) for f in dataclasses.fields(Rules)})
    return plan.replace(rules=rules, leaves=leaves)


def _inner(path: str) -> str:
    return path.partition("/")[2] or path


def _ruled(plan: Plan) -> bool:
    return bool({n for f in dataclasses.fields(Rules) for n in getattr(plan.rules, f.name)} - {"batch"})


def further(few: Predicted, more: Predicted, fold: Folded) -> Predicted:
    """What the whole step takes, from what the two shorter ones do."""
    n = fold.further

    def grown(a: float, b: float) -> float:
        return b + n * (b - a)

    def each(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {k: max(0.0, grown(a.get(k, 0.0), b.get(k, 0.0))) for k in {**a, **b}}

    note = "priced by a few of its equal layers, which all the others are like: seconds are close, its peak an estimate"
    return Predicted(
        step_s=grown(few.step_s, more.step_s),
        peak_bytes=grown(few.peak_bytes, more.peak_bytes),
        tiers=each(few.tiers, more.tiers),
        detail=each(few.detail, more.detail),
        memory=each(few.memory, more.memory),
        findings=(*more.findings, note),
    )
