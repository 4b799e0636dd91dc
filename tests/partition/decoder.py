"""A small scanned decoder (GQA, SwiGLU, remat, Adam) with hand-written shardings; its traffic has closed forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

OPEN = P.UNCONSTRAINED
REPLICATED = P()


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 4
    embed: int = 64
    heads: int = 8
    kv: int = 4
    mlp: int = 128
    vocab: int = 256
    batch: int = 16
    seq: int = 32
    dtype: Any = jnp.float32
    remat: bool = True

    @property
    def head(self) -> int:
        return self.embed // self.heads


# Dimensions of each weight, to be mapped to mesh axes; stacked ones start with "layers".
WEIGHTS = {
    "emb": ("vocab", "embed"),
    "out": ("embed", "vocab"),
    "wq": ("layers", "embed", "heads", "head"),
    "wk": ("layers", "embed", "kv", "head"),
    "wv": ("layers", "embed", "kv", "head"),
    "wo": ("layers", "heads", "head", "embed"),
    "wg": ("layers", "embed", "mlp"),
    "wu": ("layers", "embed", "mlp"),
    "wd": ("layers", "mlp", "embed"),
}
STACKED = tuple(n for n, dims in WEIGHTS.items() if dims[0] == "layers")


def shapes(c: Config) -> dict[str, jax.ShapeDtypeStruct]:
    return {n: jax.ShapeDtypeStruct([getattr(c, d) for d in dims], jnp.float32) for n, dims in WEIGHTS.items()}


def abstract_mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def gathered(mesh: Any, spec: P) -> Callable:
    """Replicated where used, its gradient pinned to the parameter's own spec (ZeRO-3's pair)."""

    @jax.custom_vjp
    def gather(w):
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))

    def backward(_, g):
        return (jax.lax.with_sharding_constraint(g, NamedSharding(mesh, spec)),)

    gather.defvjp(lambda w: (gather(w), None), backward)
    return gather


@dataclasses.dataclass(frozen=True)
class Rules:
    """A hand-written plan: specs of weights, of activations ([batch, seq, embed]), and which weights are gathered."""

    mesh: Any
    weights: dict[str, P]
    act: P = REPLICATED
    gather: bool = False

    def use(self, name: str, w: jax.Array, dtype: Any) -> jax.Array:
        spec = self.weights.get(name, P())
        if name in STACKED:
            spec = P(*tuple(spec)[1:])
        return gathered(self.mesh, spec)(w.astype(dtype)) if self.gather and any(spec) else w.astype(dtype)

    def pin(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.act))


def forward(params: dict, tokens: jax.Array, c: Config, r: Rules) -> jax.Array:
    dt = c.dtype

    def layer(x, w):
        w = {n: r.use(n, v, dt) for n, v in w.items()}
        y = x * jax.lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6).astype(dt)
        q = jnp.einsum("btd,dhk->bthk", y, w["wq"]).reshape(*y.shape[:2], c.kv, c.heads // c.kv, c.head)
        k, v = (jnp.einsum("btd,dhk->bthk", y, w[n]) for n in ("wk", "wv"))
        s = jnp.einsum("bqhgk,bshk->bhgqs", q, k).astype(jnp.float32) * c.head**-0.5
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e30)
        o = jnp.einsum("bhgqs,bshk->bqhgk", jax.nn.softmax(s).astype(dt), v).reshape(*y.shape[:2], c.heads, c.head)
        x = r.pin(x + jnp.einsum("bqhk,hkd->bqd", o, w["wo"]))
        z = jax.nn.silu(jnp.einsum("btd,df->btf", x, w["wg"])) * jnp.einsum("btd,df->btf", x, w["wu"])
        return r.pin(x + jnp.einsum("btf,fd->btd", z, w["wd"])), None

    x = r.pin(r.use("emb", params["emb"], dt)[tokens[:, :-1]])
    stack = {n: params[n] for n in STACKED}
    x, _ = jax.lax.scan(jax.checkpoint(layer) if c.remat else layer, x, stack)
    logits = jnp.einsum("btd,dv->btv", x, r.use("out", params["out"], dt)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def lowered(c: Config, r: Rules, batch: P, platform: str = "cpu", devices: Any = None) -> Any:
    """The training step, lowered for `platform`; the state is donated. `devices`: a concrete mesh to compile for."""
    mesh = r.mesh if devices is None else devices
    r = dataclasses.replace(r, mesh=mesh)
    optimizer = optax.adam(1e-3)

    def step(state, tokens):
        params, moments = state
        loss, grads = jax.value_and_grad(forward)(params, tokens, c, r)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    params = shapes(c)
    state = (params, jax.eval_shape(optimizer.init, params))

    def sharding(path, leaf):
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        return NamedSharding(mesh, r.weights.get(names[-1], P()) if names else P())

    where = jax.tree_util.tree_map_with_path(sharding, state)
    tokens = jax.ShapeDtypeStruct((c.batch, c.seq + 1), jnp.int32)
    jitted = jax.jit(
        step,
        in_shardings=(where, NamedSharding(mesh, batch)),
        out_shardings=(where, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return jitted.trace(state, tokens).lower(lowering_platforms=(platform,))


def fsdp(axis: str) -> dict[str, P]:
    """Every weight split over its embed dimension."""
    return {n: P(*[axis if d == "embed" else None for d in dims]) for n, dims in WEIGHTS.items()}


def tensor(axis: str, base: str | None = None) -> dict[str, P]:
    """Megatron's pairs: heads, kv and mlp split, vocab split; the embed dimension over `base` if given."""
    return {
        n: P(*[axis if d in ("heads", "kv", "mlp", "vocab") else base if d == "embed" else None for d in dims])
        for n, dims in WEIGHTS.items()
    }
