"""Two processes of four devices, and four of two, compute what one process of eight does, each bringing its own rows of
the batch, or the whole batch."""

import json
import textwrap

import pytest

from tests.execute import several

PROGRAM = textwrap.dedent("""
    import json, os, sys
    import jax
    plan, family, feed = sys.argv[1:4]
    count, index = int(os.environ.get("LENSJAX_PROCESSES", 1)), int(os.environ["LENSJAX_PROCESS"])
    if count > 1:  # a script that brings its own: lensjax.connect() is not asked for
        jax.distributed.initialize(os.environ["LENSJAX_COORDINATOR"], count, index, initialization_timeout=120)
    import lensjax
    from tests.zoo import FAMILIES

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


def losses(count, plan, family, feed, port):
    """What each process of `count` computed."""
    found = several.run(PROGRAM, plan, family, feed, processes=count, devices=8 // count, port=port)
    return [json.loads(process.after("LOSSES")) for process in found]


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
    (expected,) = losses(1, plan, family, feed, free_port)
    for count in counts:
        for found in losses(count, plan, family, feed, free_port):
            assert found == pytest.approx(expected, rel=1e-5)
