"""The transformer of Korthikanti et al. 2022 (arXiv:2205.05198, section 4), in plain JAX.

bfloat16 activations, dropout after the softmax and after both blocks, GELU, layers in a scan. Every value that the
paper counts carries a name, so that its ways to recompute are levels of a plan: `named:...`, `inputs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

# What the paper counts for a layer, value by value, in bytes per element of [batch, seq, width]: outside of what tensor
# parallelism splits (the layer's input comes to it, 2), and inside.
OUTSIDE = {"norm_1": 2, "mask_1": 1, "between": 2, "norm_2": 2, "mask_2": 1}
INSIDE = {"query": 2, "key": 2, "value": 2, "context": 2, "gelu_input": 8, "gelu_output": 8}
# And of [batch, heads, seq, seq]. What JAX keeps of a softmax are the exponentials: as many, of the same type.
SCORES = {"softmax": 2, "scores_mask": 1, "scores": 2}
ALL = f"named:{','.join((*OUTSIDE, *INSIDE, *SCORES))}"
SELECTIVE = f"named:{','.join((*OUTSIDE, *INSIDE))}"
WAYS = 8  # tensor parallelism, in all of the paper's models


@dataclasses.dataclass(frozen=True)
class Size:
    """A model of the paper's table 3, with its micro-batch and what parameters and optimizer take of a device in its
    figure 1 (GiB)."""

    heads: int
    width: int
    layers: int
    batch: int
    state: float
    seq: int = 2048
    vocab: int = 51_200

    @property
    def unit(self) -> int:
        """Elements of a layer's input."""
        return self.seq * self.batch * self.width

    @property
    def scores(self) -> float:
        """Elements of the attention's scores for each of a layer's input."""
        return self.seq * self.heads / self.width


SIZES = {
    "22B": Size(64, 6144, 48, 4, 45.56),
    "175B": Size(96, 12_288, 96, 1, 45.56),
    "530B": Size(128, 20_480, 105, 1, 31.64),
    "1T": Size(160, 25_600, 128, 1, 32.96),
}
RATE = 0.1  # of dropout

# {the paper's way: (preset over 2 x 8 devices, level, bytes that a layer keeps for each element of its input (its
# equations 1 to 6))}
VARIANTS: dict[str, tuple[str, str, Callable[[Size], float]]] = {
    "no parallelism": ("dp=2", ALL, lambda s: 34 + 5 * s.scores),
    "tensor": (f"dp=2,tp={WAYS}", ALL, lambda s: 10 + (24 + 5 * s.scores) / WAYS),
    "tensor + sequence": (f"dp=2,tp_sp={WAYS}", ALL, lambda s: (34 + 5 * s.scores) / WAYS),
    "tensor, selective": (f"dp=2,tp={WAYS}", SELECTIVE, lambda s: 10 + 24 / WAYS),
    "tensor + sequence, selective": (f"dp=2,tp_sp={WAYS}", SELECTIVE, lambda s: 34 / WAYS),
    "tensor, full": (f"dp=2,tp={WAYS}", "inputs", lambda s: 2),
}


def _norm(x, scale, bias):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    y = (x32 - mean) * jax.lax.rsqrt(((x32 - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (y * scale + bias).astype(x.dtype)


def _dropout(x, key, name):
    kept = checkpoint_name(jax.random.bernoulli(key, 1 - RATE, x.shape), name)
    return jnp.where(kept, x / (1 - RATE), 0)


def _layer(size: Size, x, w, key):
    """[batch, seq, width] -> the same."""
    split = (*x.shape[:2], size.heads, size.width // size.heads)
    half = lambda name: w[name].astype(x.dtype)
    keys = jax.random.split(key, 3)
    h = checkpoint_name(_norm(x, w["scale_1"], w["bias_1"]), "norm_1")
    q, k, v = (checkpoint_name((h @ half(n)).reshape(split), n) for n in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * split[-1] ** -0.5
    seen = jnp.arange(size.seq)[:, None] >= jnp.arange(size.seq)
    scores = jnp.where(seen, scores, -1e4)
    scores = checkpoint_name(jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))), "softmax")
    scores = scores / scores.sum(-1, keepdims=True)
    scores = checkpoint_name(_dropout(scores, keys[0], "scores_mask"), "scores")
    h = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape), "context")
    x = checkpoint_name(x + _dropout(h @ half("out"), keys[1], "mask_1"), "between")
    h = checkpoint_name(_norm(x, w["scale_2"], w["bias_2"]), "norm_2")
    h = checkpoint_name(h @ half("up") + half("up_bias"), "gelu_input")
    h = checkpoint_name(jax.nn.gelu(h), "gelu_output")
    return x + _dropout(h @ half("down") + half("down_bias"), keys[2], "mask_2")


def _parameters(size: Size):
    n, w = size.layers, size.width
    shapes: dict[str, Any] = {k: (n, w, w) for k in ("query", "key", "value", "out")}
    shapes |= {"up": (n, w, 4 * w), "up_bias": (n, 4 * w), "down": (n, 4 * w, w), "down_bias": (n, w)}
    shapes |= {k: (n, w) for k in ("scale_1", "bias_1", "scale_2", "bias_2")}
    rest = {"table": (size.vocab, w), "scale": (w,), "bias": (w,)}
    make = lambda tree: {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in tree.items()}
    return {**make(rest), "layers": make(shapes)}


def step_of(size: Size) -> tuple[Any, tuple[Any, Any]]:
    """A training step with Adam, and the shapes of its arguments: two micro-batches, to be split over two groups (a
    batch of one is no batch that can be found)."""
    tx = optax.adam(1e-4)

    def loss_fn(params, batch, key):
        x = params["table"].astype(jnp.bfloat16)[batch["inputs"]]
        keys = jax.random.split(key, size.layers)
        x, _ = jax.lax.scan(lambda x, wk: (_layer(size, x, *wk), None), x, (params["layers"], keys))
        x = _norm(x, params["scale"], params["bias"])
        logits = (x @ params["table"].T.astype(x.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def step(state, batch):
        params, moments, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, jax.random.fold_in(jax.random.key(0), count))
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, count + 1), loss

    params = _parameters(size)
    state = (params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((), jnp.int32))
    tokens = jax.ShapeDtypeStruct((2 * size.batch, size.seq), jnp.int32)
    return step, (state, {"inputs": tokens, "targets": tokens})
