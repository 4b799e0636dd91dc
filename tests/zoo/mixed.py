"""float16 with a dynamic loss scale, as Flax's own examples do it: an overflow keeps the old state."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import dynamic_scale, train_state

from tests.zoo.base import Case, Family, probe


class TrainState(train_state.TrainState):
    dynamic_scale: Any


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(64, dtype=jnp.float16)(x))
        x = nn.LayerNorm(dtype=jnp.float16)(nn.gelu(nn.Dense(36, dtype=jnp.float16)(x)))
        return nn.Dense(10, dtype=jnp.float16)(x)


def make(with_grads=False):
    model, note = MLP(), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, 24)))["params"]
        scale = dynamic_scale.DynamicScale(growth_interval=5, scale=2.0**10)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3), dynamic_scale=scale)

    def batch(rng):
        kx, ky = jax.random.split(rng)
        return {"x": jax.random.normal(kx, (16, 24)), "label": jax.random.randint(ky, (16,), 0, 10)}

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        scale, finite, loss, grads = state.dynamic_scale.value_and_grad(loss_fn)(state.params)
        new = state.apply_gradients(grads=grads)

        def keep(now, before):
            return jax.tree.map(lambda n, b: jnp.where(finite, n, b), now, before)

        new = new.replace(
            params=keep(new.params, state.params), opt_state=keep(new.opt_state, state.opt_state), dynamic_scale=scale
        )
        return new, note({"loss": loss, "scale": scale.scale, "finite": finite}, grads)

    return Case(step, init, batch)


FAMILY = Family(
    "float16_dynamic_scale", make, "adamw", "DynamicScale in the state; old state on overflow", dtype="float16"
)
