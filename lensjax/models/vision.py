"""Image models: ViT-g/14 (arXiv:2106.04560, table 2) and Alpa's Wide-ResNets (arXiv:2201.12023, table 6)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state


@dataclasses.dataclass(frozen=True)
class VitConfig:
    """A plain vision transformer; `image` and `patch` are the sides of squares; `remat`: layers are made again."""

    width: int = 1408
    layers: int = 40
    heads: int = 16
    mlp: int = 6144
    patch: int = 14
    image: int = 224
    classes: int = 1000
    dtype: Any = jnp.bfloat16
    remat: bool = True


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Bottleneck ResNet: `base` channels of the first stage, `width`: what a block's middle convolution widens them by,
    `blocks` in each stage (50 layers: 3, 4, 6, 3). Alpa trains in float32 on 224 x 224 images with 1024 classes.
    """

    base: int
    width: int
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    image: int = 224
    classes: int = 1024
    dtype: Any = jnp.float32


_101 = (3, 4, 23, 3)
CONFIGS: dict[str, VitConfig | ResNetConfig] = {
    "vit-g": VitConfig(),
    "vit-tiny": VitConfig(width=32, layers=2, heads=4, mlp=64, patch=4, image=16, classes=16),
    "wide-resnet-250m": ResNetConfig(160, 2),
    "wide-resnet-500m": ResNetConfig(224, 2),
    "wide-resnet-1b": ResNetConfig(320, 2),
    "wide-resnet-2b": ResNetConfig(448, 2),
    "wide-resnet-4b": ResNetConfig(640, 2),
    "wide-resnet-6.8b": ResNetConfig(320, 16),
    "wide-resnet-13b": ResNetConfig(320, 16, _101),
    "wide-resnet-tiny": ResNetConfig(8, 2, (1, 1), image=32, classes=16),
}


class VitLayer(nn.Module):
    """One pre-norm layer in `nn.scan`'s form: [batch, patches, width]."""

    config: VitConfig

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        h = nn.LayerNorm(dtype=c.dtype, name="attention_norm")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=c.heads, dtype=c.dtype, name="attention")(h, h)
        h = nn.LayerNorm(dtype=c.dtype, name="mlp_norm")(x)
        h = nn.gelu(nn.Dense(c.mlp, dtype=c.dtype, name="up")(h))
        return x + nn.Dense(c.width, dtype=c.dtype, name="down")(h), None


class Vit(nn.Module):
    """Images [batch, side, side, 3] -> logits float32[batch, classes], from the mean over patches."""

    config: VitConfig

    @nn.compact
    def __call__(self, images):
        c = self.config
        x = nn.Conv(c.width, (c.patch,) * 2, strides=(c.patch,) * 2, dtype=c.dtype, name="patches")(images)
        x = x.reshape(x.shape[0], -1, c.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:])).astype(c.dtype)
        layer = nn.remat(VitLayer, prevent_cse=False) if c.remat else VitLayer
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
        x, _ = scanned(c, name="layers")(x, None)
        x = nn.LayerNorm(dtype=c.dtype, name="norm")(x).mean(axis=1)
        return nn.Dense(c.classes, dtype=c.dtype, name="head")(x).astype(jnp.float32)


class Bottleneck(nn.Module):
    features: int
    strides: int
    config: ResNetConfig

    @nn.compact
    def __call__(self, x, train):
        c = self.config
        conv = functools.partial(nn.Conv, use_bias=False, dtype=c.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=c.dtype)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features * c.width, (3, 3), (self.strides,) * 2)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(self.features * 4, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="skip_norm")(conv(self.features * 4, (1, 1), (self.strides,) * 2, name="skip")(x))
        return nn.relu(x + y)


class WideResNet(nn.Module):
    """Images [batch, side, side, 3] -> logits float32[batch, classes]."""

    config: ResNetConfig

    @nn.compact
    def __call__(self, images, train):
        c = self.config
        x = nn.Conv(c.base, (7, 7), (2, 2), use_bias=False, dtype=c.dtype, name="stem")(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, dtype=c.dtype, name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, count in enumerate(c.blocks):
            for block in range(count):
                strides = 2 if stage and not block else 1
                x = Bottleneck(c.base * 2**stage, strides, c, name=f"stage_{stage}_block_{block}")(x, train)
        return nn.Dense(c.classes, dtype=c.dtype, name="head")(x.mean(axis=(1, 2))).astype(jnp.float32)


class TrainState(train_state.TrainState):
    """With the running statistics of the BatchNorms ({} for a model without)."""

    batch_stats: Any


def create_state(config: VitConfig | ResNetConfig, rng: jax.Array, tx: optax.GradientTransformation) -> TrainState:
    images = jnp.zeros((1, config.image, config.image, 3))
    if isinstance(config, VitConfig):
        model, variables = Vit(config), Vit(config).init(rng, images)
    else:
        model, variables = WideResNet(config), WideResNet(config).init(rng, images, train=False)
    stats = variables.get("batch_stats", {})
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=stats)


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, Any]]:
    """Classification; batch: `image` float32[batch, side, side, 3], `label` int32[batch]."""

    def loss_fn(params):
        if not state.batch_stats:
            logits, stats = state.apply_fn({"params": params}, batch["image"]), {}
        else:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
            stats = new["batch_stats"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), stats

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss}
