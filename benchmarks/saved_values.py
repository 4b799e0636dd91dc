"""What a layer keeps for its backward: the figures of Korthikanti et al. 2022 (arXiv:2205.05198) and the planner's.

    python benchmarks/saved_values.py [--models 22B 175B 530B 1T] [--json]

The paper's transformer (`tests/recompute/megatron.py`), its four sizes, tensor parallelism over 8: each of its ways to
recompute is a level of a plan, and is priced by the code that prices every plan. `by paper` and `priced`: bytes per
device that one layer keeps, for each element of its input; `GiB`: of all layers. `chosen` is what the search takes
by itself in the memory that parameters and optimizer leave of 80 GB (the paper's figure 1), all layers at one level.
Needs no device.
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

from lensjax.cost.levels import groups, kept
from lensjax.program.program import analyze
from lensjax.search.levels import solve
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from tests.recompute.megatron import SIZES, VARIANTS, WAYS, step_of

LAYERS = "state/0/layers"
CHOICES = {f"chosen for {name}": f"dp=2,{term}={WAYS}" for name, term in (("tensor", "tp"), ("sequence", "tp_sp"))}


def rows(name: str) -> list[dict[str, Any]]:
    size = SIZES[name]
    program = analyze(*step_of(size))
    cluster = Cluster.parse(f"dgx-a100-80:{2 * WAYS}")

    def row(variant: str, text: str, level: str, paper: float | None) -> dict[str, Any]:
        plan = preset(text, program, 2 if text == "dp=2" else 2 * WAYS).replace(layers={LAYERS: level})
        held = kept(program, plan)[LAYERS]
        total = held * size.layers
        made = {"model": name, "variant": variant, "plan": text, "level": level, "paper": paper}
        return {**made, "priced": held / size.unit, "layers_bytes": total}

    found = [row(v, text, level, formula(size)) for v, (text, level, formula) in VARIANTS.items()]
    for variant, text in CHOICES.items():
        options = groups(program, preset(text, program, 2 * WAYS), cluster)
        level = solve(options, 80e9 - size.state * 2**30, parts=1)[LAYERS]
        found.append(row(f"{variant}: {level}", text, level, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    table = [r for name in args.models for r in rows(name)]
    if args.json:
        print(json.dumps({"schema": 1, "rows": table}))
        return
    for r in table:
        paper = f"{r['paper']:8.2f}" if r["paper"] is not None else " " * 8
        gib = r["layers_bytes"] / 2**30
        print(f"{r['model']:5} {r['variant']:29} by paper {paper}  priced {r['priced']:8.2f}  {gib:7.2f} GiB")


if __name__ == "__main__":
    main()
