"""Two processes of four devices, and four of two, compute what one process of eight does, each bringing its own rows of
the batch, or the whole batch."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent("""
    import json, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    count, index = int(sys.argv[2]), int(sys.argv[3])
    if count > 1:
        jax.distributed.initialize(sys.argv[1], count, index, initialization_timeout=120)
    import lensjax
    from tests.zoo import FAMILIES

    plan, family, feed = sys.argv[4:7]
    made = FAMILIES[family].make()
    batch = jax.device_get(made.batch(jax.random.key(1)))
    train = lensjax.parallelize(made.step, plan=plan, cluster="cpu:2x4")
    state = train.init(made.init, jax.random.key(0), batch=batch)
    rows = lambda x: x.reshape(count, len(x) // count, *x.shape[1:])[index]
    losses = []
    for _ in range(3):
        given = train.from_local(jax.tree.map(rows, batch)) if feed == "rows" else batch
        state, metrics = FAMILIES[family].call(train, state, given)
        losses.append(float(metrics["loss"]))
    print("LOSSES", json.dumps(losses), flush=True)
""")


def run(count, plan, family, feed, port):
    devices = 8 // count
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, f"localhost:{port}", str(count), str(i), plan, family, feed],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    out = []
    for w in workers:
        stdout, stderr = w.communicate(timeout=400)
        assert w.returncode == 0, stderr[-2000:]
        out.append(json.loads(stdout.split("LOSSES")[1]))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts, plan, family, feed",
    [
        ((2, 4), "fsdp", "gpt_scan_remat_dropout", "rows"),
        ((2,), "dp=2,zero1=4", "gpt_scan_remat_dropout", "whole"),
        ((2,), "dp=2,fsdp=4", "nnx_lora", "whole"),
    ],
)
def test_several_processes_equal_one(counts, plan, family, feed, free_port):
    (expected,) = run(1, plan, family, feed, free_port)
    for count in counts:
        for losses in run(count, plan, family, feed, free_port):
            assert losses == pytest.approx(expected, rel=1e-5)
