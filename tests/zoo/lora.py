"""LoRA (arXiv:2106.09685): a frozen base, and low-rank updates that alone have gradients and moments."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Case, Family, probe

WIDTH, RANK = 48, 4


class Dense(nn.Module):
    """A dense layer whose low-rank part lives in a collection of its own."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        down = self.variable(
            "lora", "down", lambda: 0.1 * jax.random.normal(self.make_rng("params"), (x.shape[-1], RANK))
        )
        up = self.variable("lora", "up", lambda: jnp.zeros((RANK, self.features)))
        return x @ kernel + (x @ down.value) @ up.value


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.gelu(Dense(WIDTH)(x))
        return Dense(10)(x)


def make(with_grads=False):
    model, note = Model(), probe(with_grads)

    def label(path, _):
        return "up" if path[-1].key == "up" else "down"

    # Twice the learning rate for one factor (LoRA+, arXiv:2402.12354).
    tx = optax.multi_transform(
        {"up": optax.adamw(1e-2), "down": optax.adamw(5e-3)}, lambda p: jax.tree_util.tree_map_with_path(label, p)
    )

    def init(rng):
        variables = model.init(rng, jnp.zeros((1, 24)))
        return {"base": variables["params"], "lora": variables["lora"], "opt": tx.init(variables["lora"])}

    def batch(rng):
        kx, ky = jax.random.split(rng)
        return {"x": jax.random.normal(kx, (16, 24)), "label": jax.random.randint(ky, (16,), 0, 10)}

    def step(state, batch):
        def loss_fn(lora):
            logits = model.apply({"params": state["base"], "lora": lora}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["lora"])
        updates, opt = tx.update(grads, state["opt"], state["lora"])
        return {**state, "lora": optax.apply_updates(state["lora"], updates), "opt": opt}, note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family("lora", make, "multi_transform of two adamw", "frozen parameters; gradients of a collection only")
