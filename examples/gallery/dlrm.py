"""A recommender (DLRM): embedding tables split by hand with pins, the small dense networks on every device."""

import demo
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

TABLES, ROWS, WIDTH = 4, 4096, 32


class DLRM(nn.Module):
    """Dense float32[batch, 13] and sparse int32[batch, tables] features -> click logits float32[batch]."""

    @nn.compact
    def __call__(self, dense, sparse):
        x = nn.relu(nn.Dense(WIDTH)(nn.relu(nn.Dense(64)(dense))))
        looked = [nn.Embed(ROWS, WIDTH, name=f"table_{i}")(sparse[:, i]) for i in range(TABLES)]
        features = jnp.stack([x, *looked], axis=1)
        pairs = jnp.einsum("bid,bjd->bij", features, features).reshape(x.shape[0], -1)
        return nn.Dense(1)(nn.relu(nn.Dense(64)(jnp.concatenate([x, pairs], axis=1))))[:, 0]


def create(rng):
    params = DLRM().init(rng, jnp.zeros((1, 13)), jnp.zeros((1, TABLES), jnp.int32))["params"]
    return TrainState.create(apply_fn=DLRM().apply, params=params, tx=optax.adagrad(0.05))


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["dense"], batch["sparse"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["click"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def batch_of(rng):
    return {
        "dense": rng.standard_normal((64, 13), "float32"),
        "sparse": rng.integers(0, ROWS, (64, TABLES)).astype("int32"),
        "click": rng.integers(0, 2, 64).astype("float32"),
    }


if __name__ == "__main__":
    # The tables' rows over the four devices of a host; their moments follow. Everything else is whole.
    pins = {"state/params/table_*/embedding": ("zero1", None)}
    demo.run(train_step, create, batch_of, plan="dp=2,zero1=4", pins=pins)
