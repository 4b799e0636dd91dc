"""How long planning takes, and what it needs: trace, analysis and search apart, with the size of the program.

    python benchmarks/planning.py [--json] [--only WORD]

Wall seconds and processor seconds of each part; the two differ where the machine is shared. Bars (two cores of their
own): Llama-3-8B on 256 devices, all mesh shapes, in under 10 s from command to plan, without imports; 405B on 16,384
in under 60 s; 64 unrolled layers in under 15 s after tracing; the time flat in the number of scanned layers (where they
fit: else micro-batches are searched besides); under 4 GiB. Nothing here needs a device. Each row is planned in a
process of its own, so that none profits from another's caches.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

# Title -> (target, cluster, batch, seq, changes of the configuration)
ROWS = {
    "examples/train_gpt.py on cpu:2x4": ("example", "cpu:2x4", 0, 0, {}),
    "llama3-8b on dgx-h100:32": ("llama3-8b", "dgx-h100:32", 512, 8192, {}),
    "llama3-70b on dgx-h100:128": ("llama3-70b", "dgx-h100:128", 1024, 8192, {}),
    "llama3-405b on dgx-h100:2048": ("llama3-405b", "dgx-h100:2048", 2048, 8192, {}),
    "llama3-8b, 8 scanned layers": ("llama3-8b", "dgx-h100:32", 512, 8192, {"layers": 8}),
    "llama3-8b, 256 scanned layers": ("llama3-8b", "dgx-h100:32", 512, 8192, {"layers": 256}),
    "the same, with memory for it": ("llama3-8b", "dgx-h100:32", 512, 8192, {"layers": 256, "memory": 1e12}),
    "llama3-8b, 64 layers unrolled": ("llama3-8b", "dgx-h100:32", 512, 8192, {"layers": 64, "scan": False}),
}


def one(name, cluster, batch, seq, changes):
    os.environ["JAX_PLATFORMS"] = "cpu"

    from lensjax._errors import DoesNotFit
    from lensjax.execute.planning import Options, make_plan
    from lensjax.models.targets import target
    from lensjax.program.edit import all_equations
    from lensjax.program.program import analyze
    from lensjax.topology.cluster import Cluster

    memory = changes.pop("memory", None)
    clock = lambda: (time.perf_counter(), time.process_time())
    start = clock()
    if name == "example":
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
        import train_gpt

        step, arguments = train_gpt.target()
    else:
        step, *arguments = target(name, batch, seq, **changes)
    seconds: dict[str, float] = {}
    program = analyze(step, tuple(arguments), seconds=seconds)
    traced = clock()
    found = {}
    try:
        choice = make_plan(program, Cluster.parse(cluster), Options(memory=memory))
        found = {
            "chosen": choice.plan.name,
            "gap": choice.gap,
            "plans": len(choice.candidates),
            "shapes": choice.shapes,
        }
    except DoesNotFit:
        found = {"chosen": "nothing fits"}
    end = clock()
    return {
        **seconds,
        "search": end[0] - traced[0],
        "total": end[0] - start[0],
        "processor": {"trace and analysis": traced[1] - start[1], "search": end[1] - traced[1]},
        "equations": sum(1 for _ in all_equations(program.jaxpr)),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **found,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="rows with this word in their title")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*json.loads(args.one))))
        return
    rows = {}
    for title, row in ROWS.items():
        if args.only not in title:
            continue
        command = [sys.executable, __file__, "--one", json.dumps(row)]
        rows[title] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        if not args.json:
            r = rows[title]
            p = r["processor"]
            gap = f", within {r['gap']:.1%}" if r.get("gap") is not None else ""
            print(
                f"{title:34} trace {r['trace']:5.1f} s  analysis {r['analysis']:5.1f} s  search {r['search']:6.1f} s  "
                f"total {r['total']:6.1f} s (processor {sum(p.values()):6.1f} s)  {r['equations']} equations  "
                f"{r['resident_bytes'] / 2**30:.2f} GiB  -> {r['chosen']}{gap} of {r.get('shapes')} shapes",
                flush=True,
            )
    if args.json:
        print(json.dumps({"schema": 1, "rows": rows}))


if __name__ == "__main__":
    main()
