"""`lensjax bench` beside an independent timing loop: the same plans, in one process, visit by visit in turns.

    python benchmarks/bench_check.py [examples/train_gpt.py:target] [--plans best,fsdp,zero1,tp=2] [--json]

The loop is what a person would write: a decorated step of its own, a state that it makes and feeds back, a batch that
it places once, a clock around each step that is waited for. It shares no code with the measurement, and runs after
each of its visits for as many steps. The ratio of a plan is the median over its visits, so that what else the machine
does weighs on both alike. Each program is compiled once: the loop's comes out of JAX's own cache, in a folder for the
run. Progress goes to standard error, a line for each visit. Exit status 1 when some plan is off by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

import lensjax
from lensjax.commands.bench import split_plans
from lensjax.commands.target import load_file
from lensjax.execute.measure import measure
from lensjax.execute.planning import cluster_for

WITHIN = 0.05


class Loop:
    """A step under a plan, and the seconds of its counted calls, a list for each visit."""

    def __init__(self, fn, plan, shapes):
        self.step = lensjax.parallelize(fn, plan=plan)
        fill = lambda x: np.full(x.shape, 1 if np.issubdtype(x.dtype, np.integer) else 0.01, x.dtype)
        state, batch = jax.tree.map(fill, shapes)
        self.step.plan_for(state, batch)
        shardings = self.step.compiled.input_shardings[0]  # arrays from elsewhere would compile the step once more
        self.state, self.batch = jax.tree.map(jax.device_put, (state, batch), shardings)
        self.seconds = []

    def run(self, count):
        visit = []
        for i in range(count + 1):
            start = time.perf_counter()
            self.state, out = self.step(self.state, self.batch)
            jax.block_until_ready((self.state, out))
            if i:
                visit.append(time.perf_counter() - start)
        self.seconds.append(visit)


def compare(target, plans, steps, visits):
    """[{plan, bench_s, loop_s, ratio}]: medians over all steps, and of the visits' ratios."""
    fn, shapes = load_file(target)
    loops, told = {}, {}
    start = time.perf_counter()

    def record(event):
        name = event["plan"]
        print(f"{time.perf_counter() - start:6.1f} s  {event['event']:8} {name}", file=sys.stderr, flush=True)
        if event["event"] == "failed":
            sys.exit(f"{name}: {event['reason']}")
        if event["event"] == "visit":
            told.setdefault(name, []).append(event["seconds"])
            if name not in loops:
                loops[name] = Loop(fn, None if name == "best" else name, shapes)
            loops[name].run(len(event["seconds"]))
            bench, loop = (statistics.median(x[-1]) for x in (told[name], loops[name].seconds))
            print(f"          {bench * 1e3:.1f} ms, loop {loop * 1e3:.1f} ms", file=sys.stderr, flush=True)

    measure(fn, shapes, plans, cluster_for(None), steps=steps, visits=visits, done=(), record=record)
    middle = lambda visits: statistics.median(s for visit in visits for s in visit)
    pairs = {n: list(zip(told[n], loops[n].seconds)) for n in plans}
    ratio = lambda n: statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs[n])
    return [
        {"plan": n, "bench_s": middle(told[n]), "loop_s": middle(loops[n].seconds), "ratio": ratio(n)} for n in plans
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", default="examples/train_gpt.py:target", metavar="FILE.py:NAME")
    parser.add_argument("--plans", action="append")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--visits", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        rows = compare(args.target, split_plans(args.plans or ["best,fsdp,zero1,tp=2"]), args.steps, args.visits)
    good = all(abs(r["ratio"] - 1) <= WITHIN for r in rows)
    if args.json:
        print(json.dumps({"schema": 1, "rows": rows, "within": WITHIN, "passed": good}))
    else:
        for r in rows:
            times = f"bench {r['bench_s'] * 1e3:8.2f} ms   loop {r['loop_s'] * 1e3:8.2f} ms"
            print(f"{r['plan']:12} {times}   {r['ratio']:.3f}x")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
