"""Time to the first step: trace, planning and compile of the decorated step, beside plain jit's trace and compile.

    python benchmarks/first_step.py [--rounds 3] [--json]

Both start from the same numpy arrays in a process of their own, so that neither finds anything in a cache. The ratio is
(decorated, after planning) / (plain jit with the same shardings of state and batch), the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

CHILD = """
import json, os, sys, time
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax, jax.numpy as jnp, numpy as np
import lensjax
from lensjax.models.targets import target

which, layers = sys.argv[1], int(sys.argv[2])
step, state, batch = target("llama3-tiny", 16, 64, dtype=jnp.float32, layers=layers)
fill = lambda x: np.full(x.shape, 0.01, x.dtype)
state, batch = jax.tree.map(fill, state), jax.tree.map(fill, batch)
jax.block_until_ready(jnp.ones(8) + 1)
out = {}
if which == "plain":
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp"))
    start = time.perf_counter()
    jitted = jax.jit(step, in_shardings=(whole, rows), out_shardings=(whole, None), donate_argnums=0)
    jax.block_until_ready(jitted(state, batch))
    out["first_s"] = time.perf_counter() - start
else:
    start = time.perf_counter()
    train = lensjax.parallelize(step, plan="dp" if which == "preset" else None)
    train.plan_for(state, batch)
    out["plan_s"] = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(train(state, batch))
    out["rest_s"] = time.perf_counter() - start
print(json.dumps(out))
"""


def child(which: str, layers: int) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", CHILD, which, str(layers)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    rounds = [{w: child(w, args.layers) for w in ("plain", "preset", "search")} for _ in range(args.rounds)]
    middle = lambda f: statistics.median(f(r) for r in rounds)
    found = {
        "plain_s": middle(lambda r: r["plain"]["first_s"]),
        "planning_s": middle(lambda r: r["search"]["plan_s"]),
        "planning_preset_s": middle(lambda r: r["preset"]["plan_s"]),
        "rest_s": middle(lambda r: r["preset"]["rest_s"]),
        "ratio": middle(lambda r: r["preset"]["rest_s"] / r["plain"]["first_s"]),
        "rounds": args.rounds,
    }
    if args.json:
        print(json.dumps({"schema": 1, **found}))
        return
    print(f"plain jit: trace and compile to the first result  {found['plain_s']:.2f} s")
    print(f"lensjax: the same after planning                  {found['rest_s']:.2f} s  ({found['ratio']:.2f}x)")
    print(f"lensjax: planning, a preset                       {found['planning_preset_s']:.2f} s")
    print(f"lensjax: planning, the search                     {found['planning_s']:.2f} s")


if __name__ == "__main__":
    main()
