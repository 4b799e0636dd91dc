"""One host of `slow_link.py` on our side: four emulated devices, the step written by hand with `lensjax.comm`."""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from slow_link_model import BETA1, BETA2, EPS, HEADS, RATE, SEQ, WIDTH, parameters, serve

from lensjax import comm

# method -> (slow axes, fast axes, codec). "local" leaves the slow link out: what its steps take is no reduction.
# "local-CODEC" codes as CODEC does, on a mesh of this host alone: what it takes more than "local" is coding.
METHODS = {
    "local": ("gpu", (), "exact"),
    "flat": (("node", "gpu"), (), "exact"),
    "hierarchical": ("node", "gpu", "exact"),
    "bf16": ("node", "gpu", "bf16"),
    "int8": ("node", "gpu", comm.Policy("int8")),
    "int4": ("node", "gpu", comm.Policy("int4")),
    "powersgd": ("node", "gpu", comm.Policy("powersgd:4:stacked=1")),
}
METHODS |= {f"local-{name}": METHODS[name] for name in ("bf16", "int8", "int4", "powersgd")}


def loss_of(p: dict, tokens: jax.Array) -> jax.Array:
    norm = lambda h, g: h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6) * g
    mask = jnp.tril(jnp.ones((SEQ, SEQ), bool))

    def layer(h, w):
        q, k, v = jnp.split(norm(h, w["norm1"]) @ w["qkv"], 3, -1)
        heads = lambda x: x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)
        scores = heads(q) @ heads(k).swapaxes(2, 3) * (WIDTH // HEADS) ** -0.5
        mixed = jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ heads(v)
        h = h + mixed.swapaxes(1, 2).reshape(h.shape) @ w["out"]
        return h + jax.nn.gelu(norm(h, w["norm2"]) @ w["up"], approximate=True) @ w["down"], None

    layers = {k.removeprefix("layers/"): v for k, v in p.items() if k.startswith("layers/")}
    h, _ = lax.scan(layer, p["embed"][tokens[:, :-1]] + p["positions"], layers)
    logits = jax.nn.log_softmax(norm(h, p["norm"]) @ p["embed"].T)
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def make_step(mesh: Mesh, method: str):
    """(the compiled step, its first hidden state): a `shard_map` by hand, as a user of `lensjax.comm` writes it."""
    axes, inner, codec = METHODS[method]
    how = dict(axes=axes, inner=inner, codec=codec)
    residual = comm.init_state(parameters(), mesh=mesh, spec=P(), partial=True, **how)
    every = P(("node", "gpu"))

    def step(p, m, v, count, residual, tokens):
        loss, grads = jax.value_and_grad(lambda p: loss_of(p, tokens) / mesh.size)(p)
        grads, residual = comm.all_reduce(grads, axes, inner=inner, codec=codec, state=residual)
        count = count + 1
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, grads)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, grads)
        move = lambda p, m, v: p - RATE * (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPS)
        return jax.tree.map(move, p, m, v), m, v, count, residual, loss[None]

    specs = (P(), P(), P(), P(), every, every)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0, 1, 2, 4)), residual


def planned(mesh: Mesh, method: str) -> int:
    """Bytes that the plan of a reduction has a host put on the link: its devices' own, or those of the one device at
    which a ring over all devices leaves the host."""
    axes, inner, codec = METHODS[method]
    if method.startswith("local"):
        return 0
    sent = comm.reduction(
        parameters(), mesh=mesh, spec=P(), axes=axes, inner=inner, codec=codec, partial=True
    ).wire_bytes
    return sent if "gpu" in axes else sent * mesh.shape["gpu"]


def main() -> None:
    host, coordinator = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(coordinator, num_processes=2, process_id=host)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    alone = Mesh(np.array(jax.local_devices()).reshape(1, 4), mesh.axis_names, axis_types=mesh.axis_types)
    on = {method: alone if method.startswith("local-") else mesh for method in METHODS}
    place = lambda x, on, spec: jax.make_array_from_callback(x.shape, NamedSharding(on, spec), lambda i: x[i])
    compiled, states = {}, {}
    for method in METHODS:
        compiled[method], residual = make_step(on[method], method)
        zeros = lambda to=on[method]: {k: place(np.zeros_like(v), to, P()) for k, v in parameters().items()}
        start = {k: place(v, on[method], P()) for k, v in parameters().items()}
        states[method] = (start, zeros(), zeros(), place(np.zeros((), np.float32), on[method], P()), residual)

    def step(method: str, tokens: np.ndarray) -> float:
        if on[method] is alone:  # a host's part of the batch, as elsewhere
            tokens = np.split(tokens, 2)[host]
        *state, losses = compiled[method](*states[method], place(tokens, on[method], P(("node", "gpu"))))
        states[method] = tuple(state)
        # A device's loss is its part of the mean; this host's devices are a part of them.
        part = sum(float(np.asarray(s.data)[0]) for s in jax.block_until_ready(losses).addressable_shards)
        return part * on[method].size / 4

    serve(step, {m: planned(mesh, m) for m in METHODS})


main()
