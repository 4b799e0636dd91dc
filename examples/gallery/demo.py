"""What the gallery's examples share: emulated devices, a few steps, and the table of the plan."""
# ruff: noqa: E402 - the emulated devices have to be set up before JAX is imported

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import machine

CLUSTER = machine.emulate(hosts=2, devices=4)

import argparse

import numpy as np

import lensjax


def run(train_step, create, batch_of, plan: str | None = None, steps: int = 20, **options):
    """Plans, prints the plan, trains, prints first and last losses. Returns (step, state).

    `create(rng)` makes the state, `batch_of(rng)` a batch as numpy arrays; the step returns (state, metrics).
    """
    import jax

    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", default=plan, help="a preset instead of this example's own")
    parser.add_argument("--steps", type=int, default=steps)
    args = parser.parse_args()
    step = lensjax.parallelize(train_step, cluster=CLUSTER, plan=args.plan, **options)
    rng = np.random.default_rng(0)
    batch = batch_of(rng)
    state = step.init(create, jax.random.key(0), batch=batch)
    print(step.explain())
    losses = []
    for _ in range(args.steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on the same batch")
    if not losses[-1] < losses[0]:
        sys.exit("the loss did not fall")
    return step, state
