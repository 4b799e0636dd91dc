"""What the analysis of an unrolled GPT adds to its two traces, and the memory of the process.

    python benchmarks/analysis.py [--layers 8 64] [--json]

Bars (two cores, 64 layers): what is added, analysis, folding and logical axes together, under 5 s; the process under
3 GiB. `trace`: both traces; `analysis`: roles, batch, state; `folding`: layers found by structure; `logical`: logical
axes of every value. Each row runs in a process of its own and needs no device. Seconds are processor time, so that
others on the machine do not count; `busy` is processor time over wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time


def one(layers: int) -> dict:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from lensjax.models.targets import target
    from lensjax.program.edit import all_equations
    from lensjax.program.program import analyze

    step, *arguments = target("gpt3-tiny", 8, 32, layers=layers, scan=False, remat="none")
    seconds: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    program = analyze(step, tuple(arguments), seconds=seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    seconds = {k: v * share for k, v in seconds.items()}
    start = time.process_time()
    (stack,) = program.unrolled
    seconds["folding"] = time.process_time() - start
    start = time.process_time()
    axes = program.logical.axes
    seconds["logical"] = time.process_time() - start
    seconds["added"] = seconds["analysis"] + seconds["folding"] + seconds["logical"]
    return {
        "layers": layers,
        "equations": sum(1 for _ in all_equations(program.jaxpr)),
        **seconds,
        "busy": (time.process_time() - cpu) / (time.perf_counter() - wall),
        "found": {
            "forward": stack.count, "backward": sum(bool(r.backward) for r in stack.repeats), "axes": len(axes),
        },
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one)))
        return
    rows = []
    for layers in args.layers:
        command = [sys.executable, __file__, "--one", str(layers)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        if not args.json:
            r = rows[-1]
            print(
                f"{layers:3} layers, {r['equations']:6} equations: trace {r['trace']:6.2f} s  added {r['added']:5.2f} "
                f"s (analysis {r['analysis']:.2f}, folding {r['folding']:.2f}, logical axes {r['logical']:.2f})  "
                f"{r['resident_bytes'] / 2**30:.2f} GiB  busy {r['busy']:.2f}  found: layers {r['found']['forward']} "
                f"forward, {r['found']['backward']} backward; {r['found']['axes']} axes"
            )
    if args.json:
        print(json.dumps({"schema": 1, "rows": rows}))


if __name__ == "__main__":
    main()
