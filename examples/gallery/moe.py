"""Mixture of experts: eight experts over the devices that also split the batch (expert parallelism)."""

import demo
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

EXPERTS, WIDTH, HIDDEN = 8, 64, 128


class Experts(nn.Module):
    """Each token goes to the expert that its router likes best; dense dispatch, [batch, seq, width] in and out."""

    @nn.compact
    def __call__(self, x):
        gates = nn.softmax(nn.Dense(EXPERTS, name="router")(x))
        chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS) * gates
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (EXPERTS, WIDTH, HIDDEN))
        down = self.param("down", init, (EXPERTS, HIDDEN, WIDTH))
        hidden = nn.gelu(jnp.einsum("bse,bsd,edh->ebsh", chosen, x, up))
        return x + jnp.einsum("ebsh,ehd->bsd", hidden, down)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, WIDTH)(tokens)
        return nn.Dense(256)(Experts(name="experts")(nn.LayerNorm()(x)))


def create(rng):
    params = Model().init(rng, jnp.zeros((1, 8), jnp.int32))["params"]
    return TrainState.create(apply_fn=Model().apply, params=params, tx=optax.adam(1e-2))


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def batch_of(rng):
    tokens = rng.integers(0, 256, (16, 33)).astype("int32")
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


if __name__ == "__main__":
    demo.run(train_step, create, batch_of, plan="dp=2,ep=4")
