"""A decoder-only transformer in ordinary Flax linen: the model behind every built-in target.

Nothing here knows about meshes or shardings; it stands for the code a user already has. Layers are scanned
(`nn.scan`) or unrolled, optionally under `nn.remat`; parameters are kept in `param_dtype` (float32 masters) and
computed in `dtype`.
Llama 3 (arXiv:2407.21783, section 3.2) and GPT-3 (arXiv:2005.14165, section 2.1) are both instances of `Config`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

_REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What a decoder is made of. Defaults are the Llama family; GPT-3 sets the last group.

    `attention`: "xla" stores the scores of all pairs of positions, as `jax.nn.dot_product_attention` does everywhere;
    "blockwise" stores those of a block of queries at a time and makes them again for the gradient, so that memory grows
    with the sequence and not with its square, as in the fused kernels; "cudnn" is that kernel on a GPU (half precision,
    needs the cuDNN libraries: the extra `gpu-aot-cudnn` on a machine without a GPU). A plan for "cudnn" cannot be
    priced: the kernel says only to the process that traced it how it may be split.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool = False
    rope_theta: float = 500_000.0  # Llama 3 (arXiv:2407.21783, table 3)
    norm_eps: float = 1e-5
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32
    scan: bool = True
    remat: Literal["none", "full", "dots"] = "full"
    attention: Literal["xla", "blockwise", "cudnn"] = "xla"
    norm: Literal["rms", "layer"] = "rms"
    gated: bool = True
    bias: bool = False
    positions: Literal["rope", "learned"] = "rope"
    max_seq: int = 8192  # rows of the table of learned positions; rotary positions have no limit

    def __post_init__(self):
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads must divide the width and kv_heads the heads: "
                f"width {self.width}, heads {self.heads}, kv_heads {self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def rope(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of x, [batch, seq, heads, head_dim], by halves (arXiv:2104.09864, section 3.4.2)."""
    half, wide = x.shape[-1] // 2, jnp.promote_types(x.dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle = jnp.arange(x.shape[1], dtype=wide)[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


QUERIES = 512  # in a block: the scores of a head over 32,768 keys are then 64 MiB in float32


def blockwise(q: jax.Array, k: jax.Array, v: jax.Array, block: int = QUERIES) -> jax.Array:
    """Causal attention of `block` queries at a time (Rabe and Staats 2021, arXiv:2112.05682).

    q: [batch, seq, heads, head_dim]; k and v: [batch, seq, kv_heads, head_dim]. The same numbers as all at once. A
    sequence that does not divide into blocks is taken whole.
    """
    batch, seq, heads, size = q.shape
    if seq % block or seq == block:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    @jax.checkpoint
    def rows(first, part):
        mask = (first + jnp.arange(block))[:, None] >= jnp.arange(seq)[None]
        return jax.nn.dot_product_attention(part, k, v, mask=mask[None, None], implementation="xla")

    parts = q.reshape(batch, seq // block, block, heads, size).swapaxes(0, 1)
    out = jax.lax.map(lambda x: rows(*x), (jnp.arange(0, seq, block), parts))
    return out.swapaxes(0, 1).reshape(batch, seq, heads, size)


def _norm(c: Config, name: str) -> nn.Module:
    kind = nn.RMSNorm if c.norm == "rms" else nn.LayerNorm
    return kind(epsilon=c.norm_eps, dtype=c.dtype, param_dtype=c.param_dtype, name=name)


def _dense(c: Config, features: int | tuple[int, ...], name: str, axis: int | tuple[int, ...] = -1) -> nn.Module:
    init = nn.initializers.normal(0.02)
    return nn.DenseGeneral(
        features, axis=axis, use_bias=c.bias, dtype=c.dtype, param_dtype=c.param_dtype, kernel_init=init, name=name
    )


class Attention(nn.Module):
    """Causal self-attention with grouped queries (arXiv:2305.13245): [batch, seq, width] -> the same."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        q = _dense(c, (c.heads, c.head_dim), "query")(x)
        k = _dense(c, (c.kv_heads, c.head_dim), "key")(x)
        v = _dense(c, (c.kv_heads, c.head_dim), "value")(x)
        if c.positions == "rope":
            q, k = rope(q, c.rope_theta), rope(k, c.rope_theta)
        if c.attention == "blockwise":
            out = blockwise(q, k, v)
        else:
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=c.attention)
        return _dense(c, c.width, "out", axis=(-2, -1))(out)


class Mlp(nn.Module):
    """SwiGLU (arXiv:2002.05202) or GELU feed-forward: [batch, seq, width] -> the same."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        up = _dense(c, c.mlp, "up")(x)
        hidden = nn.silu(_dense(c, c.mlp, "gate")(x)) * up if c.gated else nn.gelu(up)
        return _dense(c, c.width, "down")(hidden)


class Layer(nn.Module):
    """One pre-norm transformer layer, in the (carry, unused) form that `nn.scan` takes."""

    config: Config

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        x = x + Attention(c, name="attention")(_norm(c, "attention_norm")(x))
        x = x + Mlp(c, name="mlp")(_norm(c, "mlp_norm")(x))
        return x, None


class Decoder(nn.Module):
    """Tokens int32[batch, seq] -> logits [batch, seq, vocab], in float32 at least."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(c.vocab, c.width, dtype=c.dtype, param_dtype=c.param_dtype, embedding_init=init, name="embed")
        x = embed(tokens)
        if c.positions == "learned":
            table = self.param("positions", init, (c.max_seq, c.width), c.param_dtype)
            x = x + table[: tokens.shape[1]].astype(c.dtype)
        x = self._layers(x)
        x = _norm(c, "final_norm")(x)
        logits = embed.attend(x) if c.tied else _dense(dataclasses.replace(c, bias=False), c.vocab, "head")(x)
        return logits.astype(jnp.promote_types(c.dtype, jnp.float32))

    def _layers(self, x):
        c = self.config
        layer = Layer
        if c.remat != "none":
            # Inside a scan XLA cannot merge the recomputation with the original, so the barrier is not needed.
            layer = nn.remat(Layer, prevent_cse=not c.scan, policy=_REMAT_POLICIES[c.remat])
        if c.scan:
            scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
            return scanned(c, name="layers")(x, None)[0]
        for i in range(c.layers):
            x, _ = layer(c, name=f"layer_{i}")(x, None)
        return x
