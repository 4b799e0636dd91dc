"""Encoder-decoder with padding masks and one position bias shared by the layers of a side (T5, arXiv:1910.10683)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.base import Case, Family, probe

VOCAB, WIDTH, HEADS, SOURCE, TARGET, ROWS = 88, 32, 4, 12, 16, 16


class Bias(nn.Module):
    """[1, heads, queries, keys]: a learned number for each head and clipped distance."""

    @nn.compact
    def __call__(self, length):
        table = self.param("table", nn.initializers.normal(0.1), (HEADS, 17))
        position = jnp.arange(length)
        return table[:, jnp.clip(position[None, :] - position[:, None], -8, 8) + 8][None]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, source, bias):
        q = nn.DenseGeneral((HEADS, WIDTH // HEADS), use_bias=False, name="q")(x)
        k = nn.DenseGeneral((HEADS, WIDTH // HEADS), use_bias=False, name="k")(source)
        v = nn.DenseGeneral((HEADS, WIDTH // HEADS), use_bias=False, name="v")(source)
        probs = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, v)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="o")(out)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, use_bias=False)(nn.relu(nn.Dense(3 * WIDTH, use_bias=False)(x)))


class Seq2Seq(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(VOCAB, WIDTH, name="shared")
        padded = jnp.where(source == 0, -1e9, 0.0)[:, None, None, :]
        causal = jnp.where(jnp.tril(jnp.ones((target.shape[1],) * 2, bool)), 0.0, -1e9)
        x, bias = embed(source), Bias(name="encoder_bias")(source.shape[1]) + padded
        for _ in range(2):
            h = nn.RMSNorm()(x)
            x = x + Attention()(h, h, bias)
            x = x + Mlp()(nn.RMSNorm()(x))
        memory = nn.RMSNorm()(x)
        y, bias = embed(target), Bias(name="decoder_bias")(target.shape[1]) + causal
        for _ in range(2):
            h = nn.RMSNorm()(y)
            y = y + Attention()(h, h, bias)
            y = y + Attention()(nn.RMSNorm()(y), memory, padded)
            y = y + Mlp()(nn.RMSNorm()(y))
        return embed.attend(nn.RMSNorm()(y) / jnp.sqrt(WIDTH).astype(y.dtype))


def make(with_grads=False):
    model, note = Seq2Seq(), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.ones((1, SOURCE), jnp.int32), jnp.ones((1, TARGET), jnp.int32))["params"]
        tx = optax.adafactor(3e-3, min_dim_size_to_factor=16, multiply_by_parameter_scale=False)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def batch(rng):
        ks, kt, kl = jax.random.split(rng, 3)
        length = jax.random.randint(kl, (ROWS, 1), 4, SOURCE + 1)
        source = jnp.where(jnp.arange(SOURCE) < length, jax.random.randint(ks, (ROWS, SOURCE), 1, VOCAB), 0)
        return {"source": source, "target": jax.random.randint(kt, (ROWS, TARGET + 1), 1, VOCAB)}

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["source"], batch["target"][:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"][:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family("encoder_decoder", make, "adafactor", "bias shared between layers, table shared between both sides")
