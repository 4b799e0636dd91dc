"""Decoders with a mixture of experts: Mixtral's (arXiv:2401.04088) and one built like DeepSeek-V3 (arXiv:2412.19437).

Each sequence is a group; a token beyond an expert's capacity is dropped for that expert (GShard, arXiv:2006.16668,
section 2.2). Tokens move to their expert's slots by a scatter and back by a gather, so the work grows with tokens x
top_k, not with tokens x experts. The balancing loss is Switch's (arXiv:2101.03961, section 2.2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from lensjax.models.decoder import Attention, Config, rope


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """`base` is the decoder around the experts (its `mlp` is that of the dense layers in front: `dense_layers`).

    latent: DeepSeek's attention (section 2.1.1) with low-rank queries and keys; None is grouped attention.
    """

    base: Config
    experts: int
    top_k: int
    expert_mlp: int
    shared_mlp: int = 0
    dense_layers: int = 0
    capacity: float = 1.25
    latent: Latent | None = None


@dataclasses.dataclass(frozen=True)
class Latent:
    """Ranks of the compressed queries and keys, and the sizes of a head: without position, with it, of its value."""

    query: int = 1536
    key: int = 512
    plain: int = 128
    rotary: int = 64
    value: int = 128


_MIXTRAL = Config(vocab=32_000, width=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, rope_theta=1e6)
_DEEPSEEK = Config(vocab=129_280, width=7168, layers=61, heads=128, kv_heads=128, mlp=18_432, rope_theta=1e4)
_TINY = Config(vocab=512, width=64, layers=2, heads=4, kv_heads=2, mlp=128)
CONFIGS: dict[str, MoeConfig] = {
    "mixtral-8x7b": MoeConfig(_MIXTRAL, experts=8, top_k=2, expert_mlp=14_336),
    "deepseek-v3": MoeConfig(
        _DEEPSEEK, experts=256, top_k=8, expert_mlp=2048, shared_mlp=2048, dense_layers=3, latent=Latent()
    ),
    "mixtral-tiny": MoeConfig(_TINY, experts=8, top_k=2, expert_mlp=96),
    "deepseek-tiny": MoeConfig(
        dataclasses.replace(_TINY, layers=3), experts=8, top_k=2, expert_mlp=48, shared_mlp=48, dense_layers=1,
        latent=Latent(query=32, key=16, plain=16, rotary=8, value=16),
    ),
}  # fmt: skip


def _dense(c: Config, features: int | tuple[int, ...], name: str, axis: int | tuple[int, ...] = -1) -> nn.Module:
    return nn.DenseGeneral(
        features, axis=axis, use_bias=False, dtype=c.dtype, param_dtype=c.param_dtype,
        kernel_init=nn.initializers.normal(0.02), name=name,
    )  # fmt: skip


def _norm(c: Config, name: str) -> nn.Module:
    return nn.RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, param_dtype=c.param_dtype, name=name)


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one small vector per token: [batch, seq, width] -> the same."""

    config: Config
    latent: Latent

    @nn.compact
    def __call__(self, x):
        c, n = self.config, self.latent
        down = _norm(c, "query_norm")(_dense(c, n.query, "query_down")(x))
        q = _dense(c, (c.heads, n.plain + n.rotary), "query_up")(down)
        both = _dense(c, n.key + n.rotary, "key_down")(x)
        small, turned = _norm(c, "key_norm")(both[..., : n.key]), both[..., None, n.key :]
        kv = _dense(c, (c.heads, n.plain + n.value), "key_up")(small)
        q = jnp.concatenate([q[..., : n.plain], rope(q[..., n.plain :], c.rope_theta)], axis=-1)
        turned = jnp.broadcast_to(rope(turned, c.rope_theta), (*kv.shape[:-1], n.rotary))
        k = jnp.concatenate([kv[..., : n.plain], turned], axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (n.plain + n.rotary) ** -0.5
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(c.dtype), kv[..., n.plain :])
        return _dense(c, c.width, "out", axis=(-2, -1))(out)


