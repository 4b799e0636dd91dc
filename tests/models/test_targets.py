"""Built-in targets have the published sizes, train, and cost nothing to describe."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lensjax._errors import UsageError
from lensjax.cost.price import price
from lensjax.models import create_state, target
from lensjax.models.decoder import blockwise, rope
from lensjax.models.targets import CONFIGS
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster


def _size(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


# Sizes as published: 8.03B, 70.6B and 405.9B (Llama 3 model cards), 175B (GPT-3 paper, table 2.1; 174.6B exact).
@pytest.mark.parametrize(
    "name, billions", [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85), ("gpt3-175b", 174.6)]
)
def test_parameter_count_is_the_published_one(name, billions):
    step, state, batch = target(name, 16, 2048)
    assert _size(state.params) / 1e9 == pytest.approx(billions, rel=2e-3)
    # Two moments a parameter: the optimizer is real.
    assert _size(state.opt_state) / _size(state.params) == pytest.approx(2, rel=1e-3)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((state, batch)))
    new_state, metrics = jax.eval_shape(step, state, batch)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert metrics["loss"].shape == ()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [n for n in CONFIGS if "tiny" in n])
@pytest.mark.parametrize("scan", [True, False])
def test_a_tiny_target_learns_a_constant_batch(name, scan):
    config = dataclasses.replace(CONFIGS[name], scan=scan, layers=2, dtype=jnp.float32)
    step, _, shapes = target(config, 4, 16)
    state = create_state(config, jax.random.key(0), optax.adam(3e-3))
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, config.vocab)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    assert jax.tree.map(jnp.shape, batch) == jax.tree.map(lambda s: s.shape, shapes)
    jitted = jax.jit(step)
    losses = []
    for _ in range(12):
        state, metrics = jitted(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(math.log(config.vocab), rel=0.05)  # uniform at the start
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_scanned_and_unrolled_layers_compute_the_same():
    scanned = dataclasses.replace(CONFIGS["llama3-tiny"], dtype=jnp.float32)
    unrolled = dataclasses.replace(scanned, scan=False, remat="none")
    state = create_state(scanned, jax.random.key(0))
    params = dict(state.params)
    stacked = params.pop("layers")
    for i in range(scanned.layers):
        params[f"layer_{i}"] = jax.tree.map(lambda x, i=i: x[i], stacked)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, scanned.vocab)
    one = state.apply_fn({"params": state.params}, tokens)
    other = create_state(unrolled, jax.random.key(0)).apply_fn({"params": params}, tokens)
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_logits_do_not_look_ahead():
    config = CONFIGS["llama3-tiny"]
    state = create_state(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, config.vocab)
    changed = tokens.at[:, 9:].set(0)
    a = state.apply_fn({"params": state.params}, tokens)
    b = state.apply_fn({"params": state.params}, changed)
    np.testing.assert_array_equal(a[:, :9], b[:, :9])
    assert np.abs(np.asarray(a[:, 9:] - b[:, 9:])).max() > 0


def test_rope_depends_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    far = jnp.zeros((1, 32, 1, 16))
    scores = jnp.einsum("bqhd,bkhd->qk", rope(far + q, 1e4), rope(far + k, 1e4))
    for offset in (0, 3, 7):
        along = jnp.diagonal(scores, offset)
        np.testing.assert_allclose(along, jnp.full_like(along, along[0]), atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("seq", [8, 12, 16, 13])
def test_blockwise_attention_computes_the_same(seq):
    """Forward and gradient, with grouped queries; 13 does not divide into blocks of 4."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, mix = (jax.random.normal(k, (2, seq, 4, 8)) for k in keys[:2])
    k, v = (jax.random.normal(k, (2, seq, 2, 8)) for k in keys[2:])

    def loss(attend):
        return jax.value_and_grad(lambda *a: (attend(*a) * mix).sum(), argnums=(0, 1, 2))(q, k, v)

    whole = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    expected, got = loss(whole), loss(lambda q, k, v: blockwise(q, k, v, block=4))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got)):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_long_sequences_are_planned_without_the_scores_of_all_pairs():
    cluster = Cluster.parse("dgx-h100:1")

    def peak(seq, **changes):
        step, state, batch = target("llama3-tiny", 8, seq, **changes)
        program = analyze(step, (state, batch))
        return price(program, preset("dp", program, 8), cluster).predicted.peak_bytes

    scores = 8 * 16_384**2 * 4  # bytes of a layer on each device: one sequence, eight heads, float32
    assert peak(16_384) < 0.5 * scores < peak(16_384, attention="xla")


def test_unknown_names_and_fields_say_what_exists():
    with pytest.raises(UsageError, match="llama3-8b"):
        target("llama4", 8, 128)
    with pytest.raises(UsageError, match="kv_heads"):
        target("llama3-8b", 8, 128, depth=3)
    with pytest.raises(UsageError, match="2048 positions"):
        target("gpt3-175b", 8, 4096)
    with pytest.raises(UsageError, match="at least 1"):
        target("llama3-8b", 0, 128)
