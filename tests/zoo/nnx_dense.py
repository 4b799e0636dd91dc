"""NNX, dense models: an MLP in the split form (graphdef and state), two towers, LoRA with frozen base parameters."""

import itertools

import jax.numpy as jnp
import optax
from flax import nnx

from tests.zoo import lora, mlp, two_tower
from tests.zoo.base import Case, Family, probe


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(24, 64, rngs=rngs)
        self.second = nnx.Linear(64, 36, rngs=rngs)
        self.head = nnx.Linear(36, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))


def make_mlp(with_grads=False):
    note = probe(with_grads)

    def init(rng):
        model = MLP(nnx.Rngs(rng))
        return nnx.split((model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)))

    def step(graphdef, state, batch):
        model, optimizer = nnx.merge(graphdef, state)

        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), note({"loss": loss}, grads)

    return Case(step, init, mlp.make().batch)


class Tower(nnx.Module):
    def __init__(self, features, rngs):
        self.up = nnx.Linear(features, 48, rngs=rngs)
        self.down = nnx.Linear(48, 20, rngs=rngs)

    def __call__(self, x):
        x = self.down(nnx.gelu(self.up(x)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class TwoTower(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(70, 16, rngs=rngs)
        self.image, self.text = Tower(28, rngs), Tower(16, rngs)
        self.scale = nnx.Param(jnp.asarray(2.0, jnp.float32))

    def __call__(self, image, words):
        text = self.text(self.words(words).mean(axis=1))
        return jnp.exp(self.scale[...]) * self.image(image) @ text.T


def make_two_tower(with_grads=False):
    note = probe(with_grads)

    def init(rng):
        model = TwoTower(nnx.Rngs(rng))
        return model, nnx.Optimizer(model, optax.lion(1e-3), wrt=nnx.Param)

    def step(model, optimizer, batch):
        def loss_fn(model):
            scores = model(batch["image"], batch["words"])
            same = jnp.arange(scores.shape[0])
            both = [optax.softmax_cross_entropy_with_integer_labels(s, same).mean() for s in (scores, scores.T)]
            return (both[0] + both[1]) / 2

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return note({"loss": loss}, grads)

    return Case(step, init, two_tower.make().batch)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        sizes = (24, lora.WIDTH, lora.WIDTH, lora.WIDTH, 10)
        base = [nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)]
        self.layers = nnx.List(
            [nnx.LoRA(m.in_features, lora.RANK, m.out_features, base_module=m, rngs=rngs) for m in base]
        )

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.gelu(layer(x))
        return self.layers[-1](x)


def make_lora(with_grads=False):
    note = probe(with_grads)
    only_lora = nnx.DiffState(0, nnx.LoRAParam)

    def init(rng):
        model = Adapted(nnx.Rngs(rng))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, batch):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn, argnums=only_lora)(model)
        optimizer.update(model, grads)
        return note({"loss": loss}, grads)

    return Case(step, init, lora.make().batch)


MLP_SPLIT = Family("nnx_mlp_split", make_mlp, "sgd with momentum", "step(graphdef, state, batch)", form="split")
TWO_TOWER = Family(
    "nnx_two_tower", make_two_tower, "lion", "modules updated in place; a scalar parameter", form="modules"
)
LORA = Family("nnx_lora", make_lora, "adamw", "under nnx.jit; gradients of LoRAParam only", form="modules")
