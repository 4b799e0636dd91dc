"""The decorated step against the same shardings written by hand with `jax.jit`, in one process, interleaved.

    python benchmarks/overhead.py [--rounds 60] [--json]

Prints the median of the ratios (decorated / by hand) and its spread, for a small step, where the call itself weighs
most, and for the GPT of the examples. Neither side plans or compiles while it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lensjax
from lensjax.models.targets import target


def small():
    """A two-layer step of about a millisecond: the worst case for the cost of a call."""

    def step(params, batch):
        def loss_fn(p):
            return ((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"w": jnp.full((256, 512), 0.01), "v": jnp.full((512,), 0.01)}
    batch = {"x": np.ones((64, 256), np.float32), "y": np.ones(64, np.float32)}
    return step, params, batch


def decoder():
    step, state, batch = target("llama3-tiny", 16, 64, dtype=jnp.float32)
    fill = lambda x: jnp.full(x.shape, 0.01, x.dtype)
    return step, jax.tree.map(fill, state), jax.tree.map(fill, batch)


def by_hand(step, mesh, specs, state, batch):
    """What a person would write: parameters and moments split like the plan has them, the batch over the mesh's
    axis."""
    shard = lambda tree, f: jax.tree.map(lambda x: NamedSharding(mesh, f(x)), tree)
    state_shardings = jax.tree.map(lambda x, s: NamedSharding(mesh, s), state, specs)
    batch_shardings = shard(batch, lambda x: P(mesh.axis_names[0]))
    return jax.jit(
        step, in_shardings=(state_shardings, batch_shardings), out_shardings=(state_shardings, None), donate_argnums=0
    )


def measure(make, rounds):
    step, state, batch = make()
    ours = lensjax.parallelize(step, plan="dp")
    ours.plan_for(state, batch)
    mine = jax.tree.map(jnp.copy, state)
    mine, _ = ours(mine, batch)
    mesh = jax.tree.leaves(mine)[0].sharding.mesh
    batch = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("dp"))), batch)
    hand = by_hand(step, mesh, jax.tree.map(lambda x: x.sharding.spec, mine), mine, batch)
    theirs = jax.tree.map(jnp.copy, mine)
    theirs, _ = hand(theirs, batch)
    times = {"ours": [], "hand": []}
    for i in range(rounds + 5):
        for name in ("ours", "hand") if i % 2 else ("hand", "ours"):
            start = time.perf_counter()
            if name == "ours":
                mine, out = ours(mine, batch)
            else:
                theirs, out = hand(theirs, batch)
            jax.block_until_ready((out, mine, theirs))
            if i >= 5:
                times[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(times["ours"], times["hand"])]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "by_hand_s": statistics.median(times["hand"]),
        "rounds": rounds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {name: measure(make, args.rounds) for name, make in (("small step", small), ("decoder", decoder))}
    if args.json:
        print(json.dumps({"schema": 1, "rows": found}))
        return
    for name, row in found.items():
        low, high = row["quartiles"]
        print(
            f"{name:12} {row['ratio']:.3f}x by hand (quartiles {low:.3f}-{high:.3f}), "
            f"by hand {row['by_hand_s'] * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
