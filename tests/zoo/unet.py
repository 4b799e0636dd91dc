"""A denoising U-Net: transposed convolutions, skips by concatenation, GroupNorm, noise drawn in the step, an EMA."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Case, Family, probe

ROWS, SIDE = 16, 8


class Conv(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, time):
        x = nn.silu(nn.GroupNorm(num_groups=4)(nn.Conv(self.features, (3, 3))(x)))
        return x + nn.Dense(self.features)(time)[:, None, None, :]


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * (2.0 ** jnp.arange(4, dtype=x.dtype))
        time = nn.silu(nn.Dense(16)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)))
        fine = Conv(8)(x, time)
        coarse = Conv(16)(nn.avg_pool(fine, (2, 2), strides=(2, 2)), time)
        middle = Conv(16)(coarse, time)
        up = nn.ConvTranspose(8, (2, 2), strides=(2, 2))(jnp.concatenate([coarse, middle], axis=-1))
        return nn.Conv(x.shape[-1], (1, 1))(Conv(8)(jnp.concatenate([up, fine], axis=-1), time))


def make(with_grads=False):
    model, note, tx = UNet(), probe(with_grads), optax.adam(2e-3)

    def init(rng):
        k_params, k_noise = jax.random.split(rng)
        params = model.init(k_params, jnp.zeros((1, SIDE, SIDE, 3)), jnp.zeros((1,)))["params"]
        ema = jax.tree.map(jnp.array, params)
        # A raw key, as code from before typed keys has it.
        return {"params": params, "ema": ema, "opt": tx.init(params), "rng": jax.random.key_data(k_noise)}

    def batch(rng):
        return jax.random.normal(rng, (ROWS, SIDE, SIDE, 3))

    def step(state, images):
        rng, k_time, k_noise = jax.random.split(state["rng"], 3)

        def loss_fn(params):
            time = jax.random.uniform(k_time, (images.shape[0],), images.dtype)
            noise = jax.random.normal(k_noise, images.shape, images.dtype)
            share = time[:, None, None, None]
            noisy = jnp.sqrt(1 - share) * images + jnp.sqrt(share) * noise
            return jnp.mean((model.apply({"params": params}, noisy, time) - noise) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(params, state["ema"], 0.01)
        return {"params": params, "ema": ema, "opt": opt, "rng": rng}, note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family("unet", make, "adam", "raw key split in the step; EMA copy of the parameters; batch is a bare array")
