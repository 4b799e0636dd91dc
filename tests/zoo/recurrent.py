"""Two sequence models with state: an LSTM under `nn.RNN`, its gradient by hand with `jax.vjp`; a state space."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Case, Family, probe, tokens

VOCAB, WIDTH, SEQ, ROWS = 50, 24, 16, 16


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="tokens")(ids)
        x = nn.RNN(nn.OptimizedLSTMCell(40, param_dtype=jnp.result_type(float)), name="first")(x)
        return nn.Dense(VOCAB, name="head")(x)


class SelectiveSpace(nn.Module):
    """A state space whose step depends on the input (Mamba, arXiv:2312.00752, section 3), as a parallel scan."""

    states: int = 4

    @nn.compact
    def __call__(self, x):
        inner = 2 * x.shape[-1]
        u, gate = jnp.split(nn.Dense(2 * inner, use_bias=False, name="in")(x), 2, axis=-1)
        u = nn.silu(nn.Conv(inner, (3,), padding="CAUSAL", feature_group_count=inner, name="conv")(u))
        log_a = self.param(
            "log_a", lambda _, s: jnp.broadcast_to(jnp.log(jnp.arange(1.0, s[1] + 1, dtype=jnp.float32)), s), (inner, 4)
        )
        delta = nn.softplus(nn.Dense(inner, name="delta")(u))
        b, c = jnp.split(nn.Dense(2 * self.states, use_bias=False, name="bc")(u), 2, axis=-1)
        decay = jnp.exp(-delta[..., None] * jnp.exp(log_a))  # [batch, seq, inner, states]
        drive = (delta * u)[..., None] * b[:, :, None, :]

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, h = jax.lax.associative_scan(combine, (decay, drive), axis=1)
        y = jnp.einsum("bldn,bln->bld", h, c) + self.param("skip", nn.initializers.ones, (inner,)) * u
        return nn.Dense(x.shape[-1], use_bias=False, name="out")(y * nn.silu(gate))


class Mamba(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="tokens")(ids)
        for _ in range(2):
            x = x + SelectiveSpace()(nn.RMSNorm()(x))
        return nn.Dense(VOCAB, name="head")(nn.RMSNorm()(x))


def make(model, tx, by_hand, with_grads=False):
    note = probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, SEQ), jnp.int32))["params"]
        return params, tx.init(params)

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            logits = model.apply({"params": params}, batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        if by_hand:
            loss, pull_back = jax.vjp(loss_fn, params)
            (grads,) = pull_back(jnp.ones_like(loss))
        else:
            loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), note({"loss": loss}, grads)

    return Case(step, init, lambda rng: tokens(rng, ROWS, SEQ, VOCAB))


def make_lstm(with_grads=False):
    return make(LSTM(), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5)), True, with_grads)


def make_mamba(with_grads=False):
    return make(Mamba(), optax.adamw(2e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), False, with_grads)


LSTM_SCAN = Family("lstm_scan", make_lstm, "sgd, chained with clip", "nn.RNN; jax.vjp by hand; state is a tuple")
MAMBA = Family("mamba", make_mamba, "adamw with a mask", "associative_scan over time; depthwise causal convolution")
