"""A graph network: messages gathered along edges and summed by `segment_sum`; nodes and edges are both batch-like."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.base import Case, Family, probe

NODES, EDGES, WIDTH = 64, 192, 24


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, nodes, senders, receivers):
        x = nn.Dense(WIDTH)(nodes)
        for _ in range(2):
            message = nn.relu(nn.Dense(WIDTH)(jnp.concatenate([x[senders], x[receivers]], axis=-1)))
            total = jax.ops.segment_sum(message, receivers, num_segments=nodes.shape[0])
            count = jax.ops.segment_sum(jnp.ones_like(receivers, x.dtype), receivers, num_segments=nodes.shape[0])
            x = x + nn.Dense(WIDTH)(total / jnp.maximum(count, 1)[:, None])
        return nn.Dense(7)(nn.LayerNorm()(x))


def make(with_grads=False):
    model, note = GraphNet(), probe(with_grads)

    def init(rng):
        edges = jnp.zeros((4,), jnp.int32)
        params = model.init(rng, jnp.zeros((2, 12)), edges, edges)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(5e-3))

    def batch(rng):
        kx, ks, kr, ky = jax.random.split(rng, 4)
        return {
            "nodes": jax.random.normal(kx, (NODES, 12)),
            "senders": jax.random.randint(ks, (EDGES,), 0, NODES),
            "receivers": jax.random.randint(kr, (EDGES,), 0, NODES),
            "label": jax.random.randint(ky, (NODES,), 0, 7),
        }

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["nodes"], batch["senders"], batch["receivers"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family(
    "graph_segment_sum",
    make,
    "adamw",
    "64 nodes and 192 edges: two batch-like sizes; gathers across nodes",
    options={
        "batch_argnums": 1,
        "batch_axes": ({"nodes": 0, "label": 0, "senders": None, "receivers": None},),
    },
)
