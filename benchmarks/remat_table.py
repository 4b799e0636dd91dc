"""Hand-written `nn.remat` against the levels of a plan, compiled for H100.

    python benchmarks/remat_table.py [--rows gpt gpt-nnx gpt-scan resnet unet albert mamba dp dp-scan] [--json]

Each row is one step three times: as it is, with `nn.remat` around every layer by hand, and the first under
`layers={"*": level}` for `inputs` and `recompute`. Figures are those of XLA's own compiler for H100 (extra gpu-aot),
per device: temporaries, and for the rows over 8 GPUs (`dp`, data parallel, a GPT of 6 layers 768 wide on 64 sequences
of 1,024 tokens) the time that compute waits for communication in the compiled schedule, and its all-reduces.
Needs no device; a row takes about a minute.
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

from benchmarks.recompute_models import STEPS
from lensjax.cost.price import price
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.plan.plan import Plan
from lensjax.program.program import Program, analyze
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from lensjax.verify import compile_for
from lensjax.verify.artifact import Artifact
from lensjax.verify.audit import audit
from lensjax.verify.timeline import COMPUTE, Block

LARGE = dict(width=768, heads=12, seq=1024, vocab=8192, batch=64)
ROWS: dict[str, tuple[str, int, dict[str, int]]] = {name: (name, 1, {}) for name in STEPS}
ROWS |= {"dp": ("gpt", 8, LARGE), "dp-scan": ("gpt-scan", 8, LARGE)}
LEVELS = ("inputs", "recompute")


def compiled_step(program: Program, plan: Plan, cluster: Cluster) -> Artifact:
    """A step under a plan, compiled by XLA's compiler for GPUs."""
    return compile_for(lower(emit(program, plan, abstract_mesh(plan)), "cuda"), cluster, fallback=False)


def compiled(program: Program, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What XLA's compiler and its schedule say about a step under a plan. Bytes and seconds per device."""
    artifact = compiled_step(program, plan, cluster)
    read = audit(artifact, mesh={a.name: a.size for a in plan.mesh.axes}, cluster=cluster)
    assert read.timeline is not None
    flops, traffic = done(read.timeline.block)
    return {
        "temporaries": artifact.memory.temporaries,
        "peak": artifact.memory.peak,
        "host": artifact.memory.host,
        "step_s": read.timeline.step,
        "flops": flops,
        "bytes": traffic,
        "exposed_s": sum(read.timeline.exposed.values()),
        "reductions": sum(c.kind == "all-reduce" for c in read.found.collectives),
    }


def done(block: Block) -> tuple[float, float]:
    """Operations, and bytes of memory traffic, of a schedule."""
    here = [e for e in block.events if e.stream == COMPUTE]
    inner = [(times, *done(b)) for _, b, times in block.inner]
    return (
        sum(e.flops for e in here) + sum(n * f for n, f, _ in inner),
        sum(e.bytes for e in here) + sum(n * t for n, _, t in inner),
    )


def row(name: str, cluster: Cluster) -> dict[str, Any]:
    """{"none", "hand", "inputs", "recompute"} -> what was compiled; "predicted" beside each level's."""
    model, devices, sizes = ROWS[name]
    found: dict[str, Any] = {"row": name, "devices": devices}
    for remat in (False, True):
        step, *arguments = STEPS[model](remat=remat, **sizes)
        program = analyze(step, tuple(arguments))
        plan = preset("dp", program, devices)
        if remat:
            found["hand"] = compiled(program, plan, cluster)
            continue
        found["none"] = compiled(program, plan, cluster)
        for level in LEVELS:
            made = price(program, plan.replace(layers={"*": level}), cluster)
            assert made.predicted is not None
            found[level] = compiled(program, made, cluster) | {"predicted_peak": made.predicted.peak_bytes}
    return found


def show(found: dict[str, Any]) -> None:
    cells = []
    for kind in ("none", "hand", *LEVELS):
        x = found[kind]
        cells.append(f"{kind} {x['temporaries'] / 2**20:8.1f}")
        if found["devices"] > 1:
            cells[-1] += f" ({x['exposed_s'] * 1e3:.2f} ms, {x['reductions']})"
    print(f"{found['row']:9} {'  '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cluster, table = Cluster.parse("dgx-h100:1"), []
    if not args.json:
        print("temporaries in MiB per device (exposed communication, all-reduces)")
    for name in args.rows:
        table.append(row(name, cluster))
        if not args.json:
            show(table[-1])
    if args.json:
        print(json.dumps({"schema": 1, "rows": table}))


if __name__ == "__main__":
    main()
