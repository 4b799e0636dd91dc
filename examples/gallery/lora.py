"""LoRA fine-tuning: the frozen base is split over the devices, only the small factors are trained."""

import demo
import jax
import jax.numpy as jnp
import optax

WIDTH, LAYERS, RANK = 128, 4, 8
TX = optax.adam(1e-2)


def create(rng):
    """{"base": frozen, "lora": trained, "opt": moments of the trained part alone}."""
    keys = jax.random.split(rng, LAYERS)
    base = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]
    lora = [{"a": jax.random.normal(k, (WIDTH, RANK)) * 0.1, "b": jnp.zeros((RANK, WIDTH))} for k in keys]
    return {"base": base, "lora": lora, "opt": TX.init(lora)}


def predict(base, lora, x):
    for w, small in zip(base, lora):
        x = x + jnp.tanh(x @ w + (x @ small["a"]) @ small["b"])
    return x


def train_step(state, batch):
    def loss_fn(lora):
        return ((predict(state["base"], lora, batch["x"]) - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["lora"])
    updates, opt = TX.update(grads, state["opt"])
    return {**state, "lora": optax.apply_updates(state["lora"], updates), "opt": opt}, {"loss": loss}


def batch_of(rng):
    x = rng.standard_normal((32, WIDTH), "float32")
    return {"x": x, "y": x[:, ::-1].copy()}


if __name__ == "__main__":
    demo.run(train_step, create, batch_of, plan="fsdp")
