"""A checkpoint under other device and process counts, and a save that is killed at twenty points."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import lensjax
from lensjax.execute.checkpoint import Checkpoints
from tests.execute import little, several

pytestmark = pytest.mark.slow

RESTORE = textwrap.dedent("""
    import json, sys
    folder, plan = sys.argv[1:]
    import lensjax
    lensjax.connect(timeout=120)
    import jax
    from tests.execute import little

    count, index = jax.process_count(), jax.process_index()
    rows = lambda x: x.reshape(count, len(x) // count, *x.shape[1:])[index]
    train = lensjax.parallelize(little.step, plan=plan)
    train.plan_for(jax.eval_shape(little.create, jax.random.key(0)), little.batch(0))
    state, losses = train.restore(folder), []
    for i in range(int(state.step), int(state.step) + 5):
        state, loss = train(state, train.from_local(jax.tree.map(rows, little.batch(i))))
        losses.append(float(loss))
    print("LOSSES", json.dumps([jax.device_count(), int(state.step), losses]), flush=True)
""")


def goes_on(train, state, count):
    losses = []
    for i in range(int(state.step), int(state.step) + count):
        state, loss = train(state, little.batch(i))
        losses.append(float(loss))
    return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the folder, the losses of the five steps after the save) of twenty steps on 2 x 4 devices."""
    folder = tmp_path_factory.mktemp("run")
    train = lensjax.parallelize(little.step, plan="dp=2,fsdp=4")
    state, _ = goes_on(train, train.init(little.create, jax.random.key(0), batch=little.batch(0)), 20)
    train.save(folder, state, 20)
    state, losses = goes_on(train, state, 5)
    train.wait()
    assert int(state.step) == 25 and len(set(losses)) == 5
    return folder, losses


@pytest.mark.parametrize("plan, shape", [("dp=4,fsdp=2", (4, 2)), ("zero1", (8,)), ("tp=8", (8,))])
def test_the_next_five_losses_under_another_plan(saved, plan, shape):
    folder, losses = saved
    train = lensjax.parallelize(little.step, plan=plan)
    train.plan_for(jax.eval_shape(little.create, jax.random.key(5)), little.batch(0))
    assert tuple(a.size for a in train.plan.mesh.axes) == shape
    _, found = goes_on(train, train.restore(folder), 5)
    np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.parametrize("processes, devices, plan", [(1, 1, "dp"), (2, 4, "fsdp")])
def test_the_next_five_losses_on_other_devices_and_processes(saved, free_port, processes, devices, plan):
    folder, losses = saved
    for process in several.run(RESTORE, folder, plan, processes=processes, devices=devices, port=free_port):
        count, step, found = json.loads(process.after("LOSSES"))
        assert (count, step) == (processes * devices, 25)
        np.testing.assert_allclose(found, losses, rtol=1e-5)


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
