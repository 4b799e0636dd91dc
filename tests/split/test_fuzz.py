"""Random losses over a batch: whatever the analysis accepts is exact.

Programs run operation by operation (compiled operations are shared between the losses), in two uneven shares; every
tenth accepted one over nodes as well, compiled.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lensjax.execute.place import device_mesh
from lensjax.passes.emit import emit
from tests.split.harness import apart, micro, nodes, numbers, program, run

N, D = 8, 6

# (batch, D) -> (batch, D): each a layer that a model may have, harmless or not.
LAYERS = {
    "product": lambda k, h, p, b: jnp.tanh(h @ p),
    "softmax": lambda k, h, p, b: jax.nn.softmax(h, 1),
    "leaky": lambda k, h, p, b: jnp.where(h > 0, h, 0.1 * h),
    "layer_norm": lambda k, h, p, b: (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1),
    "batch_norm": lambda k, h, p, b: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1),
    "embedding": lambda k, h, p, b: h + p[b["y"]],
    "segments": lambda k, h, p, b: h + jnp.tanh(jax.ops.segment_sum(h, b["y"], D))[b["y"]],
    "covariance": lambda k, h, p, b: h @ (h.T @ h) / h.shape[0],
    "running": lambda k, h, p, b: jnp.cumsum(h, 1) * 0.3,
    "sorted": lambda k, h, p, b: jnp.sort(h, 1),
    "dropout": lambda k, h, p, b: h * jax.random.bernoulli(jax.random.key(k), 0.7, h.shape),
    "dropout_turned": lambda k, h, p, b: (h.T * jax.random.bernoulli(jax.random.key(k), 0.7, h.T.shape)).T,
    "index": lambda k, h, p, b: h * (1 + jnp.arange(h.shape[0]))[:, None] * 0.2,
    "scaled": lambda k, h, p, b: h * jnp.tanh(h.mean()),
    "divided": lambda k, h, p, b: h / (1 + (h**2).sum()),
    "turned": lambda k, h, p, b: jnp.tanh(h.reshape(-1, 2, 3).transpose(1, 0, 2)).transpose(1, 0, 2).reshape(h.shape),
    "flat": lambda k, h, p, b: jnp.sin(h.reshape(-1)).reshape(h.shape),
    "mixed": lambda k, h, p, b: h.T.reshape(h.shape),
    "two_views": lambda k, h, p, b: jnp.multiply(*jnp.split(jnp.concatenate([h, 0.5 * h], 0) @ p, 2)),
    "loop": lambda k, h, p, b: lax.scan(lambda c, _: (jnp.tanh(c @ p), c.sum(1)), h, None, length=3)[0],
    "loop_norm": lambda k, h, p, b: lax.scan(lambda c, _: (jnp.tanh((c - c.mean(0)) @ p), None), h, None, length=2)[0],
    "branch": lambda k, h, p, b: lax.cond(h.mean() > 0, lambda: h * 2, lambda: jnp.tanh(h @ p)),
    "branch_same": lambda k, h, p, b: lax.cond(p[0, 0] > 0, lambda: h * 2, lambda: h + h.mean(0)),
    "picked": lambda k, h, p, b: h * h[jnp.arange(h.shape[0]), b["y"]][:, None],
    "taken": lambda k, h, p, b: h - jnp.take_along_axis(h, b["y"][:, None], 1),
    "weighted": lambda k, h, p, b: h * b["x"][:, :1],
    "remat": lambda k, h, p, b: jax.checkpoint(lambda h: jnp.sin(h @ p))(h),
    "outer": lambda k, h, p, b: jax.vmap(lambda a: a * jnp.outer(a, a).sum(0))(h) * 0.1,
    "centred": lambda k, h, p, b: h - lax.stop_gradient(h.mean(0)),
    "largest": lambda k, h, p, b: h * (h >= lax.top_k(h, 2)[0][:, 1:]),
    "binned": lambda k, h, p, b: h / (1 + jnp.bincount(b["y"], length=D))[b["y"]][:, None],
    "rolled": lambda k, h, p, b: h + jnp.roll(h, 1, 0) * 0.1,
    "reversed": lambda k, h, p, b: h[:, ::-1],
}
LOSSES = {
    "mean": lambda h, p, b: h.mean(),
    "squares": lambda h, p, b: (h**2).sum() * 0.01,
    "weighted": lambda h, p, b: (h[:, 0] * jnp.abs(b["x"][:, 0])).sum() / jnp.abs(b["x"][:, 0]).sum(),
    "logsumexp": lambda h, p, b: jax.nn.logsumexp(h.sum(1)),
    "deviation": lambda h, p, b: jnp.sqrt(h.var() + 0.1),
    "squared_means": lambda h, p, b: (h.mean(0) ** 2).sum(),
    "decay": lambda h, p, b: h.mean() + 0.1 * (p**2).sum(),
    "focal": lambda h, p, b: (h[:, 0] ** 3).sum() / (1 + (h[:, 1] ** 2).sum()),
}


def make(seed: int):
    r = np.random.RandomState(seed)
    layers = [list(LAYERS)[r.randint(len(LAYERS))] for _ in range(r.randint(2, 5))]
    losses = [list(LOSSES)[r.randint(len(LOSSES))] for _ in range(r.randint(1, 3))]

    def step(p, b):
        def loss(p):
            h = b["x"]
            for i, name in enumerate(layers):
                h = LAYERS[name](seed + i, h, p, b)
            return sum(LOSSES[name](h, p, b) for name in losses), h

        (value, h), g = jax.value_and_grad(loss, has_aux=True)(p)
        norm = jnp.sqrt((g**2).sum())
        return p - 0.1 * g / jnp.maximum(norm, 1), {"loss": value, "h": h, "norm": norm, "g": g}

    r = np.random.RandomState(1)
    args = (
        jnp.asarray(r.randn(D, D) * 0.4),
        {"x": jnp.asarray(r.randn(N, D)), "y": jnp.asarray(r.randint(0, D, N), jnp.int32)},
    )
    return step, args, layers + losses


def check(seeds) -> collections.Counter:
    found: collections.Counter = collections.Counter()
    plan = micro(1, share=5)
    with jax.enable_x64(True):
        for seed in seeds:
            step, args, names = make(seed)
            p = program(step, args)
            found["node" if p.split.node else "refused"] += 1
            if not p.split.node:
                continue
            expected = numbers(jax.tree.leaves(step(*args)))
            if p.split.micro:
                found["micro"] += 1
                emitted = emit(p, plan, device_mesh(plan.mesh, jax.devices()[:1]))
                error = apart(numbers(emitted.run(*p.call.leaves)), expected)
                assert error <= 1e-9, f"seed {seed} {names}: {error:.1e} in micro-batches"
            if found["node"] % 10 == 1:
                error = apart(run(p, nodes(2)), expected)
                assert error <= 1e-9, f"seed {seed} {names}: {error:.1e} over nodes"
    return found


def test_a_few_random_losses():
    assert check(range(1000, 1003))["node"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_losses(start):
    found = check(range(start, start + 50))
    assert found["micro"] >= 5 and found["refused"] >= 5, found
