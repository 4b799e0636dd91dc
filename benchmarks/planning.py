"""How long planning takes, and what it needs: trace, analysis and search apart, with the size of the program.

    python benchmarks/planning.py [--json]

Bars (two cores): every preset of the example in under 5 s; Llama-3-8B on 256 devices in under 10 s. Nothing here needs
a device. Each row is planned in a process of its own, so that none profits from another's caches.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

ROWS = {
    "examples/train_gpt.py on cpu:2x4": ("example", "cpu:2x4", 0, 0),
    "llama3-8b on dgx-h100:32": ("llama3-8b", "dgx-h100:32", 512, 8192),
    "llama3-70b on dgx-h100:128": ("llama3-70b", "dgx-h100:128", 1024, 8192),
    "llama3-405b on dgx-h100:2048": ("llama3-405b", "dgx-h100:2048", 16384, 8192),
}


def one(name, cluster, batch, seq):
    os.environ["JAX_PLATFORMS"] = "cpu"

    from lensjax._errors import DoesNotFit
    from lensjax.execute.planning import Options, make_plan
    from lensjax.models.targets import target
    from lensjax.program.edit import all_equations
    from lensjax.program.program import analyze
    from lensjax.topology.cluster import Cluster

    if name == "example":
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
        import train_gpt

        step, arguments = train_gpt.target()
    else:
        step, *arguments = target(name, batch, seq)
    seconds: dict[str, float] = {}
    program = analyze(step, tuple(arguments), seconds=seconds)
    start = time.perf_counter()
    try:
        choice = make_plan(program, Cluster.parse(cluster), Options())
        chosen, plans = choice.plan.name, len(choice.candidates)
    except DoesNotFit:
        chosen, plans = "nothing fits", None
    seconds["search"] = time.perf_counter() - start
    return {
        **seconds,
        "total": sum(seconds.values()),
        "plans": plans,
        "equations": sum(1 for _ in all_equations(program.jaxpr)),
        "chosen": chosen,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, cluster, batch, seq = args.one
        print(json.dumps(one(name, cluster, int(batch), int(seq))))
        return
    rows = {}
    for title, row in ROWS.items():
        command = [sys.executable, __file__, "--one", *map(str, row)]
        rows[title] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        if not args.json:
            r = rows[title]
            print(
                f"{title:34} trace {r['trace']:5.2f} s  analysis {r['analysis']:5.2f} s  search {r['search']:6.2f} s  "
                f"{r['equations']} equations  {r['resident_bytes'] / 2**30:.2f} GiB  -> {r['chosen']}"
            )
    if args.json:
        print(json.dumps({"schema": 1, "rows": rows}))


if __name__ == "__main__":
    main()
