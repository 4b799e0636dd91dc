"""A small ResNet, its step already under `jax.jit` with donation: strided and 1x1 convolutions, BatchNorm, skips."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Case, Family, probe
from tests.zoo.cnn import TrainState


class Residual(nn.Module):
    features: int
    strides: int

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = functools.partial(nn.Conv, use_bias=False)
        y = nn.relu(norm()(conv(self.features, (3, 3), self.strides)(x)))
        y = norm(scale_init=nn.initializers.constant(0.1))(conv(self.features, (3, 3))(y))
        if x.shape != y.shape:
            x = norm(name="skip_norm")(conv(self.features, (1, 1), self.strides, name="skip")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(8, (3, 3), use_bias=False, name="stem")(x))
        for features, strides in ((8, 1), (16, 2), (24, 2)):
            x = Residual(features, strides)(x, train)
        return nn.Dense(10, name="head")(x.mean(axis=(1, 2)))


def make(with_grads=False):
    model, note = ResNet(), probe(with_grads)

    def init(rng):
        variables = model.init(rng, jnp.zeros((1, 12, 12, 3)), train=False)
        tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9, nesterov=True))
        return TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
        )

    def batch(rng):
        kx, ky = jax.random.split(rng)
        return jax.random.normal(kx, (16, 12, 12, 3)), jax.random.randint(ky, (16,), 0, 10)

    def loss_fn(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, images, train=True, mutable=["batch_stats"])
        onehot = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
        return optax.softmax_cross_entropy(logits, onehot).mean(), updates["batch_stats"]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = grad_fn(state.params, state.batch_stats, *batch)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family(
    "resnet", make, "sgd with nesterov and weight decay", "step already jitted with donation; batch a tuple"
)
