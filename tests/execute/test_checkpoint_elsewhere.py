"""A checkpoint under other device and process counts, and a save that is killed at twenty points."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.execute import several

pytestmark = pytest.mark.slow

TRAIN = textwrap.dedent("""
    import json, os, sys
    folder, plan, mode, steps = sys.argv[1:5]
    import lensjax
    lensjax.connect(timeout=120)
    import jax
    from tests.zoo import FAMILIES

    made = FAMILIES["gpt_scan_remat_dropout"].make()
    whole = jax.device_get(made.batch(jax.random.key(1)))
    count, index = jax.process_count(), jax.process_index()
    rows = lambda x: x.reshape(count, len(x) // count, *x.shape[1:])[index]
    train = lensjax.parallelize(made.step, plan=plan)
    train.plan_for(jax.eval_shape(made.init, jax.random.key(0)), whole)
    if mode == "save":
        state = train.init(made.init, jax.random.key(0))
    else:
        state = train.restore(folder)
    losses = []
    for i in range(int(steps)):
        if mode == "save" and i == 20:
            train.save(folder, state, 20)
        state, metrics = train(state, train.from_local(jax.tree.map(rows, whole)))
        losses.append(float(metrics["loss"]))
    train.wait()
    print("LOSSES", json.dumps(losses), flush=True)
""")


def run(processes, devices, port, *arguments):
    found = several.run(TRAIN, *arguments, processes=processes, devices=devices, port=port, timeout=1200)
    return [json.loads(process.after("LOSSES")) for process in found]


def test_the_next_five_losses_on_other_meshes_devices_and_processes(tmp_path, free_port):
    """Twenty steps on 2 x 4 devices, saved; then on 4 x 2, on 8 x 1 under another plan, on one device, and in two
    processes of four devices."""
    (losses,) = run(1, 8, free_port, tmp_path, "dp=2,fsdp=4", "save", 25)
    for processes, devices, plan in ((1, 8, "dp=4,fsdp=2"), (1, 8, "zero1"), (1, 1, "dp"), (2, 4, "fsdp")):
        for found in run(processes, devices, free_port, tmp_path, plan, "restore", 5):
            np.testing.assert_allclose(found, losses[20:], rtol=1e-5)


KILL = textwrap.dedent("""
    import os, sys, time
    import jax, jax.numpy as jnp, numpy as np
    import orbax.checkpoint.experimental.v1  # before the fork: one import for all children
    from lensjax.execute.checkpoint import Checkpoints

    folder, points = sys.argv[1], int(sys.argv[2])

    def child(k, whole):
        checkpoints = Checkpoints()
        state = lambda n: {f"w{i}": jnp.full((256, 256), n, jnp.float32) for i in range(24)} | {"n": jnp.int32(n)}
        one, two = state(1), state(2)
        checkpoints.save(f"{folder}/{k}", 1, one, {}, None)
        checkpoints.wait()
        start = time.perf_counter()
        checkpoints.save(f"{folder}/{k}", 2, two, {}, None)
        if k < 0:
            checkpoints.wait()
            print(time.perf_counter() - start, flush=True)
            os._exit(0)
        time.sleep(max(0.0, (k + 0.5) / points * whole - (time.perf_counter() - start)))
        os.kill(os.getpid(), 9)

    def fork(k, whole):
        r, w = os.pipe()
        pid = os.fork()
        if not pid:
            os.dup2(w, 1)
            child(k, whole)
        os.close(w)
        _, status = os.waitpid(pid, 0)
        return status, os.read(r, 100).decode()

    status, told = fork(-1, 0.0)
    assert status == 0 and float(told) > 0
    print([fork(k, float(told))[0] for k in range(points)], flush=True)
""")


def test_a_save_that_is_killed_is_never_chosen(tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILL, str(tmp_path), "20"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    statuses = json.loads(done.stdout.strip().splitlines()[-1])
    assert statuses == [9] * 20
    import jax

    from lensjax.execute.checkpoint import Checkpoints

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {f"w{i}": jax.ShapeDtypeStruct((256, 256), np.float32, sharding=one) for i in range(24)}
    abstract["n"] = jax.ShapeDtypeStruct((), np.int32, sharding=one)
    unfinished = 0
    for k in range(20):
        folder = tmp_path / str(k)
        found = Checkpoints().saved(folder)
        assert found in ((1,), (1, 2)), (k, found)
        unfinished += found == (1,)
        state, _ = Checkpoints().restore(folder, None, abstract, {})
        assert int(state["n"]) == found[-1]
        assert all((np.asarray(state[f"w{i}"]) == found[-1]).all() for i in range(24))
    assert unfinished >= 10  # the kills did fall into the save
