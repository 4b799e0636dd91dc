"""Data parallel in two processes, each loading its own rows, with evaluation and a checkpoint.

lensjax launch --processes 2 --devices 4 examples/gallery/two_processes.py
"""
# ruff: noqa: E402 - processes meet before JAX makes its devices

import lensjax

lensjax.connect()

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

ROWS = 32  # of the whole batch


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(128)(x)))[:, 0]


def create(rng):
    params = Model().init(rng, jnp.zeros((1, 16)))["params"]
    return TrainState.create(apply_fn=Model().apply, params=params, tx=optax.adam(1e-2))


def loss_of(state, params, batch):
    return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: loss_of(state, p, batch))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def evaluate(state, batch):
    return loss_of(state, state.params, batch)


def rows(step: int):
    """This process's own part of the batch of one step: it makes no other."""
    mine = ROWS // jax.process_count()
    rng = np.random.default_rng((step, jax.process_index()))
    x = rng.standard_normal((mine, 16), "float32")
    return {"x": x, "y": np.tanh(x[:, 0] + x[:, 1])}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", help="for the checkpoint; all processes see it")
    args = parser.parse_args()
    step = lensjax.parallelize(train_step, plan="dp")
    test = step.companion(evaluate)
    shapes = {"x": jax.ShapeDtypeStruct((ROWS, 16), jnp.float32), "y": jax.ShapeDtypeStruct((ROWS,), jnp.float32)}
    state = step.init(create, jax.random.key(0), batch=shapes)
    say = print if jax.process_index() == 0 else lambda *_: None
    held_out = step.from_local(rows(-1 % 2**32))
    say(f"{jax.process_count()} processes, {jax.device_count()} devices, loss {float(test(state, held_out)):.4f}")
    for i in range(args.steps):
        state, metrics = step(state, step.from_local(rows(i)))
    say(f"after {args.steps} steps: training {float(metrics['loss']):.4f}, held out {float(test(state, held_out)):.4f}")
    if args.folder:
        step.save(args.folder, state, args.steps)
        back = step.restore(args.folder)
        say(f"restored: {float(test(back, held_out)):.4f}")


if __name__ == "__main__":
    main()
