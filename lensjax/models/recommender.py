"""DLRM (arXiv:1906.00091) with the sizes of MLPerf's benchmark on the Criteo Terabyte click logs: 26 tables of 128
columns, 188 million rows in all, between two small MLPs.

Tables are trained with plain SGD, as in MLPerf's reference. A table of more than a thousand rows has its rows rounded
up to a multiple of 1024, as sharded implementations pad theirs, so that it can be split by rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

# Rows of the tables at a cap of 40 million: github.com/mlcommons/training, recommendation/dlrm.
_ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346, 10, 2_208, 11_938,
    155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DlrmConfig:
    """`rows` of each table, `width` of its columns; `dense` features; sizes of the two MLPs' hidden layers."""

    rows: tuple[int, ...] = _ROWS
    width: int = 128
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512, 256)


CONFIGS = {"dlrm": DlrmConfig(), "dlrm-tiny": DlrmConfig((2048, 4096, 24), 16, 8, (32,), (32,))}


class Dlrm(nn.Module):
    """Dense features [batch, dense] and one index per table int32[batch, tables] -> logits float32[batch]."""

    config: DlrmConfig

    @nn.compact
    def __call__(self, dense, sparse):
        c = self.config
        x = dense
        for i, n in enumerate((*c.bottom, c.width)):
            x = nn.relu(nn.Dense(n, name=f"bottom_{i}")(x))
        vectors = [x]
        for i, n in enumerate(c.rows):
            padded = -(-n // 1024) * 1024 if n > 1000 else n
            vectors.append(nn.Embed(padded, c.width, name=f"table_{i}")(sparse[:, i]))
        stacked = jnp.stack(vectors, axis=1)
        pairs = jnp.einsum("bif,bjf->bij", stacked, stacked)
        upper = jnp.triu_indices(len(vectors), k=1)
        x = jnp.concatenate([x, pairs[:, upper[0], upper[1]]], axis=-1)
        for i, n in enumerate(c.top):
            x = nn.relu(nn.Dense(n, name=f"top_{i}")(x))
        return nn.Dense(1, name="click")(x)[:, 0]


def optimizer() -> optax.GradientTransformation:
    return optax.sgd(1.0)


def create_state(config: DlrmConfig, rng: jax.Array, tx: optax.GradientTransformation) -> TrainState:
    model = Dlrm(config)
    params = model.init(rng, jnp.zeros((1, config.dense)), jnp.zeros((1, len(config.rows)), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, Any]]:
    """Click prediction; batch: `dense` float32[batch, features], `sparse` int32[batch, tables], `clicked`
    float32[batch]."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["dense"], batch["sparse"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}
