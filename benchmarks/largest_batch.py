"""How much larger the batch may be in the memory that keeping everything takes, compiled for H100.

    python benchmarks/largest_batch.py [--models gpt-scan gpt-unrolled vit moe mamba unet] [--json]

For each model: the memory is what XLA's own compiler for the cluster's device (extra gpu-aot) takes for the step that
keeps everything at a batch of `START`. Allowed is what takes at most 5 % more time for each sample than keeping
everything. How far the batch goes is read from the figures of the levels; for that batch `lensjax.search.levels`
chooses levels that fit the memory, and the step is compiled. What is told are the compiled figures: peak, seconds of
the schedule, FLOPs and bytes. Where these are not what was predicted, it is tried again with the limits moved by the
difference. `uniform` is full recompute (every layer at `inputs`) at the same batch. One device; needs none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.memory_models import MODELS
from benchmarks.remat_table import compiled
from lensjax._units import size
from lensjax.cost.levels import groups, stacked
from lensjax.cost.price import price
from lensjax.plan.plan import Plan
from lensjax.program.program import Program, analyze
from lensjax.search.levels import cheapest, levels, measured, on_device
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster

START = {"gpt-scan": 32, "gpt-unrolled": 32, "vit": 256, "moe": 32, "mamba": 16, "unet": 32}
SLOWER = 0.05  # time for each sample that a larger batch may cost
FINEST = 1 / 16  # of the batch: the step at which bisection ends
MOST = 16  # times the batch
TRIES = 7  # compiles of one model, the first step not counted


@dataclasses.dataclass(frozen=True)
class Choice:
    """A batch with the plan chosen for it."""

    batch: int
    program: Program
    plan: Plan

    @property
    def seconds(self) -> float:
        """Predicted, for each sample."""
        assert self.plan.predicted is not None
        return self.plan.predicted.step_s / self.batch


def program(name: str, batch: int) -> Program:
    step, *arguments = MODELS[name](batch)
    return analyze(step, tuple(arguments))


class Reach:
    """How far the batch goes: the figures of the levels at one batch, taken to grow with it. What parameters and
    optimizer hold does not."""

    def __init__(self, start: Choice, cluster: Cluster):
        predicted = start.plan.predicted
        assert predicted is not None
        plain = start.plan.replace(layers={})
        priced = lambda layers: price(start.program, plain.replace(layers=layers), cluster)
        found = groups(start.program, start.plan, cluster)
        self.outside = predicted.peak_bytes - sum(g.options[0].kept * g.count for g in found)
        found = measured(found, start.plan, priced)
        self.found = [stacked(g) for g in on_device(found)]
        self.fixed = sum(predicted.memory.get(k, 0.0) for k in ("parameter", "optimizer"))
        self.start, self.seconds = start.batch, predicted.step_s

    def batch(self, memory: float, slower: float) -> int:
        """The largest batch that is predicted to fit `memory` bytes at `slower` more time for each sample."""
        unit = max(1, round(self.start * FINEST))
        best = self.start
        for batch in range(self.start, MOST * self.start + 1, unit):
            allowed = self.fixed + (memory - self.fixed) * self.start / batch
            picked = cheapest([g.options for g in self.found], allowed - self.outside)
            if picked is None:
                break
            if sum(g.options[k].seconds for g, k in zip(self.found, picked)) <= slower * self.seconds:
                best = batch
        return best


def row(name: str, cluster: Cluster) -> dict[str, Any]:
    p = program(name, START[name])
    start = Choice(START[name], p, price(p, preset("dp", p, 1), cluster))
    whole = compiled(p, start.plan, cluster)
    assert start.plan.predicted is not None
    reach, memory = Reach(start, cluster), float(whole["peak"])
    limit, low, high = SLOWER, 0.0, math.inf  # of the predicted time: tried now, too little, too much
    best, kept, tries = start, whole, []
    for _ in range(TRIES):
        batch = reach.batch(memory, limit)
        p = program(name, batch)
        plan = levels(p, preset("dp", p, 1), cluster, memory)
        if plan is None:
            memory *= 0.97
            continue
        made = compiled(p, plan, cluster)
        slower = made["step_s"] / batch / (whole["step_s"] / start.batch) - 1
        fits = made["peak"] <= whole["peak"]
        tries.append((batch, made["peak"], slower))
        print(name, tries[-1], dict(plan.layers), file=sys.stderr, flush=True)
        if fits and slower <= SLOWER and batch > best.batch:
            best, kept = Choice(batch, p, plan), made
        if slower <= SLOWER and fits and (slower > 0.8 * SLOWER or batch >= MOST * start.batch):
            break
        if not fits or made["peak"] < 0.97 * whole["peak"]:
            memory *= 0.995 * whole["peak"] / made["peak"]
        low, high = (max(low, limit), high) if slower <= SLOWER else (low, min(high, limit))
        if fits or slower > SLOWER:
            limit = (low + high) / 2 if high < math.inf else 2 * limit
    made, slower = kept, kept["step_s"] / best.batch / (whole["step_s"] / start.batch) - 1
    uniform = price(best.program, preset("dp", best.program, 1).replace(layers={"*": "inputs"}), cluster)
    assert start.plan.predicted and best.plan.predicted and uniform.predicted
    return {
        "model": name,
        "start": start.batch,
        "batch": best.batch,
        "gain": best.batch / start.batch,
        "layers": dict(best.plan.layers),
        "memory": whole["peak"],
        "planned_start": start.plan.predicted.peak_bytes,
        "peak": made["peak"],
        "planned": best.plan.predicted.peak_bytes,
        "time": slower,
        "predicted_time": best.seconds / start.seconds - 1,
        "flops": made["flops"] / best.batch / (whole["flops"] / start.batch) - 1,
        "bytes": made["bytes"] / best.batch / (whole["bytes"] / start.batch) - 1,
        "uniform": uniform.predicted.step_s / best.plan.predicted.step_s - 1,
        "uniform_peak": uniform.predicted.peak_bytes,
        "tries": tries,
    }


def show(r: dict[str, Any]) -> None:
    print(
        f"{r['model']:13} {r['start']:4} -> {r['batch']:4}  {r['gain']:.2f}x  peak {size(r['peak'])} (planned "
        f"{size(r['planned'])}) of {size(r['memory'])} (planned {size(r['planned_start'])})  time {r['time']:+.1%} "
        f"(predicted {r['predicted_time']:+.1%}) FLOPs {r['flops']:+.1%} bytes {r['bytes']:+.1%}  uniform "
        f"{r['uniform']:+.1%} at {size(r['uniform_peak'])}  {r['layers']}  {r['tries']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cluster", default="dgx-h100:1")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cluster, table = Cluster.parse(args.cluster), []
    for name in args.models:
        table.append(row(name, cluster))
        if not args.json:
            show(table[-1])
    if args.json:
        print(json.dumps({"schema": 1, "rows": table}))
    else:
        print(f"median {statistics.median(r['gain'] for r in table):.2f}x")


if __name__ == "__main__":
    main()
