"""A training script as people have one: evaluation, EMA, checkpoints that it resumes from, a log. One device.

python examples/script_before.py --folder /tmp/run
"""

import argparse
import logging
import os
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
from flax import struct
from flax.training.train_state import TrainState

BATCH, WIDTH = 64, 256
log = logging.getLogger("train")


class Model(nn.Module):
    """float32[batch, 32] -> logits float32[batch, 8]."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.tanh(nn.Dense(WIDTH)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(8)(nn.tanh(nn.Dense(WIDTH)(x)))


class State(TrainState):
    ema: dict = struct.field(pytree_node=True)


def create_state(rng):
    params = Model().init(rng, jnp.zeros((1, 32)))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    return State.create(apply_fn=Model().apply, params=params, tx=tx, ema=jax.tree.map(jnp.copy, params))


def train_step(state, batch):
    def loss_fn(params):
        key = jax.random.fold_in(jax.random.key(0), state.step)
        logits = state.apply_fn({"params": params}, batch["x"], train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state.replace(ema=optax.incremental_update(state.params, state.ema, 0.05)), {"loss": loss}


def evaluate(params, batch):
    logits = Model().apply({"params": params}, batch["x"])
    return {"correct": (logits.argmax(-1) == batch["y"]).sum()}


def data(seed: int, rows: int):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 32), "float32")
    return {"x": x, "y": x[:, :8].argmax(1).astype("int32")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", required=True, help="checkpoints go here; an earlier run's newest is gone on from")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    log.setLevel(logging.INFO)
    test = data(10**6, 300)  # the last batch of an evaluation is smaller than the others

    step = jax.jit(train_step, donate_argnums=0)
    score = jax.jit(evaluate)
    state = create_state(jax.random.key(1))
    checkpoints = ocp.training.Checkpointer(os.path.abspath(args.folder))
    if checkpoints.latest is not None:
        state = checkpoints.load(checkpoints.latest.step, state)
        log.info("resumed at step %d", int(state.step))

    start = time.perf_counter()
    for i in range(int(state.step), args.steps):
        state, metrics = step(state, data(i, BATCH))
        if (i + 1) % 50 == 0:
            parts = [{k: v[j : j + BATCH] for k, v in test.items()} for j in range(0, 300, BATCH)]
            correct = sum(int(score(state.ema, part)["correct"]) for part in parts)
            log.info("step %d  loss %.4f  held out %.1f%%", i + 1, float(metrics["loss"]), correct / 3)
            checkpoints.save_async(i + 1, state, force=True)
    checkpoints.close()
    log.info("%.1f s", time.perf_counter() - start)


if __name__ == "__main__":
    main()
