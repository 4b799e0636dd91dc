"""A diffusion U-Net predicts the noise in images: convolutions, skip connections, time steps drawn per example."""

import demo
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, time):
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))
        h = h + nn.Dense(self.width)(time)[:, None, None]
        return nn.Conv(self.width, (1, 1))(x) + nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(4)(h)))


class UNet(nn.Module):
    """Noisy images float32[batch, 16, 16, 1] and times float32[batch] in [0, 1] -> the noise."""

    @nn.compact
    def __call__(self, x, time):
        frequencies = jnp.exp(jnp.linspace(0.0, 4.0, 16))
        time = nn.silu(nn.Dense(64)(jnp.sin(time[:, None] * frequencies)))
        top = Block(16)(nn.Conv(16, (3, 3))(x), time)
        low = Block(32)(nn.avg_pool(top, (2, 2), (2, 2)), time)
        low = Block(32)(low, time)
        up = jax.image.resize(low, (*top.shape[:3], low.shape[3]), "nearest")
        return nn.Conv(1, (3, 3))(Block(16)(jnp.concatenate([top, up], -1), time))


def create(rng):
    params = UNet().init(rng, jnp.zeros((1, 16, 16, 1)), jnp.zeros(1))["params"]
    return TrainState.create(apply_fn=UNet().apply, params=params, tx=optax.adam(2e-3))


def train_step(state, batch):
    def loss_fn(params):
        # The same noise at every step: the example shows a falling loss on one batch.
        time = jax.random.uniform(jax.random.key(1), (batch["image"].shape[0],))
        noise = jax.random.normal(jax.random.key(2), batch["image"].shape)
        keep = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
        noisy = keep * batch["image"] + jnp.sqrt(1 - keep**2) * noise
        return ((state.apply_fn({"params": params}, noisy, time) - noise) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def batch_of(rng):
    return {"image": rng.random((16, 16, 16, 1), "float32")}


if __name__ == "__main__":
    demo.run(train_step, create, batch_of)
