"""Three small GPTs: unrolled layers; scanned layers with remat and dropout; tied embeddings with dropout."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from tests.zoo.base import Case, Family, probe, tokens

VOCAB, WIDTH, HEADS, SEQ, ROWS = 96, 32, 4, 16, 16


def attend(q, k, v):
    """Causal attention written out, as most people have it."""
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v)


class Block(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        drop = nn.Dropout(self.dropout, deterministic=not train)
        h = nn.LayerNorm()(x)
        qkv = nn.DenseGeneral((3, HEADS, WIDTH // HEADS), name="qkv")(h)
        h = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + drop(nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(h))
        h = nn.LayerNorm()(x)
        h = nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(h)))
        return x + drop(h)


class ScanBlock(nn.Module):
    dropout: float
    train: bool

    @nn.compact
    def __call__(self, x, _):
        return Block(self.dropout, name="block")(x, self.train), None


class GPT(nn.Module):
    layers: int
    scan: bool = False
    tied: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, ids, train=False):
        embed = nn.Embed(VOCAB, WIDTH, name="tokens")
        x = embed(ids) + self.param("positions", nn.initializers.normal(0.02), (SEQ, WIDTH))
        if self.scan:
            body = nn.remat(ScanBlock, prevent_cse=False)
            rngs = {"params": True, "dropout": True}
            stack = nn.scan(body, variable_axes={"params": 0}, split_rngs=rngs, length=self.layers)
            x, _ = stack(self.dropout, train, name="layers")(x, None)
        else:
            for i in range(self.layers):
                x = Block(self.dropout, name=f"block_{i}")(x, train)
        x = nn.LayerNorm(name="norm")(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCAB, use_bias=False, name="head")(x)


class TrainState(train_state.TrainState):
    dropout_key: Any = None


def make(model, tx, with_grads=False):
    note = probe(with_grads)

    def init(rng):
        k_params, k_dropout = jax.random.split(rng)
        params = model.init(k_params, jnp.zeros((1, SEQ), jnp.int32))["params"]
        key = k_dropout if model.dropout else None
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx(), dropout_key=key)

    def step(state, batch):
        rngs = {}
        if state.dropout_key is not None:
            rngs["dropout"] = jax.random.fold_in(state.dropout_key, state.step)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"], train=True, rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss}, grads)

    return Case(step, init, lambda rng: tokens(rng, ROWS, SEQ, VOCAB))


def adamw_clip():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def adafactor():
    return optax.adafactor(1e-2, min_dim_size_to_factor=16)


def adamw_schedule():
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))


UNROLLED = Family(
    "gpt_unrolled",
    functools.partial(make, GPT(layers=3), adamw_clip),
    "adamw, chained with clip",
    "three unrolled layers; a field of the state that is None",
)
SCAN = Family(
    "gpt_scan_remat_dropout",
    functools.partial(make, GPT(layers=4, scan=True, dropout=0.1), adafactor),
    "adafactor",
    "scanned layers under remat; dropout from a typed key in the state; factored moments",
)
TIED = Family(
    "gpt_tied_dropout",
    functools.partial(make, GPT(layers=2, tied=True, dropout=0.1), adamw_schedule),
    "adamw with a schedule",
    "one table for lookup and logits; dropout",
)
