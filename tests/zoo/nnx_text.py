"""NNX, text: a GPT with unrolled layers, one with scanned layers under remat with dropout, an LSTM."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.zoo.base import Case, Family, probe, tokens
from tests.zoo.gpt import HEADS, ROWS, SEQ, VOCAB, WIDTH, attend


class Block(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        rows, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(rows, seq, 3, HEADS, width // HEADS)
        h = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(rows, seq, width)
        x = x + self.drop(self.out(h))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Text(nnx.Module):
    """Tokens in, logits out; a subclass says what happens between."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (SEQ, WIDTH), jnp.float32))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.norm(self.middle(self.tokens(ids) + self.positions[...])))


class Unrolled(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def middle(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Scanned(Text):
    LAYERS = 4

    def __init__(self, rngs):
        super().__init__(rngs)

        @nnx.split_rngs(splits=self.LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Block(rngs, dropout=0.1)

        self.layers = create(rngs)

    def middle(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(block, x):
            return block(x)

        return forward(self.layers, x)


class LSTM(Text):
    def __init__(self, rngs):
        super().__init__(rngs)
        cell = nnx.OptimizedLSTMCell(WIDTH, WIDTH, param_dtype=jnp.result_type(float), rngs=rngs)
        self.rnn = nnx.RNN(cell, rngs=rngs)

    def middle(self, x):
        return self.rnn(x)


def make(build, tx, with_grads=False):
    note = probe(with_grads)

    def init(rng):
        model = build(nnx.Rngs(rng))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, batch):
        def loss_fn(model):
            logits = model(batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return note({"loss": loss}, grads)

    return Case(step, init, lambda rng: tokens(rng, ROWS, SEQ, VOCAB))


def make_unrolled(with_grads=False):
    return make(Unrolled, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), with_grads)


def make_scanned(with_grads=False):
    return make(Scanned, optax.adafactor(1e-2, min_dim_size_to_factor=16), with_grads)


def make_lstm(with_grads=False):
    return make(LSTM, optax.rmsprop(1e-3), with_grads)


UNROLLED = Family(
    "nnx_gpt_unrolled", make_unrolled, "adamw, chained with clip", "nnx.List of three layers", form="modules"
)
SCAN = Family("nnx_gpt_scan", make_scanned, "adafactor", "nnx.scan and nnx.remat; RNG counters a layer", form="modules")
RNN = Family("nnx_lstm", make_lstm, "rmsprop", "nnx.RNN", form="modules")
