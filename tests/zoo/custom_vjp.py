"""`jax.custom_vjp` twice: a cross entropy that keeps only the log-sum-exp, and a straight-through rounding."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Case, Family, probe


@jax.custom_vjp
def cross_entropy(logits, labels):
    """float[rows]: -log softmax(logits)[label]."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]


def _forward(logits, labels):
    total = jax.nn.logsumexp(logits, axis=-1)
    return total - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0], (logits, labels, total)


def _backward(kept, cotangent):
    logits, labels, total = kept
    probs = jnp.exp(logits - total[:, None])
    onehot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return cotangent[:, None] * (probs - onehot), None


cross_entropy.defvjp(_forward, _backward)


@jax.custom_vjp
def quantize(x):
    """x to the nearest 1/16; its gradient is that of x itself."""
    return jnp.round(x * 16) / 16


quantize.defvjp(lambda x: (quantize(x), None), lambda _, cotangent: (cotangent,))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (24, 56))
        x = nn.tanh(x @ quantize(kernel))
        return nn.Dense(12)(nn.tanh(nn.Dense(40)(x)))


def make(with_grads=False):
    model, note, tx = Model(), probe(with_grads), optax.adamw(3e-3)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, 24)))["params"]
        return {"params": params, "opt": tx.init(params)}

    def batch(rng):
        kx, ky = jax.random.split(rng)
        return {"x": jax.random.normal(kx, (16, 24)), "label": jax.random.randint(ky, (16,), 0, 12)}

    @jax.jit
    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch["label"]).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family("custom_vjp", make, "adamw", "custom gradients; a loss jitted inside the step")
