"""Planned against compiled peak memory under levels, and when what was offloaded is fetched.

    python benchmarks/planned_levels.py [--models gpt-scan gpt-unrolled vit moe] [--levels keep scores dots ...]
                                        [--json]

One device; "compiled" is XLA's own compiler for H100 (extra gpu-aot). For `offload`: bytes on the host, planned and
compiled, how many copies back the compiled schedule has, how many of them the host link carries in the time between
their start and the point at which the schedule waits for them, and whether a loop hands them to its next trip.
Needs no device; a row takes up to a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.largest_batch import START
from benchmarks.memory_models import MODELS
from benchmarks.offload_fetches import fetches
from benchmarks.remat_table import compiled_step
from lensjax.cost.price import price
from lensjax.program.program import Program, analyze
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from lensjax.verify.hlo import parse_hlo

LEVELS = ("keep", "scores", "dots", "inputs", "recompute", "offload")
UNROLLED = ("gpt-unrolled", "mamba", "unet")


def row(name: str, program: Program, level: str, cluster: Cluster) -> dict[str, Any]:
    plan = preset("dp", program, 1)
    plan = price(program, plan if level == "keep" else plan.replace(layers={"*": level}), cluster)
    made = compiled_step(program, plan, cluster)
    assert plan.predicted is not None
    found = fetches(parse_hlo(made.hlo), cluster.device)
    return {
        "model": name,
        "level": level,
        "planned": plan.predicted.peak_bytes,
        "compiled": made.memory.peak,
        "host_planned": plan.predicted.memory.get("host", 0.0),
        "host_compiled": made.memory.host,
        "fetches": len(found),
        "hidden": sum(f.hidden(cluster.device) for f in found),
        "handed": all(f.handed for f in found if f.looped),
    }


def show(r: dict[str, Any]) -> None:
    line = f"{r['model']:13} {r['level']:10} {r['planned'] / 1e9:6.2f} {r['compiled'] / 1e9:6.2f} GB {error(r):+6.1%}"
    if r["host_planned"] or r["host_compiled"]:
        line += f"  host {r['host_planned'] / 1e9:.3f} {r['host_compiled'] / 1e9:.3f} GB"
        line += f"  {r['hidden']} of {r['fetches']} fetches hidden"
    print(line, flush=True)


def error(r: dict[str, Any]) -> float:
    return r["planned"] / r["compiled"] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt-scan", "gpt-unrolled", "vit", "moe"], choices=list(MODELS))
    parser.add_argument("--levels", nargs="+", default=list(LEVELS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cluster, table = Cluster.parse("dgx-h100:1"), []
    for name in args.models:
        step, *arguments = MODELS[name](START[name])
        program = analyze(step, tuple(arguments))
        for level in args.levels:
            table.append(row(name, program, level, cluster))
            if not args.json:
                show(table[-1])
    if args.json:
        print(json.dumps({"schema": 1, "rows": table}))
        return
    for kind, some in (
        ("scanned", [abs(error(r)) for r in table if r["model"] not in UNROLLED]),
        ("unrolled", [abs(error(r)) for r in table if r["model"] in UNROLLED]),
    ):
        if some:
            print(f"{kind}: median {statistics.median(some):.1%}, worst {max(some):.1%}")


if __name__ == "__main__":
    main()
