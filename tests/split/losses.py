"""Losses that a split may get wrong, by name: each `loss(p, b)` over b["x"] [batch, 6] and b["y"] [batch], p [6, 6].

`NODE` and `MICRO` say which of them split; all others must be refused. What is accepted must be exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOSSES = {}
NODE: set[str] = set()
MICRO: set[str] = set()


def case(node: bool = True, micro: bool | None = None):
    def add(fn):
        LOSSES[fn.__name__] = fn
        if node:
            NODE.add(fn.__name__)
        if node if micro is None else micro:
            MICRO.add(fn.__name__)
        return fn

    return add


def hidden(p, x):
    return jnp.tanh(x @ p)


# ---- split: means, sums, weights, counts ---------------------------------------------------------------------------


@case()
def mean(p, b):
    return hidden(p, b["x"]).mean()


@case()
def total(p, b):
    return hidden(p, b["x"]).sum()


@case()
def weight_decay(p, b):
    return hidden(p, b["x"]).mean() + 1e-2 * jnp.sum(p * p)


@case()
def data_denominator(p, b):
    w = (b["y"] > 2).astype(b["x"].dtype)
    return (hidden(p, b["x"]).sum(1) * w).sum() / jnp.maximum(w.sum(), 1)


@case()
def model_denominator(p, b):
    h = hidden(p, b["x"])
    w = (1 - jnp.exp(-(h[:, 0] ** 2))) ** 2
    return (h[:, 1] * w).sum() / w.sum()


@case()
def several_tasks(p, b):
    h = hidden(p, b["x"])
    return 0.3 * h[:, :3].mean() + 0.7 * (h[:, 3:] ** 2).sum() / b["x"].shape[0] + (h[:, 0] * b["y"]).mean()


@case()
def square_root_of_the_size(p, b):
    return hidden(p, b["x"]).sum() / np.sqrt(b["x"].shape[0]).item()


@case()
def size_in_the_exponent(p, b):
    return hidden(p, b["x"]).mean() ** b["x"].shape[0]


@case()
def index_as_weight(p, b):
    return (hidden(p, b["x"]).sum(1) * jnp.arange(b["x"].shape[0])).mean()


@case()
def index_in_bfloat16(p, b):
    return (hidden(p, b["x"]).sum(1) * (1000 + jnp.arange(b["x"].shape[0])).astype(jnp.bfloat16)).mean()


@case()
def picked_by_label(p, b):
    return jax.nn.log_softmax(hidden(p, b["x"]))[jnp.arange(b["x"].shape[0]), b["y"]].mean()


@case()
def one_minus_mean(p, b):
    return 1.0 - hidden(p, b["x"]).mean()


@case()
def mean_or_constant(p, b):
    return jnp.where(p[0, 0] > 0, hidden(p, b["x"]).mean(), 3.0)


@case()
def embedding(p, b):
    return (hidden(p, b["x"]) * p[b["y"]]).mean()


@case()
def two_views(p, b):
    h, n = hidden(p, jnp.concatenate([b["x"], b["x"] * 2], 0)), b["x"].shape[0]
    return ((h[:n] - h[n:]) ** 2).mean()


@case()
def batch_inside_a_merged_dimension(p, b):
    return hidden(p, jnp.stack([b["x"], 2 * b["x"], -b["x"]], 0).reshape(-1, 6)).mean()


@case()
def dropout(p, b):
    return (hidden(p, b["x"]) * jax.random.bernoulli(jax.random.key(0), 0.5, b["x"].shape)).mean()


@case()
def dropout_transposed(p, b):
    h = hidden(p, b["x"]).T
    return (h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)).mean()


@case()
def noise_from_a_raw_key(p, b):
    return (hidden(p, b["x"]) * jax.random.normal(jax.random.PRNGKey(0), b["x"].shape)).mean()


@case()
def key_for_each_example(p, b):
    keys = jax.random.split(jax.random.key(1), b["x"].shape[0])
    return (hidden(p, b["x"]) * jax.vmap(lambda k: jax.random.normal(k, (6,)))(keys)).mean()


@case()
def cholesky_of_each_example(p, b):
    h = hidden(p, b["x"])
    return jnp.linalg.cholesky(h[:, :, None] * h[:, None] + jnp.eye(6)).sum()


@case()
def fft_of_features(p, b):
    return jnp.abs(jnp.fft.fft(hidden(p, b["x"]), axis=1)).mean()


@case()
def sorted_features(p, b):
    return (jnp.sort(hidden(p, b["x"]), -1) * jnp.arange(6)).mean()


@case()
def captured_constant(p, b):
    return (hidden(p, b["x"]) * np.arange(b["x"].shape[0], dtype=np.float32)[:, None]).mean()


@case()
def slice_at_each_example(p, b):
    return jax.vmap(lambda h, i: lax.dynamic_slice(h, (i,), (2,)))(hidden(p, b["x"]), b["y"] % 4).mean()


@case()
def scan_with_remat(p, b):
    layer = jax.checkpoint(lambda c, _: (jnp.tanh(c @ p), c.sum(1)))
    h, s = lax.scan(layer, b["x"], None, length=3)
    return h.mean() + s.mean()


@case()
def carry_of_partial_sums(p, b):
    return lax.fori_loop(0, 3, lambda i, c: c * 0.5 + hidden(p, b["x"]).sum(), 1.0)


@case()
def own_accumulation(p, b):
    halves = b["x"].reshape(2, -1, 6)
    return lax.scan(lambda c, x: (c + hidden(p, x).mean(), None), 0.0, halves)[0] / 2


@case()
def norm_clipped_in_backward(p, b):
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (g / (1e-6 + jnp.linalg.norm(g)),))
    return same(hidden(p, b["x"])).mean()


@case()
def class_token(p, b):
    token = jnp.tile(p[:1], (b["x"].shape[0], 1))
    return (hidden(p, b["x"]) * token + jnp.concatenate([token, b["x"]], 1).sum(1, keepdims=True)).mean()


@case()
def pattern_for_each_example(p, b):
    pattern = jnp.tile(p[:3, 0], 2 * b["x"].shape[0]).reshape(b["x"].shape)
    return (hidden(p, b["x"]) * pattern).mean()


# ---- split, with totals that a share must know -----------------------------------------------------------------------


@case(micro=False)
def batch_norm(p, b):
    h = hidden(p, b["x"])
    return (((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1)) ** 3).mean()


@case(micro=False)
def batch_norm_in_a_scan(p, b):
    return lax.scan(lambda c, _: (jnp.tanh((c - c.mean(0)) @ p), None), b["x"], None, length=2)[0].mean()


@case(micro=False)
def variance_of_losses(p, b):
    return jnp.var(hidden(p, b["x"]).sum(1))


@case()
def balance(p, b):
    gates = jax.nn.softmax(b["x"] @ p)
    top = jax.nn.one_hot(gates.argmax(-1), 6)
    return hidden(p, b["x"]).mean() + 6 * jnp.sum(top.mean(0) * gates.mean(0))


@case(micro=False)
def maximum_over_the_batch(p, b):
    return hidden(p, b["x"]).max(0).sum()


@case(micro=False)
def softmax_over_the_batch(p, b):
    return (jax.nn.softmax(hidden(p, b["x"]), 0) * b["x"]).sum()


@case()
def branch_on_the_loss(p, b):
    h = hidden(p, b["x"])
    return lax.cond(h.mean() > 0, lambda: h.mean(), lambda: (h**2).mean())


@case()
def counts(p, b):
    return (hidden(p, b["x"]) * (1 / (1 + jnp.bincount(b["y"], length=6))[b["y"]])[:, None]).sum()


@case()
def covariance(p, b):
    h = hidden(p, b["x"])
    return ((h.T @ h / h.shape[0]) ** 2).sum()


# ---- refused: examples that know each other --------------------------------------------------------------------------


@case(node=False)
def first_example(p, b):
    return hidden(p, b["x"])[0].sum()


@case(node=False)
def first_half(p, b):
    return hidden(p, b["x"])[: b["x"].shape[0] // 2].sum()


@case(node=False)
def flipped(p, b):
    return (hidden(p, b["x"]) * b["x"][::-1]).mean()


@case(node=False)
def pattern_over_pairs(p, b):
    n = b["x"].shape[0]
    return (hidden(p, b["x"])[:, 0] * jnp.tile(p[:2, 0], n // 2)).mean()


@case(node=False)
def rolled(p, b):
    return (hidden(p, b["x"]) * jnp.roll(b["x"], 1, 0)).mean()


@case(node=False)
def contrastive(p, b):
    h = hidden(p, b["x"])
    return (jax.nn.log_softmax(h @ h.T) * jnp.eye(b["x"].shape[0])).sum()


@case(node=False)
def pairs(p, b):
    h = hidden(p, b["x"])
    return ((h[:, None] - h[None]) ** 2).mean()


@case()
def outer_product(p, b):
    h = hidden(p, b["x"])
    return jnp.einsum("nd,md->", h, h)


@case(node=False)
def mixing_reshape(p, b):
    return hidden(p, b["x"].T.reshape(b["x"].shape)).mean()


@case(node=False)
def median(p, b):
    return jnp.median(hidden(p, b["x"]).sum(1))


@case(node=False)
def product(p, b):
    return jnp.prod(1 + 0.1 * hidden(p, b["x"]).sum(1))


@case(node=False)
def running_sum(p, b):
    return (jnp.cumsum(hidden(p, b["x"]), 0) * b["x"]).mean()


@case(node=False)
def hardest_examples(p, b):
    return lax.top_k(hidden(p, b["x"]).sum(1), b["x"].shape[0] // 2)[0].mean()


@case(node=False)
def shuffled(p, b):
    order = jax.random.permutation(jax.random.key(0), b["x"].shape[0])
    return (hidden(p, b["x"]) * b["x"][order]).mean()


@case(node=False)
def one_example_after_the_other(p, b):
    return lax.scan(lambda c, x: (jnp.tanh(c + hidden(p, x).sum()), None), 0.0, b["x"])[0]


@case()
def trips_by_the_batch(p, b):
    return lax.fori_loop(0, b["x"].shape[0], lambda i, c: c * 1.1, hidden(p, b["x"]).mean())


@case(node=False)
def branch_in_python(p, b):
    h = hidden(p, b["x"])
    return h.sum() * 2 if b["x"].shape[0] > 5 else jnp.sin(h).sum()


@case(node=False)
def last_write_wins(p, b):
    return jnp.zeros((6, 6)).at[b["y"]].set(hidden(p, b["x"])).sum()


@case(node=False)
def fft_over_the_batch(p, b):
    return jnp.abs(jnp.fft.fft(hidden(p, b["x"]), axis=0)).mean()


@case(node=False)
def index_behind_the_end(p, b):
    n = b["x"].shape[0]
    return (hidden(p, b["x"])[jnp.arange(n) + n] * b["x"]).mean()


@case(node=False)
def prints(p, b):
    h = hidden(p, b["x"])
    jax.debug.print("{}", h.mean())
    return h.mean()


@case(node=False)
def other_generator(p, b):
    key = jax.random.key(0, impl="rbg")
    return (hidden(p, b["x"]) * jax.random.bernoulli(key, 0.5, b["x"].shape)).mean()


def step_of(loss):
    """A training step with that loss: it returns the gradient and its norm too."""

    def step(p, b):
        value, g = jax.value_and_grad(lambda p: jnp.asarray(loss(p, b), p.dtype))(p)
        return p - 0.1 * g, {"loss": value, "g": g, "norm": jnp.sqrt((g**2).sum())}

    return step


def arguments(n: int = 8):
    r = np.random.RandomState(0)
    w, x = r.randn(6, 6), r.randn(n, 6)
    return jnp.asarray(w, jnp.result_type(float)), {
        "x": jnp.asarray(x, jnp.result_type(float)),
        "y": jnp.asarray(r.randint(0, 6, n), jnp.int32),
    }
