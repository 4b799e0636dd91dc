"""A byte-level GPT learns the source of Python's standard library, on two emulated hosts of four devices.

    python examples/train_gpt.py                        # plan, train, sample, picture
    python examples/train_gpt.py --steps 100 --check    # ... and prove every step equal to one device
    python examples/train_gpt.py --plan fsdp            # a preset instead of the planner's choice
    python examples/train_gpt.py --processes 2          # two processes of four devices, each with its own data
    JAX_PLATFORMS=cuda python examples/train_gpt.py     # the devices that are really there

The model, the state and `train_step` are ordinary Flax and know nothing of devices. The two lines that matter are
`lensjax.parallelize(train_step, ...)` and `step.init(...)`.
"""
# ruff: noqa: E402 - the emulated devices have to be set up before JAX is imported

from __future__ import annotations

import machine

CLUSTER = machine.emulate(hosts=2, devices=4)

import argparse
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import loop
import numpy as np
import optax
import show
import text
from check import Replay
from flax.training.train_state import TrainState

import lensjax

WIDTH, LAYERS, HEADS, SEQ, BATCH = 128, 4, 4, 128, 32
DROPOUT_SEED, INIT_SEED, DATA_SEED = 0, 1, 2


class Block(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x, _):
        drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0)
        h = nn.LayerNorm(name="norm1")(x)
        qkv = nn.DenseGeneral((3, HEADS, WIDTH // HEADS), use_bias=False, name="qkv")(h)
        h = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + drop(nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="out")(h))
        h = nn.LayerNorm(name="norm2")(x)
        h = nn.gelu(nn.Dense(4 * WIDTH, name="up")(h))
        return x + drop(nn.Dense(WIDTH, name="down")(h)), None


class GPT(nn.Module):
    """Bytes int32[batch, seq] -> logits float32[batch, seq, 256]."""

    @nn.compact
    def __call__(self, tokens, train: bool = False):
        x = nn.Embed(256, WIDTH, name="bytes")(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (SEQ, WIDTH))[: tokens.shape[1]]
        layers = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=LAYERS
        )
        x, _ = layers(dropout=0.1 if train else 0.0, name="layers")(x, None)
        return nn.Dense(256, name="head")(nn.LayerNorm(name="norm")(x))


def create_state(rng, steps: int) -> TrainState:
    model = GPT()
    params = model.init(rng, jnp.zeros((1, SEQ), jnp.int32))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, min(20, steps // 4 + 1), max(steps, 40), 5e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.99, weight_decay=0.1))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        key = jax.random.fold_in(jax.random.key(DROPOUT_SEED), state.step)
        logits = state.apply_fn({"params": params}, batch["inputs"], train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def target():
    """The step and the shapes of its arguments, for `lensjax plan examples/train_gpt.py:target --cluster ...`."""
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    state = jax.eval_shape(lambda: create_state(jax.random.key(0), 100))
    return train_step, (state, {"inputs": tokens, "targets": tokens})


def local_batch(data: np.ndarray, step: int):
    """This process's own rows of the batch of one step; together the processes draw what one process would."""
    rows = text.windows(data, BATCH, SEQ, (DATA_SEED, step))
    mine = slice(*(BATCH * (jax.process_index() + i) // jax.process_count() for i in (0, 1)))
    return {name: x[mine] for name, x in rows.items()}


def generate(params, prompt: bytes, length: int) -> bytes:
    """Samples `length` bytes after the prompt, at temperature 0.8."""

    @jax.jit
    def sample(params, window, last, key):
        logits = GPT().apply({"params": params}, window[None])[0, last]
        return jax.random.categorical(key, logits / 0.8)

    written = list(prompt)
    for key in jax.random.split(jax.random.key(0), length):
        recent = written[-SEQ:]
        window = np.zeros(SEQ, np.int32)
        window[: len(recent)] = recent
        written.append(int(sample(params, window, len(recent) - 1, key)))
    return bytes(written)


def held_out_loss(params, valid: np.ndarray) -> float:
    batch = text.windows(valid, 64, SEQ, (DATA_SEED,))
    logits = jax.jit(GPT().apply)({"params": params}, batch["inputs"])
    return float(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean())


def arguments() -> argparse.Namespace:
    parser = loop.options(__doc__, steps=300)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes that share the devices")
    args = parser.parse_args()
    if args.processes < 1 or 8 % args.processes:
        parser.error("--processes must be 1, 2, 4 or 8")
    return args


def main() -> int:
    args = arguments()
    if args.processes > 1 and not machine.spawned():
        return machine.spawn(args.processes)
    machine.join()
    out = show.console(shown=jax.process_index() == 0)
    data, valid = text.standard_library()

    step = lensjax.parallelize(train_step, cluster=CLUSTER, plan=args.plan)
    started = time.perf_counter()
    shapes = {name: jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32) for name in ("inputs", "targets")}
    state = step.init(lambda rng: create_state(rng, args.steps), jax.random.key(INIT_SEED), batch=shapes)
    out.print(step.explain())
    out.print(f"planned, and the state created sharded, in {time.perf_counter() - started:.1f} s\n")

    bar = loop.bar(out, step, args.steps, "tokens", BATCH * SEQ)
    replay = Replay(train_step) if args.check else None
    state = loop.train(step, state, lambda i: step.from_local(local_batch(data, i)), args.steps, bar, replay)
    out.print(loop.summary(bar, "nats/byte"))

    params = machine.to_host(state.params)
    if jax.process_index() == 0:
        unseen = held_out_loss(params, valid)
        out.print(f"loss on held-out text {unseen:.3f} nats/byte\n\na sample:\n")
        out.print(generate(params, b"import os\n\n\ndef ", 400).decode("utf-8", "replace"), markup=False)
        title = "byte-level GPT on the standard library"
        loop.finish(out, args.out / "train_gpt.png", bar, title, "nats/byte", unseen)
    return loop.verdict(out, replay)


if __name__ == "__main__":
    sys.exit(main())
