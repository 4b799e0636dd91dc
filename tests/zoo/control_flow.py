"""Control flow in the step: `lax.cond` and a `while_loop` (spectral norm) in the model, another on the gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.base import Case, Family, probe


def spectral_norm(weight):
    """The largest singular value by power iteration, until it settles or 20 rounds have passed."""
    weight = jax.lax.stop_gradient(weight)

    def settled(carry):
        i, _, value, before = carry
        return (i < 20) & (jnp.abs(value - before) > 1e-3)

    def turn(carry):
        i, v, value, _ = carry
        u = weight @ v
        v = weight.T @ (u / jnp.linalg.norm(u))
        return i + 1, v / jnp.linalg.norm(v), jnp.linalg.norm(v), value

    start = jnp.ones((weight.shape[1],), weight.dtype) / jnp.sqrt(weight.shape[1]).astype(weight.dtype)
    infinite = jnp.asarray(jnp.inf, weight.dtype)
    return jax.lax.while_loop(settled, turn, (0, start, jnp.zeros((), weight.dtype), infinite))[2]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, noisy):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (24, 64))
        x = nn.relu(x @ (kernel / spectral_norm(kernel)))
        x = jax.lax.cond(noisy, lambda h: h * 1.1 + 0.01, lambda h: h, x)
        return nn.Dense(10)(nn.relu(nn.Dense(40)(x)))


def backtrack(grads):
    """Halves the gradients until their norm is below 0.5."""

    def halve(g):
        return jax.tree.map(lambda x: x * 0.5, g)

    return jax.lax.while_loop(lambda g: optax.global_norm(g) > 0.5, halve, grads)


def make(with_grads=False):
    model, note = Model(), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, 24)), False)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.2))

    def batch(rng):
        kx, ky = jax.random.split(rng)
        return {"x": jax.random.normal(kx, (16, 24)), "label": jax.random.randint(ky, (16,), 0, 10)}

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"], state.step % 2 == 0)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=backtrack(grads)), note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family("control_flow", make, "sgd", "cond on the step number; while_loops whose trip counts are data")
