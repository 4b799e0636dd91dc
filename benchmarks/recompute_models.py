"""Small models of every shape that a layer takes, with and without hand-written `nn.remat` around each layer.

`STEPS[name](remat=False, batch=None, **sizes) -> (step, state, batch)`, the latter two as shapes. Nothing here knows of
plans or meshes: without `remat` it is what anybody would write, with it what an expert would.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a decoder."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    seq: int = 128
    vocab: int = 256


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [batch, positions, heads, width]; the scores in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = nn.softmax(jnp.where(seen, scores, -1e9).astype(jnp.float32))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(q.dtype), v)


class Block(nn.Module):
    s: Sizes

    @nn.compact
    def __call__(self, x):
        s = self.s
        qkv = nn.DenseGeneral((3, s.heads, s.width // s.heads), name="qkv")(nn.LayerNorm(name="norm1")(x))
        mixed = attention(*(qkv[:, :, i] for i in range(3)))
        x = x + nn.DenseGeneral(s.width, axis=(-2, -1), name="out")(mixed)
        hidden = nn.gelu(nn.Dense(4 * s.width, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(s.width, name="down")(hidden)


class Row(nn.Module):
    """A block as `nn.scan` wants it."""

    s: Sizes

    @nn.compact
    def __call__(self, x, _):
        return Block(self.s, name="block")(x), None


class Gpt(nn.Module):
    s: Sizes
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        s = self.s
        x = nn.Embed(s.vocab, s.width, name="tokens")(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (s.seq, s.width))
        if self.scan:
            row = nn.remat(Row, prevent_cse=False) if self.remat else Row
            stack = nn.scan(row, variable_axes={"params": 0}, split_rngs={"params": True}, length=s.layers)
            x, _ = stack(s, name="layers")(x, None)
        else:
            block = nn.remat(Block) if self.remat else Block
            for i in range(s.layers):
                x = block(s, name=f"block_{i}")(x)
        return nn.Dense(s.vocab, use_bias=False, name="head")(nn.LayerNorm(name="norm")(x))


class Albert(nn.Module):
    """One block, six times, with dropout."""

    s: Sizes
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.s.vocab, self.s.width)(tokens)
        block = (nn.remat(Block) if self.remat else Block)(self.s, name="shared")
        for _ in range(self.s.layers):
            x = nn.Dropout(0.1, deterministic=False)(block(x))
        return nn.Dense(self.s.vocab)(x)


class ResBlock(nn.Module):
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False)
        h = nn.relu(norm()(nn.Conv(self.channels, (3, 3), self.stride, use_bias=False)(x)))
        h = norm()(nn.Conv(self.channels, (3, 3), use_bias=False)(h))
        if x.shape != h.shape:
            x = norm()(nn.Conv(self.channels, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + h)


class ResNet(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(ResBlock) if self.remat else ResBlock
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        for i, (channels, stride) in enumerate([(16, 1)] * 4 + [(32, 2)] + [(32, 1)] * 3):
            x = block(channels, stride, name=f"block_{i}")(x)
        return nn.Dense(10)(x.mean((1, 2)))


class UBlock(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x):
        h = nn.silu(nn.GroupNorm(8)(nn.Conv(self.channels, (3, 3))(x)))
        h = nn.silu(nn.GroupNorm(8)(nn.Conv(self.channels, (3, 3))(h)))
        return h + nn.Conv(self.channels, (1, 1))(x)


class UNet(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block, skips = nn.remat(UBlock) if self.remat else UBlock, []
        x = nn.Conv(16, (3, 3))(x)
        for i, channels in enumerate((16, 32, 64)):
            x = block(channels, name=f"down{i}")(x)
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = block(64, name="middle")(x)
        for i, channels in enumerate((64, 32, 16)):
            x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
            x = block(channels, name=f"up{i}")(jnp.concatenate([x, skips.pop()], -1))
        return nn.Conv(3, (1, 1))(x)


class MambaBlock(nn.Module):
    """A selective state space, its recurrence by `jax.lax.associative_scan`."""

    inner: int
    states: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        u, gate = jnp.split(dense(2 * self.inner)(nn.LayerNorm(dtype=self.dtype)(x)), 2, -1)
        step = nn.softplus(dense(self.inner)(u))
        into, out = dense(self.states)(u), dense(self.states)(u)
        decay = -jnp.exp(self.param("decay", nn.initializers.normal(0.1), (self.inner, self.states)))
        a = jnp.exp(step[..., None] * decay)
        b = ((step * u)[..., None] * into[:, :, None]).astype(a.dtype)
        _, h = jax.lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (a, b), axis=1)
        return x + dense(x.shape[-1])((h * out[:, :, None]).sum(-1) * nn.silu(gate))


class Mamba(nn.Module):
    layers: int = 4
    width: int = 64
    states: int = 8
    vocab: int = 256
    dtype: Any = None
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        block = nn.remat(MambaBlock) if self.remat else MambaBlock
        for i in range(self.layers):
            x = block(self.width, self.states, self.dtype, name=f"block_{i}")(x)
        return nn.Dense(self.vocab, dtype=self.dtype)(x).astype(jnp.float32)


# ---- their steps ----------------------------------------------------------------------------------------------------


class State(train_state.TrainState):
    extra: Any = None


def _labels(out, y):
    return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()


def _squares(out, y):
    return jnp.mean((out - y) ** 2)


def linen(model: nn.Module, plain: nn.Module, batch: Any, loss: Callable[..., Any], tx: Any) -> tuple[Any, Any, Any]:
    """The step of a linen model: dropout keys from the step number, other collections (BatchNorm's) updated. `plain`:
    the same model without remat, whose parameters are the same."""

    def init():
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        variables = dict(plain.init(keys, jnp.zeros((1, *batch["x"].shape[1:]), batch["x"].dtype)))
        params = variables.pop("params")
        return State.create(apply_fn=model.apply, params=params, tx=tx, extra=variables)

    def step(state, batch):
        def loss_fn(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(7), state.step)}
            out, extra = model.apply(
                {"params": params, **state.extra}, batch["x"], rngs=rngs, mutable=list(state.extra)
            )
            return loss(out, batch["y"]), extra

        (value, extra), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, extra=extra), {"loss": value}

    return step, jax.eval_shape(init), batch


def _tokens(batch: int, seq: int) -> dict[str, Any]:
    return {k: jax.ShapeDtypeStruct((batch, seq), jnp.int32) for k in "xy"}


def _clipped() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def gpt(remat: bool = False, batch: int = 16, scan: bool = False, **sizes: int) -> tuple[Any, Any, Any]:
    s = Sizes(**sizes)
    return linen(Gpt(s, scan, remat), Gpt(s, scan), _tokens(batch, s.seq), _labels, _clipped())


def albert(remat: bool = False, batch: int = 8) -> tuple[Any, Any, Any]:
    s = Sizes()
    return linen(Albert(s, remat), Albert(s), _tokens(batch, s.seq), _labels, optax.adam(1e-3))


def mamba(remat: bool = False, batch: int = 8, seq: int = 64, **sizes: Any) -> tuple[Any, Any, Any]:
    tokens = _tokens(batch, seq)
    return linen(Mamba(**sizes, remat=remat), Mamba(**sizes), tokens, _labels, optax.adam(1e-3))


def resnet(remat: bool = False, batch: int = 64) -> tuple[Any, Any, Any]:
    images = {
        "x": jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32),
        "y": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return linen(ResNet(remat), ResNet(), images, _labels, optax.adam(1e-3))


def unet(remat: bool = False, batch: int = 16) -> tuple[Any, Any, Any]:
    images = {k: jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32) for k in "xy"}
    return linen(UNet(remat), UNet(), images, _squares, optax.adam(1e-3))


class NnxBlock(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.heads = s.heads
        self.norm1, self.norm2 = nnx.LayerNorm(s.width, rngs=rngs), nnx.LayerNorm(s.width, rngs=rngs)
        self.qkv, self.out = nnx.Linear(s.width, 3 * s.width, rngs=rngs), nnx.Linear(s.width, s.width, rngs=rngs)
        self.up, self.down = nnx.Linear(s.width, 4 * s.width, rngs=rngs), nnx.Linear(4 * s.width, s.width, rngs=rngs)

    def __call__(self, x):
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, self.heads, -1)
        x = x + self.out(attention(*(qkv[:, :, i] for i in range(3))).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxGpt(nnx.Module):
    def __init__(self, s: Sizes, remat: bool, rngs: nnx.Rngs):
        self.remat = remat
        self.tokens = nnx.Embed(s.vocab, s.width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (s.seq, s.width)))
        self.blocks = nnx.List([NnxBlock(s, rngs) for _ in range(s.layers)])
        self.norm = nnx.LayerNorm(s.width, rngs=rngs)
        self.head = nnx.Linear(s.width, s.vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions[...]
        run = nnx.remat(NnxBlock.__call__) if self.remat else NnxBlock.__call__
        for block in self.blocks:
            x = run(block, x)
        return self.head(self.norm(x))


def gpt_nnx(remat: bool = False, batch: int = 16, **sizes: int) -> tuple[Any, Any, Any]:
    s = Sizes(**sizes)

    def init():
        model = NnxGpt(s, remat, nnx.Rngs(0))
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)))

    graph = nnx.split(nnx.eval_shape(lambda: nnx.merge(*init())))[0]

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda m: _labels(m(batch["x"]), batch["y"]))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    return step, jax.eval_shape(lambda: init()[1]), _tokens(batch, s.seq)


STEPS: dict[str, Callable[..., tuple[Any, Any, Any]]] = {
    "gpt": gpt,
    "gpt-nnx": gpt_nnx,
    "gpt-scan": functools.partial(gpt, scan=True),
    "resnet": resnet,
    "unet": unet,
    "albert": albert,
    "mamba": mamba,
}
