"""T5 (arXiv:1910.10683): an encoder and a decoder with relative position biases shared by the layers of a side."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes of table 2 and appendix A's 11B; `buckets`, `distance`: of the relative position bias (section 2.1)."""

    vocab: int = 32_128
    width: int = 1024
    layers: int = 24
    heads: int = 128
    head_dim: int = 128
    mlp: int = 65_536
    buckets: int = 32
    distance: int = 128
    dtype: Any = jnp.bfloat16


CONFIGS = {
    "t5-11b": T5Config(),
    "t5-tiny": T5Config(vocab=256, width=32, layers=2, heads=4, head_dim=8, mlp=64),
}


def _dense(c: T5Config, features: Any, name: str, axis: Any = -1) -> nn.Module:
    init = nn.initializers.normal(0.02)
    return nn.DenseGeneral(features, axis=axis, use_bias=False, dtype=c.dtype, kernel_init=init, name=name)


class Bias(nn.Module):
    """float [1, heads, queries, keys]: a learned number for each head and bucket of distances."""

    config: T5Config
    causal: bool

    @nn.compact
    def __call__(self, queries: int, keys: int):
        c = self.config
        apart = jnp.arange(keys)[None] - jnp.arange(queries)[:, None]
        half = c.buckets if self.causal else c.buckets // 2
        far = jnp.abs(apart)
        exact = half // 2
        scaled = exact + jnp.log(jnp.maximum(far, 1) / exact) / jnp.log(c.distance / exact) * (half - exact)
        bucket = jnp.where(far < exact, far, jnp.minimum(scaled, half - 1).astype(jnp.int32))
        bucket = bucket if self.causal else bucket + jnp.where(apart > 0, half, 0)
        table = self.param("table", nn.initializers.normal(0.02), (c.buckets, c.heads), jnp.float32)
        bias = table[bucket].transpose(2, 0, 1)[None]
        return jnp.where(apart > 0, -1e9, bias) if self.causal else bias


class Attention(nn.Module):
    """[batch, queries, width] over [batch, keys, width] -> [batch, queries, width]. Scores are not divided: the
    initial queries are smaller instead (T5's own convention)."""

    config: T5Config

    @nn.compact
    def __call__(self, x, source, bias):
        c = self.config
        q, k, v = (_dense(c, (c.heads, c.head_dim), n)(y) for n, y in (("q", x), ("k", source), ("v", source)))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        weights = jax.nn.softmax(scores if bias is None else scores + bias).astype(c.dtype)
        return _dense(c, c.width, "o", axis=(-2, -1))(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


class Layer(nn.Module):
    """One layer in `nn.scan`'s form; a decoder's also attends to the encoder's result (`memory`)."""

    config: T5Config

    @nn.compact
    def __call__(self, x, bias, memory):
        c = self.config
        norm = lambda name: nn.RMSNorm(dtype=c.dtype, name=name)
        h = norm("attention_norm")(x)
        x = x + Attention(c, name="attention")(h, h, bias)
        if memory is not None:
            x = x + Attention(c, name="cross")(norm("cross_norm")(x), memory, None)
        h = nn.relu(_dense(c, c.mlp, "up")(norm("mlp_norm")(x)))
        return x + _dense(c, c.width, "down")(h), None


class T5(nn.Module):
    """Tokens int32[batch, seq] of source and target -> logits float32[batch, seq, vocab] of the target."""

    config: T5Config

    @nn.compact
    def __call__(self, source, target):
        c = self.config
        embed = nn.Embed(c.vocab, c.width, dtype=c.dtype, name="embed")
        memory = self._side("encoder", embed(source), None)
        x = self._side("decoder", embed(target), memory)
        return embed.attend(x * c.width**-0.5).astype(jnp.float32)

    def _side(self, name, x, memory):
        c = self.config
        bias = Bias(c, memory is not None, name=f"{name}_bias")(x.shape[1], x.shape[1])
        layer = nn.remat(Layer, prevent_cse=False)
        scanned = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=c.layers,
        )
        x, _ = scanned(c, name=name)(x, bias, memory)
        return nn.RMSNorm(dtype=c.dtype, name=f"{name}_norm")(x)


def create_state(config: T5Config, rng: jax.Array, tx: optax.GradientTransformation) -> TrainState:
    model = T5(config)
    params = model.init(rng, *[jnp.zeros((1, 8), jnp.int32)] * 2)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, Any]]:
    """Sequence to sequence; batch: `source`, `inputs` (the target, shifted) and `targets`, int32[batch, seq]."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["source"], batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}
