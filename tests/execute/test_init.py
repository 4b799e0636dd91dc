"""The state is sharded from birth: no device, and no process, ever holds the whole."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lensjax
from lensjax.models.targets import create_state, target

WIDE = dict(dtype=jnp.float32, width=256, mlp=1024, vocab=4096, layers=4)


def decoder():
    import dataclasses

    from lensjax.models.targets import config

    step, _, batch = target("llama3-tiny", 16, 32, **WIDE)
    chosen = dataclasses.replace(config("llama3-tiny"), **WIDE)
    return step, lambda rng: create_state(chosen, rng), batch


def nbytes(tree):
    return sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_init_compiles_to_a_share_and_at_most_the_largest_leaf():
    step, create, batch = decoder()
    train = lensjax.parallelize(step, plan="fsdp")
    make, given, _ = train._init(create, (jax.random.key(0),), {}, batch)
    memory = make.lower(*given).compile().memory_analysis()
    leaves = jax.tree.leaves(train.abstract_state)
    share = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    largest = max(np.prod(x.shape) * x.dtype.itemsize for x in leaves)
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= share + largest
    assert share < nbytes(leaves) / 7


def test_init_makes_the_numbers_of_one_device_with_the_planned_shardings():
    step, create, batch = decoder()
    train = lensjax.parallelize(step, plan="dp=2,fsdp=4")
    made = train.init(create, jax.random.key(0), batch=batch)
    expected = jax.jit(create)(jax.random.key(0))
    for a, b, s in zip(*map(jax.tree.leaves, (made, expected, train.abstract_state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(s.sharding, a.ndim)


def test_a_leaf_that_is_returned_twice_has_two_buffers():
    def create():
        w = jnp.ones((16, 64))
        return {"w": w, "average": w}

    def step(state, x):
        w = state["w"] - jax.grad(lambda w: (x @ w).mean())(state["w"])
        return {"w": w, "average": 0.9 * state["average"] + 0.1 * w}

    train = lensjax.parallelize(step, plan="fsdp")
    state = train.init(create, batch=np.ones((8, 16), np.float32))
    for _ in range(3):
        state = train(state, np.ones((8, 16), np.float32))
    assert np.isfinite(np.asarray(state["average"])).all()


PROCESS = textwrap.dedent("""
    import os, resource, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=120)
    import lensjax

    SIZE = 4096

    def create(rng):
        params = {f"w{i}": jax.random.normal(jax.random.fold_in(rng, i), (SIZE, SIZE)) * 0.01 for i in range(4)}
        return params, optax.adam(1e-3).init(params)

    def step(params, opt_state, x):
        def loss(p):
            h = x
            for w in p.values():
                h = jnp.tanh(h @ w)
            return (h ** 2).mean()
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optax.adam(1e-3).update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    jax.block_until_ready(jnp.ones(8) + 1)
    train = lensjax.parallelize(step, plan="fsdp")
    train._init(create, (jax.random.key(0),), {}, jax.ShapeDtypeStruct((16, SIZE), jnp.float32))
    before = resident()
    batch = jax.ShapeDtypeStruct((16, SIZE), jnp.float32)
    state = jax.block_until_ready(train.init(create, jax.random.key(0), batch=batch))
    grown = resident() - before
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    print("GROWN", grown / whole, whole >> 20, flush=True)
""")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc to read the resident memory")
def test_two_processes_grow_by_their_part_of_the_state(tmp_path, free_port):
    """Each of two processes ends with at most 0.7 of the state's bytes (half is its own)."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, f"localhost:{free_port}", str(i)], env=env, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    for w in workers:
        out, err = w.communicate(timeout=300)
        assert w.returncode == 0, err[-2000:]
        grown = float(out.split("GROWN")[1].split()[0])
        assert grown <= 0.7, out
