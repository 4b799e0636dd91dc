"""Plans Llama 3 8B for 256 H100s on a laptop: no accelerator, nothing allocated, seconds.

python examples/plan_only.py
python examples/plan_only.py --model llama3-405b --cluster dgx-h100:2048 --batch 2048 --seq 8192
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # planning needs no accelerator: do not even look for one

import lensjax
from lensjax.models import names, target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", choices=names(), metavar="NAME", help=", ".join(names()))
    parser.add_argument("--cluster", default="dgx-h100:32", metavar="SPEC", help="the machines, default dgx-h100:32")
    parser.add_argument("--batch", type=int, default=1024, metavar="N", help="global batch in sequences, default 1024")
    parser.add_argument("--seq", type=int, default=4096, metavar="N", help="tokens of a sequence, default 4096")
    parser.add_argument("--out", type=Path, default=Path("out/plan.json"), metavar="FILE", help="where the plan goes")
    args = parser.parse_args()

    # The step is ordinary Flax; state and batch are shapes only.
    train_step, state, batch = target(args.model, args.batch, args.seq)
    step = lensjax.parallelize(train_step, cluster=args.cluster)
    started = time.perf_counter()
    plan = step.plan_for(state, batch)
    print(step.explain())
    print(f"planned in {time.perf_counter() - started:.1f} s")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plan.save(args.out)
    print(f"the plan, as data: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
