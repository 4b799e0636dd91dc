"""Random small losses: chains of operations on `[row, feature]` values, as a training step of several of them.

A chain is a list of `(operation, variant, width)`; every operation takes `[N, f]` to `[N, g]`, mixing what models mix:
matmuls, convolutions, windows, loops, lookups, scatters, reshapes, reductions along features or over the batch,
element-wise arithmetic. Widths are such that parameters are large enough to be split, and not all divide by every mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, FEATURES, WORDS, VOCAB = 16, 32, 4, 48
WIDTHS = (24, 32, 36, 64)
Link = tuple[str, int, int]


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)


def _dot(rng, f, variant, g):
    if variant == 0:
        return {"w": _matrix(rng, f, g)}, lambda p, x, b: jnp.tanh(x @ p["w"])
    if variant == 1:  # a gated pair with a bias
        make = {"a": _matrix(rng, f, g), "b": _matrix(rng, f, g), "c": np.zeros(g, np.float32)}
        return make, lambda p, x, b: jax.nn.sigmoid(x @ p["a"] + p["c"]) * (x @ p["b"])
    if variant == 2:  # transposed weight, and the product over pairs of rows
        return {"w": _matrix(rng, g, f)}, lambda p, x, b: jnp.einsum("nf,gf->ng", jax.nn.softmax(x @ x.T) @ x, p["w"])
    # heads
    make = {"w": _matrix(rng, f, 4, g // 4)}
    return make, lambda p, x, b: jnp.einsum("nf,fhd->nhd", x, p["w"]).reshape(len(x), -1)


def _conv(rng, f, variant, g):
    def apply(p, x, b):
        y = x.reshape(len(x), f // 4, 4) if variant < 2 else x.reshape(len(x), 4, f // 4)
        out = lax.conv_general_dilated(
            y, p["k"], (1 + variant % 2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
        )  # fmt: skip
        return jnp.tanh(out.mean(1))

    return {"k": _matrix(rng, 3, 4 if variant < 2 else f // 4, g)}, apply


def _scan(rng, f, variant, g):
    if variant == 0:  # stacked layers
        return {"w": _matrix(rng, 3, f, f)}, lambda p, x, b: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[
            0
        ]
    if variant == 1:  # over time, with a weight held constant

        def apply(p, x, b):
            h, ys = lax.scan(
                lambda h, t: (jnp.tanh(h @ p["w"] + t), h.mean(-1)), x, x.reshape(len(x), 4, -1).mean(-1).T[..., None]
            )
            return h + ys.T.mean(-1, keepdims=True)

        return {"w": _matrix(rng, f, f)}, apply
    if variant == 2:  # remat in a loop
        body = jax.checkpoint(lambda h, w: (h + jnp.sin(h @ w), None))
        return {"w": _matrix(rng, 2, f, f)}, lambda p, x, b: lax.scan(body, x, p["w"])[0]
    return {}, lambda p, x, b: lax.associative_scan(lambda a, c: 0.5 * a + c, x, axis=1)


def _gather(rng, f, variant, g):
    if variant == 0:
        return {"t": _matrix(rng, VOCAB, f)}, lambda p, x, b: x + p["t"][b["ids"]].mean(1)
    if variant == 1:
        return {}, lambda p, x, b: x + jnp.take_along_axis(x, b["ids"] % f, axis=1).mean(1, keepdims=True)
    if variant == 2:  # a lookup in what was computed, and a dynamic slice
        return (
            {},
            lambda p, x, b: (
                x[:, jnp.arange(f)[::-1]] + lax.dynamic_slice_in_dim(x, b["ids"][0, 0] % 4, f - 4, 1).mean()
            ),
        )
    return {"t": _matrix(rng, VOCAB, f)}, lambda p, x, b: x + jax.nn.one_hot(b["ids"][:, 0], VOCAB) @ p["t"]


def _scatter(rng, f, variant, g):
    if variant == 0:
        return {}, lambda p, x, b: x.at[jnp.arange(len(x))[:, None], b["ids"] % f].add(1.0)
    if variant == 1:  # sums over groups of rows
        return {}, lambda p, x, b: x + jax.ops.segment_sum(x, b["ids"][:, 0] % 5, 5)[b["ids"][:, 0] % 5]
    if variant == 2:
        return {
            "w": _matrix(rng, f, f)
        }, lambda p, x, b: jnp.zeros((len(x), f)).at[:, ::2].set(jnp.tanh(x @ p["w"])[:, ::2])
    return {"t": _matrix(rng, VOCAB, f)}, lambda p, x, b: x + (p["t"].at[b["ids"][:, 1]].add(0.1 * x)).mean(0)


def _reshape(rng, f, variant, g):
    if variant == 0:
        return {}, lambda p, x, b: x.reshape(len(x), 4, f // 4).swapaxes(1, 2).reshape(len(x), f)
    if variant == 1:  # the batch merged with a dimension and taken apart again
        w = {"w": _matrix(rng, f // 2, f // 2)}
        return w, lambda p, x, b: (x.reshape(-1, f // 2) @ p["w"]).reshape(len(x), f)
    if variant == 2:
        return {}, lambda p, x, b: jnp.concatenate([x[:, 3:], x[:, :3]], 1) + jnp.pad(x[:, :-2], ((0, 0), (1, 1)))
    return {}, lambda p, x, b: jnp.stack([x, -x], 1).reshape(len(x), 2, f).max(1)


def _window(rng, f, variant, g):
    numbers = ("NWC", "WIO", "NWC")
    if variant == 0:  # a grouped convolution over positions
        k = {"k": _matrix(rng, 3, 2, g)}
        return k, lambda p, x, b: lax.conv_general_dilated(
            x.reshape(len(x), -1, 4), p["k"], (1,), "SAME", dimension_numbers=numbers, feature_group_count=2
        ).mean(1)
    if variant == 1:  # pooling, and what is left brought back to size

        def pool(p, x, b):
            y = x.reshape(len(x), -1, 4)
            top = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "SAME")
            mean = lax.reduce_window(y, 0.0, lax.add, (1, 3, 1), (1, 2, 1), "SAME") / 3
            return jnp.repeat(top + mean, 2, 1)[:, : y.shape[1]].reshape(x.shape)

        return {}, pool
    if variant == 2:  # strides, along the batch too
        return (
            {},
            lambda p, x, b: (
                x[:, ::-1] + jnp.repeat(x[:, ::2], 2, 1) + (x[1::2] - x[::2]).mean() + x.at[:, 1::2].mul(0.5)
            ),
        )

    def spread(p, x, b):  # a transposed convolution, and a part overwritten at a place that is data
        y = lax.conv_transpose(x.reshape(len(x), -1, 4), p["k"], (2,), "SAME", dimension_numbers=numbers)
        x = x + jnp.tanh(y[:, 1::2].reshape(x.shape))
        return lax.dynamic_update_slice_in_dim(x, 0.5 * x[:, :4], b["ids"][0, 0] % 4, 1)

    return {"k": _matrix(rng, 2, 4, 4)}, spread


def _reduce(rng, f, variant, g):
    if variant == 0:
        return {}, lambda p, x, b: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 0.01)
    if variant == 1:  # statistics of the batch
        return {}, lambda p, x, b: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.1)
    if variant == 2:
        return {}, lambda p, x, b: jax.nn.softmax(x) * f + jnp.cumsum(x, axis=1) / f
    return {}, lambda p, x, b: x * jnp.exp(-jnp.abs(x).max(-1, keepdims=True)) + x.sum() / x.size + jnp.sort(x)[:, :1]


def _each(rng, f, variant, g):
    if variant == 0:
        s = {"s": np.ones(f, np.float32)}
        return s, lambda p, x, b: jax.nn.gelu(x) * p["s"]
    if variant == 1:
        return {}, lambda p, x, b: jnp.where(x > 0.3, x, jnp.sin(x)) + lax.stop_gradient(x)
    if variant == 2:
        return {}, lambda p, x, b: x.astype(jnp.bfloat16).astype(jnp.float32) * 0.5 + jnp.clip(x, -1, 1)
    return {}, lambda p, x, b: lax.cond(b["ids"][0, 0] > 8, jnp.tanh, lambda y: y / (1 + y**2), x)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "dot": _dot, "conv": _conv, "scan": _scan, "gather": _gather,
    "scatter": _scatter, "reshape": _reshape, "reduce": _reduce, "each": _each, "window": _window,
}  # fmt: skip
LOSSES = ("mean", "sum", "weighted", "classes")


def chain(links: list[Link], loss: str, seed: int) -> tuple[Any, Callable[[Any, Any], jax.Array]]:
    """(parameters, loss(parameters, batch)) of a chain. It begins and ends with a matmul, so that every value has a
    gradient and every program something to split."""
    rng = np.random.default_rng(seed)
    params, steps, f = [], [], FEATURES
    for kind, variant, width in [("dot", 0, 32), *links, ("dot", 0, 32)]:
        p, apply = OPERATIONS[kind](rng, f, variant, width)
        params.append(p)
        steps.append(apply)
        f = jax.eval_shape(apply, p, jax.ShapeDtypeStruct((ROWS, f), jnp.float32), abstract_batch()).shape[1]

    def evaluate(params, batch):
        x = batch["x"]
        for p, apply in zip(params, steps):
            x = apply(p, x, batch)
        if loss == "sum":
            return (x**2).sum()
        if loss == "weighted":
            return ((x**2).mean(-1) * batch["weight"]).sum() / batch["weight"].sum()
        if loss == "classes":
            return -jnp.take_along_axis(jax.nn.log_softmax(x), batch["ids"][:, :1] % 32, 1).mean()
        return (x**2).mean()

    return params, evaluate


def abstract_batch() -> dict[str, jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0))


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(ROWS, FEATURES)).astype(np.float32),
        "ids": rng.integers(0, VOCAB, size=(ROWS, WORDS)).astype(np.int32),
        "weight": rng.uniform(0.1, 2.0, size=ROWS).astype(np.float32),
    }


def training_step(chains: list[tuple[list[Link], str, int]]) -> tuple[Callable[..., Any], Any]:
    """(step, parameters): one step of gradient descent on the sum of the chains' losses; each has parameters of its
    own, so each is a program by itself. The step returns the losses and the gradients too."""
    made = [chain(*c) for c in chains]

    def step(params, batch):
        def total(params):
            losses = [f(p, batch) for p, (_, f) in zip(params, made)]
            return sum(losses), losses

        (_, losses), grads = jax.value_and_grad(total, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), (losses, grads)

    return step, [p for p, _ in made]
