"""Two processes of four devices, and four of two, compute what one process of eight does, each bringing its own rows of
the batch, or the whole batch."""

import json
import textwrap

import pytest

from tests.execute import several

PROGRAM = textwrap.dedent("""
    import json, os, sys
    import jax
    import lensjax
    from tests.execute import little

    plan, feed, meet = sys.argv[1:]
    count, index = int(os.environ.get("LENSJAX_PROCESSES", 1)), int(os.environ["LENSJAX_PROCESS"])
    if meet == "connect":
        lensjax.connect(timeout=120)
    elif count > 1:  # a script that brings its own
        jax.distributed.initialize(os.environ["LENSJAX_COORDINATOR"], count, index, initialization_timeout=120)
    assert (jax.process_count(), jax.device_count()) == (count, 8)
    train = lensjax.parallelize(little.step, plan=plan, cluster="cpu:2x4")
    state = train.init(little.create, jax.random.key(0), batch=little.batch(0))
    rows = lambda x: x.reshape(count, len(x) // count, *x.shape[1:])[index]
    losses = []
    for i in range(4):
        whole = little.batch(i)
        state, loss = train(state, train.from_local(jax.tree.map(rows, whole)) if feed == "rows" else whole)
        losses.append(float(loss))
    print("LOSSES", json.dumps(losses), flush=True)
""")


def losses(count, *arguments, port):
    """What each process of `count` computed."""
    found = several.run(PROGRAM, *arguments, processes=count, devices=8 // count, port=port)
    return [json.loads(process.after("LOSSES")) for process in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts, plan, feed, meet",
    [
        ((2, 4), "dp=2,fsdp=4", "rows", "connect"),
        ((2,), "dp=2,zero1=4", "whole", "initialize"),
        ((2,), "dp=2,tp=4", "rows", "initialize"),
    ],
)
def test_several_processes_equal_one(counts, plan, feed, meet, free_port):
    (expected,) = losses(1, plan, feed, meet, port=free_port)
    for count in counts:
        for found in losses(count, plan, feed, meet, port=free_port):
            assert found == pytest.approx(expected, rel=1e-5)