class Experts(nn.Module):
    """[batch, seq, width] -> (the same, balancing loss): each token through its `top_k` experts."""

    config: MoeConfig

    @nn.compact
    def __call__(self, x):
        m = self.config
        c, rows, seq = m.base, x.shape[0], x.shape[1]
        slots = max(1, int(m.capacity * seq * m.top_k / m.experts))
        init = nn.initializers.normal(0.02)
        gate = self.param("gate", init, (m.experts, c.width, m.expert_mlp), c.param_dtype).astype(c.dtype)
        up = self.param("up", init, (m.experts, c.width, m.expert_mlp), c.param_dtype).astype(c.dtype)
        down = self.param("down", init, (m.experts, m.expert_mlp, c.width), c.param_dtype).astype(c.dtype)
        logits = nn.Dense(m.experts, use_bias=False, param_dtype=c.param_dtype, name="router")(x.astype(jnp.float32))
        chances = jax.nn.softmax(logits)
        weight, index = jax.lax.top_k(chances, m.top_k)
        weight = (weight / weight.sum(-1, keepdims=True)).astype(c.dtype)
        chosen = jax.nn.one_hot(index, m.experts, dtype=jnp.int32).reshape(rows, seq * m.top_k, m.experts)
        place = (jnp.cumsum(chosen, axis=1) * chosen).sum(-1) - 1
        index = index.reshape(rows, -1)
        at = jnp.where(place < slots, index * slots + place, m.experts * slots)  # the last slot takes what is dropped
        tokens = jnp.repeat(x, m.top_k, axis=1)
        inside = jax.vmap(lambda t, a: jnp.zeros((m.experts * slots + 1, c.width), c.dtype).at[a].set(t))(tokens, at)
        inside = inside[:, :-1].reshape(rows, m.experts, slots, c.width)
        hidden = nn.silu(jnp.einsum("gecd,edf->gecf", inside, gate)) * jnp.einsum("gecd,edf->gecf", inside, up)
        outside = jnp.einsum("gecf,efd->gecd", hidden, down).reshape(rows, m.experts * slots, c.width)
        outside = jnp.pad(outside, ((0, 0), (0, 1), (0, 0)))
        back = jax.vmap(lambda o, a: o[a])(outside, at).reshape(rows, seq, m.top_k, c.width)
        share = chosen.reshape(rows, seq, m.top_k, m.experts)[:, :, 0].astype(jnp.float32).mean((0, 1))
        balance = m.experts * jnp.sum(chances.mean((0, 1)) * share)
        return jnp.einsum("gskd,gsk->gsd", back, weight), balance


class Gated(nn.Module):
    """SwiGLU: [batch, seq, width] -> the same."""

    config: Config
    mlp: int

    @nn.compact
    def __call__(self, x):
        c = self.config
        hidden = nn.silu(_dense(c, self.mlp, "gate")(x)) * _dense(c, self.mlp, "up")(x)
        return _dense(c, c.width, "down")(hidden)


class Layer(nn.Module):
    """One pre-norm layer in `nn.scan`'s form: (x, _) -> (x, balancing loss); `sparse` has experts in place of the
    MLP."""

    config: MoeConfig
    sparse: bool

    @nn.compact
    def __call__(self, x, _):
        m, c = self.config, self.config.base
        attention = LatentAttention(c, m.latent, name="attention") if m.latent else Attention(c, name="attention")
        x = x + attention(_norm(c, "attention_norm")(x))
        h = _norm(c, "mlp_norm")(x)
        if not self.sparse:
            return x + Gated(c, c.mlp, name="mlp")(h), jnp.zeros((), jnp.float32)
        y, balance = Experts(m, name="experts")(h)
        if m.shared_mlp:
            y = y + Gated(c, m.shared_mlp, name="shared")(h)
        return x + y, balance


class MoeDecoder(nn.Module):
    """Tokens int32[batch, seq] -> (logits float32[batch, seq, vocab], balancing loss)."""

    config: MoeConfig

    @nn.compact
    def __call__(self, tokens):
        m, c = self.config, self.config.base
        init = nn.initializers.normal(0.02)
        x = nn.Embed(c.vocab, c.width, dtype=c.dtype, param_dtype=c.param_dtype, embedding_init=init, name="embed")(
            tokens
        )
        total = jnp.zeros((), jnp.float32)
        for name, sparse, count in (("dense", False, m.dense_layers), ("layers", True, c.layers - m.dense_layers)):
            if count:
                layer = Layer if c.remat == "none" else nn.remat(Layer, prevent_cse=False)
                scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=count)
                x, balance = scanned(m, sparse, name=name)(x, None)
                total = total + balance.sum()
        logits = _dense(c, c.vocab, "head")(_norm(c, "final_norm")(x))
        return logits.astype(jnp.float32), total


def create_state(config: MoeConfig, rng: jax.Array, tx: optax.GradientTransformation) -> TrainState:
    model = MoeDecoder(config)
    params = model.init(rng, jnp.zeros((1, 8), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, Any]]:
    """Next-token prediction with the balancing loss; batch: `inputs` and `targets`, int32[batch, seq]."""

    def loss_fn(params):
        logits, balance = state.apply_fn({"params": params}, batch["inputs"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
        return loss + 0.01 * balance, {"loss": loss, "balance": balance}

    (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), metrics
