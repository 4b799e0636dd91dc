"""Targets beside the built-in decoders for `benchmarks/verify.py`: a mixture of experts, a ViT, a U-Net.

Each `NAME(batch)` gives (step, (state, batch)) as shapes. Sizes are those of Mixtral-like, ViT-L/16 (arXiv:2010.11929)
and Stable-Diffusion-like (arXiv:2112.10752) models, layers scanned where they repeat.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from lensjax.models.decoder import Attention, Config

BF16 = jnp.bfloat16


class _Experts(nn.Module):
    """Eight experts, two a token, with a capacity (GShard, arXiv:2006.16668)."""

    width: int
    hidden: int
    experts: int = 8

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.02)
        up = self.param("up", init, (self.experts, self.width, self.hidden), jnp.float32).astype(BF16)
        down = self.param("down", init, (self.experts, self.hidden, self.width), jnp.float32).astype(BF16)
        gate = jax.nn.softmax(nn.Dense(self.experts, use_bias=False, dtype=jnp.float32, name="router")(x), axis=-1)
        weight, index = jax.lax.top_k(gate, 2)
        capacity = x.shape[1] * 2 // self.experts + 4
        chosen = jax.nn.one_hot(index, self.experts, dtype=BF16)
        flat = chosen.swapaxes(1, 2).reshape(x.shape[0], -1, self.experts)
        place = (jnp.cumsum(flat, axis=1) - flat).reshape(x.shape[0], 2, x.shape[1], self.experts).swapaxes(1, 2)
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=BF16) * chosen[..., None]
        combine = jnp.einsum("bst,bstec->bsec", weight.astype(BF16), slot)
        sent = jnp.einsum("bsec,bsd->ebcd", slot.sum(axis=2), x)
        back = jnp.einsum("ebch,ehd->ebcd", nn.gelu(jnp.einsum("ebcd,edh->ebch", sent, up)), down)
        return jnp.einsum("bsec,ebcd->bsd", combine, back)


class _MoeLayer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        x = x + Attention(c, name="attention")(nn.RMSNorm(dtype=BF16)(x))
        return x + _Experts(c.width, c.mlp, name="experts")(nn.RMSNorm(dtype=BF16)(x)), None


class _Moe(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        x = nn.Embed(c.vocab, c.width, dtype=BF16, name="embed")(tokens)
        layers = nn.scan(nn.remat(_MoeLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
        x, _ = layers(c, name="layers")(x, None)
        return nn.Dense(c.vocab, use_bias=False, dtype=BF16, name="head")(nn.RMSNorm(dtype=BF16)(x)).astype(jnp.float32)


class _VitLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm(dtype=BF16)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=16, dtype=BF16)(h, h)
        h = nn.LayerNorm(dtype=BF16)(x)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=BF16)(h))
        return x + nn.Dense(x.shape[-1], dtype=BF16)(h), None


class _Vit(nn.Module):
    layers: int = 24
    width: int = 1024

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.width, (16, 16), strides=(16, 16), dtype=BF16, name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], self.width)).astype(BF16)
        scanned = nn.scan(_VitLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x, _ = scanned(name="layers")(x, None)
        return nn.Dense(1000, dtype=jnp.float32, name="head")(x.mean(axis=1))


class _Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        h = nn.silu(nn.GroupNorm(num_groups=32, dtype=BF16)(x))
        h = nn.Conv(self.features, (3, 3), dtype=BF16)(h)
        h = nn.Conv(self.features, (3, 3), dtype=BF16)(nn.silu(nn.GroupNorm(num_groups=32, dtype=BF16)(h)))
        return h + (x if x.shape[-1] == self.features else nn.Conv(self.features, (1, 1), dtype=BF16)(x))


class _UNet(nn.Module):
    widths: tuple[int, ...] = (320, 640, 1280)

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.widths[0], (3, 3), dtype=BF16)(x)
        kept = []
        for width in self.widths:
            x = _Block(width)(_Block(width)(x))
            kept.append(x)
            x = nn.Conv(width, (3, 3), strides=(2, 2), dtype=BF16)(x)
        x = _Block(self.widths[-1])(x)
        for width, skip in zip(reversed(self.widths), reversed(kept)):
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2), dtype=BF16)(x)
            x = _Block(width)(_Block(width)(jnp.concatenate([x, skip], axis=-1)))
        return nn.Conv(4, (3, 3), dtype=jnp.float32)(x)


def _step(loss):
    def step(state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(state.apply_fn, p, batch))(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


def _made(model, example, loss, batch):
    def create():
        params = model.init(jax.random.key(0), jnp.zeros((1, *example.shape[1:]), example.dtype))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4))

    return _step(loss), (jax.eval_shape(create), batch)


def moe(batch: int):
    """A decoder of 16 layers of width 2048 with 8 experts of 7168, sequence 2048: 4.1 billion parameters."""
    config = Config(vocab=32_000, width=2048, layers=16, heads=16, kv_heads=8, mlp=7168)
    shape = jax.ShapeDtypeStruct((batch, 2048), jnp.int32)

    def loss(apply, params, b):
        logits = apply({"params": params}, b["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, b["targets"]).mean()

    return _made(_Moe(config), shape, loss, {"inputs": shape, "targets": shape})


def vit(batch: int):
    """ViT-L/16 on 224 x 224 images: 304 million parameters."""
    images = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32)

    def loss(apply, params, b):
        logits = apply({"params": params}, b["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, b["label"]).mean()

    return _made(_Vit(), images, loss, {"image": images, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)})


def unet(batch: int):
    """A U-Net of widths 320, 640, 1280 on 64 x 64 latents, unrolled: 340 million parameters."""
    latents = jax.ShapeDtypeStruct((batch, 64, 64, 4), jnp.float32)

    def loss(apply, params, b):
        return jnp.mean((apply({"params": params}, b["noisy"]) - b["noise"]) ** 2)

    return _made(_UNet(), latents, loss, {"noisy": latents, "noise": latents})
