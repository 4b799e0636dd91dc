"""A byte-level GPT in Flax NNX: modules updated in place, dropout counters in the model; two emulated hosts of four.

python examples/train_nnx.py
python examples/train_nnx.py --steps 50 --check     # ... and prove every step equal to one device
python examples/train_nnx.py --plan fsdp            # a preset instead of the planner's choice
"""
# ruff: noqa: E402 - the emulated devices have to be set up before JAX is imported

from __future__ import annotations

import machine

CLUSTER = machine.emulate(hosts=2, devices=4)

import sys

import jax
import jax.numpy as jnp
import loop
import optax
import show
import text
from check import Replay
from flax import nnx

import lensjax

WIDTH, LAYERS, HEADS, SEQ, BATCH = 96, 3, 4, 64, 32


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        rows, seq, _ = x.shape
        q, k, v = jnp.unstack(self.qkv(self.norm1(x)).reshape(rows, seq, 3, HEADS, WIDTH // HEADS), axis=2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, seq, WIDTH)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))


class GPT(nnx.Module):
    """Bytes int32[batch, seq] -> logits float32[batch, seq, 256]."""

    def __init__(self, rngs: nnx.Rngs):
        self.bytes = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (SEQ, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.bytes(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def create(rng):
    model = GPT(nnx.Rngs(rng))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 20, 400, 5e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.99, weight_decay=0.1))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def train_step(model, optimizer, batch):
    def loss_fn(model):
        logits = model(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def one_device(modules, batch):
    """The undecorated step as a function of arrays, for the replay."""
    model, optimizer = nnx.merge(*modules)
    metrics = train_step(model, optimizer, batch)
    return nnx.split((model, optimizer)), metrics


def main() -> int:
    args = loop.options(__doc__, steps=200).parse_args()
    out = show.console(shown=True)
    data, _ = text.standard_library()
    shapes = {name: jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32) for name in ("inputs", "targets")}

    step = lensjax.parallelize(train_step, cluster=CLUSTER, plan=args.plan)
    model, optimizer = step.init(create, jax.random.key(1), batch=shapes)
    out.print(step.explain())

    def run(_, batch):
        metrics = step(model, optimizer, batch)
        return nnx.split((model, optimizer)), metrics

    bar = loop.bar(out, step, args.steps, "tokens", BATCH * SEQ)
    replay = Replay(one_device) if args.check else None
    loop.train(
        run, nnx.split((model, optimizer)), lambda i: text.windows(data, BATCH, SEQ, (2, i)), args.steps, bar, replay
    )
    out.print(loop.summary(bar, "nats/byte"))
    loop.finish(out, args.out / "train_nnx.png", bar, "byte-level GPT in NNX", "nats/byte")
    return loop.verdict(out, replay)


if __name__ == "__main__":
    sys.exit(main())
