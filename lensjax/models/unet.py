"""The U-Net of Stable Diffusion 1 (arXiv:2112.10752; 860 million parameters): noise prediction in a latent space, with
attention over the text at three of its four resolutions."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class UnetConfig:
    """`channels` of each resolution, `attends` whether it has attention; `side` of the latent image, `text` its tokens
    and their width; `remat`: blocks are recomputed whole."""

    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    attends: tuple[bool, ...] = (True, True, True, False)
    blocks: int = 2
    heads: int = 8
    side: int = 64
    latent: int = 4
    text: tuple[int, int] = (77, 768)
    groups: int = 32
    dtype: Any = jnp.bfloat16
    remat: bool = True


CONFIGS = {
    "unet-sd": UnetConfig(),
    "unet-tiny": UnetConfig((16, 32), (True, False), blocks=1, heads=2, side=16, text=(8, 16), groups=4),
}


class Residual(nn.Module):
    """[batch, side, side, channels] and the time's vector -> [batch, side, side, features]."""

    features: int
    config: UnetConfig

    @nn.compact
    def __call__(self, x, time):
        c = self.config
        norm = lambda name: nn.GroupNorm(num_groups=c.groups, dtype=c.dtype, name=name)
        y = nn.Conv(self.features, (3, 3), dtype=c.dtype, name="conv_1")(nn.silu(norm("norm_1")(x)))
        y = y + nn.Dense(self.features, dtype=c.dtype, name="time")(nn.silu(time))[:, None, None, :]
        y = nn.Conv(self.features, (3, 3), dtype=c.dtype, name="conv_2")(nn.silu(norm("norm_2")(y)))
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1), dtype=c.dtype, name="skip")(x)
        return x + y


class Transformer(nn.Module):
    """Attention over the image, then over the text, then a gated MLP; the image's pixels are the tokens."""

    config: UnetConfig

    @nn.compact
    def __call__(self, x, text):
        c, width = self.config, x.shape[-1]
        tokens = nn.GroupNorm(num_groups=c.groups, dtype=c.dtype, name="norm")(x).reshape(x.shape[0], -1, width)
        norm = lambda name: nn.LayerNorm(dtype=c.dtype, name=name)
        for name, source in (("self", None), ("cross", text)):
            h = norm(f"{name}_norm")(tokens)
            attention = nn.MultiHeadDotProductAttention(c.heads, dtype=c.dtype, qkv_features=width, name=name)
            tokens = tokens + attention(h, h if source is None else source)
        h = norm("mlp_norm")(tokens)
        up, gate = (nn.Dense(4 * width, dtype=c.dtype, name=n)(h) for n in ("up", "gate"))
        tokens = tokens + nn.Dense(width, dtype=c.dtype, name="down")(up * nn.gelu(gate))
        return x + tokens.reshape(x.shape)


class Unet(nn.Module):
    """Latents [batch, side, side, latent], times float32[batch], text [batch, tokens, width] -> the noise in them."""

    config: UnetConfig

    @nn.compact
    def __call__(self, x, time, text):
        c = self.config
        frequency = 10_000.0 ** (-jnp.arange(c.channels[0] // 2) / (c.channels[0] // 2))
        angle = time[:, None] * frequency
        time = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)
        for name in ("time_1", "time_2"):
            time = nn.Dense(4 * c.channels[0], dtype=c.dtype, name=name)(nn.silu(time) if name == "time_2" else time)
        x = nn.Conv(c.channels[0], (3, 3), dtype=c.dtype, name="stem")(x)
        skips = [x]
        for level, (features, attends) in enumerate(zip(c.channels, c.attends)):
            for block in range(c.blocks):
                x = self._block(f"down_{level}_{block}", x, time, text, features, attends)
                skips.append(x)
            if level + 1 < len(c.channels):
                x = nn.Conv(features, (3, 3), (2, 2), dtype=c.dtype, name=f"shrink_{level}")(x)
                skips.append(x)
        x = self._block("middle_1", x, time, text, c.channels[-1], True)
        x = self._block("middle_2", x, time, text, c.channels[-1], False)
        for level, (features, attends) in reversed(list(enumerate(zip(c.channels, c.attends)))):
            for block in range(c.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], -1)
                x = self._block(f"up_{level}_{block}", x, time, text, features, attends)
            if level:
                x = jax.image.resize(x, (x.shape[0], x.shape[1] * 2, x.shape[2] * 2, x.shape[3]), "nearest")
                x = nn.Conv(features, (3, 3), dtype=c.dtype, name=f"grow_{level}")(x)
        x = nn.silu(nn.GroupNorm(num_groups=c.groups, dtype=c.dtype, name="norm")(x))
        return nn.Conv(c.latent, (3, 3), dtype=jnp.float32, name="out")(x)

    def _block(self, name, x, time, text, features, attends):
        again = nn.remat if self.config.remat else lambda module: module
        x = again(Residual)(features, self.config, name=f"{name}_residual")(x, time)
        return again(Transformer)(self.config, name=f"{name}_attention")(x, text) if attends else x


def create_state(config: UnetConfig, rng: jax.Array, tx: optax.GradientTransformation) -> TrainState:
    model, side = Unet(config), (1, config.side, config.side, config.latent)
    params = model.init(rng, jnp.zeros(side), jnp.zeros((1,)), jnp.zeros((1, *config.text)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, Any]]:
    """Noise prediction; batch: `latent` and `noise` [batch, side, side, latent], `time` float32[batch] in [0, 1),
    `text` [batch, tokens, width]."""

    def loss_fn(params):
        share = batch["time"][:, None, None, None]
        noisy = jnp.sqrt(1 - share) * batch["latent"] + jnp.sqrt(share) * batch["noise"]
        found = state.apply_fn({"params": params}, noisy, batch["time"] * 1000, batch["text"])
        return jnp.mean((found - batch["noise"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}
