"""Memory against time: what recompute per layer gives, model by model.

    python benchmarks/frontier.py [--models gpt-scan gpt-unrolled vit moe mamba unet] [--cluster dgx-h100:1]
                                  [--picture frontier.png] [--compile] [--json]

For each model the search's frontier (`lensjax.search.levels.frontier`) is priced whole, plan by plan: the peak per
device and the time of a step against the step that keeps everything. `uniform` is full recompute (every layer at
`inputs`). With --compile the last column is the peak that XLA's own compiler for the cluster's device reports. `batch`
is how much larger the batch may be in the memory of the step that keeps everything, at no more than 5 % more time for
each sample: activations grow with the batch, the rest does not. Needs no device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from lensjax._units import size
from lensjax.cost.levels import groups
from lensjax.cost.price import price
from lensjax.models.targets import target
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.plan import Plan
from lensjax.program.program import Program, analyze
from lensjax.search.levels import frontier
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from lensjax.verify import compile_for

SLOWER = 0.05  # time for each sample that a larger batch may cost
GPT = dict(layers=12, width=768, mlp=3072, vocab=8192, remat="none")
FAMILIES = {"vit": "vit", "moe": "moe_dense", "mamba": "mamba", "unet": "unet"}


def program(name: str) -> Program:
    if name.startswith("gpt"):
        step, *arguments = target("gpt3-tiny", 64, 512, scan=name == "gpt-scan", **GPT)
        return analyze(step, tuple(arguments))
    from tests.zoo import FAMILIES as ZOO

    case = ZOO[FAMILIES[name]].make()
    return analyze(
        case.step, (jax.eval_shape(case.init, jax.random.key(0)), jax.eval_shape(case.batch, jax.random.key(1)))
    )


def rows(name: str, cluster: Cluster, compiled: bool) -> list[dict[str, Any]]:
    p = program(name)
    plan = preset("dp", p, cluster.devices)
    found = groups(p, plan, cluster)
    chosen = [("keep", {})]
    chosen += [("frontier", levels) for _, _, levels in frontier(found, points=8) if set(levels.values()) != {"keep"}]
    chosen += [("uniform", {"*": "inputs"}), ("recompute", {"*": "recompute"})]
    out = []
    for kind, layers in chosen:
        made = price(p, plan.replace(layers=layers), cluster)
        predicted = made.predicted
        assert predicted is not None
        fixed = sum(v for k, v in predicted.memory.items() if k in ("parameter", "optimizer"))
        row = {"model": name, "kind": kind, "layers": layers, "peak_bytes": predicted.peak_bytes, "fixed_bytes": fixed}
        row |= {"step_s": predicted.step_s, "compiled_bytes": compiled_peak(p, made, cluster) if compiled else None}
        out.append(row)
    whole = out[0]
    for row in out:
        row["time"] = row["step_s"] / whole["step_s"] - 1
        grown = (whole["peak_bytes"] - row["fixed_bytes"]) / (row["peak_bytes"] - row["fixed_bytes"])
        row["batch"] = grown if row["time"] <= SLOWER else None
    return out


def compiled_peak(p: Program, plan: Plan, cluster: Cluster) -> int:
    lowered = lower(emit(p, plan, abstract_mesh(plan)), "cuda" if cluster.device.platform == "cuda" else "cpu")
    return compile_for(lowered, cluster, fallback=False).memory.peak


def show(table: list[dict[str, Any]]) -> None:
    for r in table:
        levels = ", ".join(f"{k}: {v}" for k, v in r["layers"].items())
        compiled = f"  compiled {size(r['compiled_bytes'])}" if r["compiled_bytes"] else ""
        batch = f"{r['batch']:5.2f}x" if r["batch"] else "     -"
        print(
            f"{r['model']:13} {r['kind']:9} peak {size(r['peak_bytes']):>10}  time {r['time']:+7.1%}  batch {batch}"
            f"{compiled}  {levels[:70]}",
            flush=True,
        )


def picture(tables: list[list[dict[str, Any]]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(4 * len(tables), 3.5), squeeze=False)
    for ax, table in zip(axes[0], tables):
        for kind, mark in (("keep", "ko"), ("frontier", "C0o-"), ("uniform", "C3s"), ("recompute", "C2^")):
            some = [r for r in table if r["kind"] == kind]
            some.sort(key=lambda r: r["peak_bytes"])
            ax.plot([r["peak_bytes"] / 1e9 for r in some], [100 * r["time"] for r in some], mark, label=kind)
        ax.set_title(table[0]["model"])
        ax.set_xlabel("peak per device (GB)")
        ax.set_ylabel("time added (%)")
        ax.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt-scan", "gpt-unrolled", *FAMILIES])
    parser.add_argument("--cluster", default="dgx-h100:1")
    parser.add_argument("--picture")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cluster = Cluster.parse(args.cluster)
    tables = []
    for name in args.models:
        tables.append(rows(name, cluster, args.compile))
        if not args.json:
            show(tables[-1])
    if args.picture:
        picture(tables, args.picture)
    if args.json:
        print(json.dumps({"schema": 1, "rows": [r for t in tables for r in t]}))


if __name__ == "__main__":
    main()
