"""CNN with BatchNorm: a mutable collection of running statistics beside the parameters, means over the whole batch."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from tests.zoo.base import Case, Family, probe


class TrainState(train_state.TrainState):
    batch_stats: Any


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        for features in (12, 24):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(48)(x))
        return nn.Dense(10)(x)


def make(with_grads=False):
    model, note = CNN(), probe(with_grads)

    def init(rng):
        variables = model.init(rng, jnp.zeros((1, 12, 12, 3)), train=False)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        return TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
        )

    def batch(rng):
        kx, ky = jax.random.split(rng)
        return {"image": jax.random.normal(kx, (16, 12, 12, 3)), "label": jax.random.randint(ky, (16,), 0, 10)}

    def step(state, batch):
        def loss_fn(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (logits, updates)

        (loss, (logits, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return state, note({"loss": loss, "accuracy": accuracy}, grads)

    return Case(step, init, batch)


FAMILY = Family("cnn_batchnorm", make, "adamw, chained with clip", "mutable batch_stats; statistics over the batch")
