"""Mixture of experts twice: dense dispatch with a capacity (GShard, arXiv:2006.16668), and `ragged_dot` without one."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.zoo.base import Case, Family, probe, tokens

VOCAB, WIDTH, EXPERTS, HIDDEN, SEQ, ROWS, TOP = 64, 24, 4, 48, 16, 16, 2


class Experts(nn.Module):
    """The experts' weights, stacked; a subclass says how tokens reach them."""

    def weights(self):
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("up", init, (EXPERTS, WIDTH, HIDDEN), jnp.float32)
        return up, self.param("down", init, (EXPERTS, HIDDEN, WIDTH), jnp.float32)

    def route(self, x):
        """Probabilities [..., experts], and the weight and index of the best two."""
        probs = jax.nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="router")(x), axis=-1)
        weight, index = jax.lax.top_k(probs, TOP)
        return probs, weight / weight.sum(-1, keepdims=True), index


class DenseDispatch(Experts):
    """Each row of the batch is a group; a token over an expert's capacity is dropped for that expert."""

    capacity: int = SEQ * TOP // EXPERTS + 2

    @nn.compact
    def __call__(self, x):
        up, down = self.weights()
        probs, weight, index = self.route(x)
        chosen = jax.nn.one_hot(index, EXPERTS, dtype=x.dtype)  # [batch, seq, top, experts]
        flat = chosen.swapaxes(1, 2).reshape(x.shape[0], TOP * SEQ, EXPERTS)
        position = (jnp.cumsum(flat, axis=1) - flat).reshape(x.shape[0], TOP, SEQ, EXPERTS).swapaxes(1, 2)
        slot = jax.nn.one_hot(position.astype(jnp.int32), self.capacity, dtype=x.dtype) * chosen[..., None]
        combine = jnp.einsum("bst,bstec->bsec", weight, slot)
        dispatch = slot.sum(axis=2)
        inside = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        hidden = nn.gelu(jnp.einsum("ebcd,edh->ebch", inside, up))
        outside = jnp.einsum("ebch,ehd->ebcd", hidden, down)
        # Load balancing (arXiv:2101.03961, section 2.2): a product of two means over the whole batch.
        balance = EXPERTS * jnp.sum(probs.mean((0, 1)) * chosen[:, :, 0].mean((0, 1)))
        return jnp.einsum("bsec,ebcd->bsd", combine, outside), balance


class Ragged(Experts):
    """Tokens of the whole batch sorted by expert, one matmul with ragged groups."""

    @nn.compact
    def __call__(self, x):
        up, down = self.weights()
        probs, weight, index = self.route(x.reshape(-1, WIDTH))
        order = jnp.argsort(index.reshape(-1))
        sizes = jnp.bincount(index.reshape(-1), length=EXPERTS).astype(jnp.int32)
        inside = x.reshape(-1, WIDTH)[order // TOP]
        outside = jax.lax.ragged_dot(nn.gelu(jax.lax.ragged_dot(inside, up, sizes)), down, sizes)
        scaled = outside * weight.reshape(-1)[order][:, None]
        mixed = jnp.zeros_like(x.reshape(-1, WIDTH)).at[order // TOP].add(scaled)
        return mixed.reshape(x.shape), EXPERTS * jnp.sum(probs.mean(0) ** 2)


class Model(nn.Module):
    experts: type[Experts]

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="tokens")(ids)
        x = x + nn.tanh(nn.Dense(WIDTH, name="mix")(nn.LayerNorm()(jnp.cumsum(x, axis=1))))
        total = 0.0
        for _ in range(2):
            y, balance = self.experts()(nn.LayerNorm()(x))
            x, total = x + y, total + balance
        return nn.Dense(VOCAB, name="head")(x), total


def make(experts, with_grads=False):
    model, note = Model(experts), probe(with_grads)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, SEQ), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(2e-3))

    def step(state, batch):
        def loss_fn(params):
            logits, balance = state.apply_fn({"params": params}, batch["inputs"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
            return loss + 0.01 * balance, {"loss": loss, "balance": balance}

        (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), note(metrics, grads)

    return Case(step, init, lambda rng: tokens(rng, ROWS, SEQ, VOCAB))


DENSE = Family(
    "moe_dense", functools.partial(make, DenseDispatch), "adamw", "dispatch by one-hot einsums; balancing loss"
)
RAGGED = Family(
    "moe_ragged", functools.partial(make, Ragged), "adamw", "argsort over the batch, ragged_dot, scatter-add"
)
