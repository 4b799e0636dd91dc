"""NNX, images: a CNN whose BatchNorm statistics and dropout counters live in the model; a ViT."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.zoo import cnn, vit
from tests.zoo.base import Case, Family, probe


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(3, 12, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(12, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(12, 24, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(24, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.Linear(216, 48, rngs=rngs)
        self.head = nnx.Linear(48, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), strides=(2, 2))
        x = self.drop(x.reshape(x.shape[0], -1))
        return self.head(nnx.relu(self.hidden(x)))


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, 32, (4, 4), strides=(4, 4), rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, 32), jnp.float32))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 17, 32), jnp.float32))
        self.blocks = nnx.List([Block(32, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.tile(self.token[...], (x.shape[0], 1, 1))
        x = jnp.concatenate([token, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def make(build, tx, batch, with_grads=False):
    note = probe(with_grads)

    def init(rng):
        model = build(nnx.Rngs(rng))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, batch):
        def loss_fn(model):
            logits = model(batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return note({"loss": loss, "accuracy": accuracy}, grads)

    return Case(step, init, batch)


def make_cnn(with_grads=False):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return make(CNN, tx, cnn.make().batch, with_grads)


def make_vit(with_grads=False):
    return make(ViT, optax.adam(1e-3), vit.make().batch, with_grads)


BATCHNORM = Family(
    "nnx_cnn_batchnorm", make_cnn, "adamw, chained with clip", "BatchStat and RngCount in the model", form="modules"
)
VIT = Family("nnx_vit", make_vit, "adam", "MultiHeadAttention; 17 positions", form="modules")
