"""A small vision transformer learns scikit-learn's handwritten digits, on two emulated hosts of four devices.

pip install -e ".[examples]"
python examples/train_vit_digits.py
python examples/train_vit_digits.py --check         # ... and prove every step equal to one device
python examples/train_vit_digits.py --plan fsdp     # a preset instead of the planner's choice
"""
# ruff: noqa: E402 - the emulated devices have to be set up before JAX is imported

from __future__ import annotations

import machine

CLUSTER = machine.emulate(hosts=2, devices=4)

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import loop
import numpy as np
import optax
import show
from check import Replay
from flax.training.train_state import TrainState

import lensjax

WIDTH, LAYERS, HEADS, BATCH = 64, 3, 4, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(h, h)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(h)))


class ViT(nn.Module):
    """Images [batch, 8, 8] in [0, 1] -> logits [batch, 10]; patches of 2x2, a class token."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (2, 2), strides=(2, 2), name="patches")(images[..., None])
        x = x.reshape(x.shape[0], -1, WIDTH)
        token = self.param("class_token", nn.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))
        for i in range(LAYERS):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(10, name="head")(nn.LayerNorm(name="norm")(x)[:, 0])


def create_state(rng, steps: int) -> TrainState:
    model = ViT()
    params = model.init(rng, jnp.zeros((1, 8, 8)))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10 + 1, steps + 1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


def target():
    """The step and the shapes of its arguments, for `lensjax plan FILE.py:target --cluster ...`."""
    state = jax.eval_shape(lambda: create_state(jax.random.key(0), 100))
    return train_step, (state, shapes())


def shapes():
    return {
        "image": jax.ShapeDtypeStruct((BATCH, 8, 8), jnp.float32),
        "label": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }


def digits():
    """(train, test) dictionaries of images in [0, 1] and labels; every fifth image is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit('this example reads scikit-learn\'s digits: pip install -e ".[examples]"')
    found = load_digits()
    data = {"image": (found.images / 16.0).astype(np.float32), "label": found.target.astype(np.int32)}
    held_out = np.arange(len(found.target)) % 5 == 4
    return ({name: x[mask] for name, x in data.items()} for mask in (~held_out, held_out))


def draw(data, step: int):
    """The batch of one step: random images; the same step, the same images."""
    rows = np.random.default_rng((0, step)).integers(0, len(data["label"]), BATCH)
    return {name: x[rows] for name, x in data.items()}


def main() -> int:
    args = loop.options(__doc__, steps=200).parse_args()
    out = show.console(shown=True)
    train, test = digits()

    step = lensjax.parallelize(train_step, cluster=CLUSTER, plan=args.plan)
    state = step.init(lambda rng: create_state(rng, args.steps), jax.random.key(1), batch=shapes())
    out.print(step.explain())

    bar = loop.bar(out, step, args.steps, "images", BATCH)
    replay = Replay(train_step) if args.check else None
    state = loop.train(step, state, lambda i: draw(train, i), args.steps, bar, replay)
    out.print(loop.summary(bar, "nats/image"))

    logits = jax.jit(ViT().apply)({"params": machine.to_host(state.params)}, test["image"])
    correct = np.asarray(logits.argmax(-1)) == test["label"]
    out.print(f"{correct.mean():.1%} of {len(correct)} held-out digits right")
    loop.finish(out, args.out / "train_vit_digits.png", bar, "ViT on handwritten digits", "nats/image")
    return loop.verdict(out, replay)


if __name__ == "__main__":
    sys.exit(main())
