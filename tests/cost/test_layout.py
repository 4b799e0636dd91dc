"""What XLA copies since gathers want their dimension first, and what it makes only after a loop: in planned memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax.cost.memory import PLAIN, Habits, habits_of, memory
from lensjax.partition import partition
from lensjax.topology.cluster import Cluster

MESH = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))


def on(*spec):
    return NamedSharding(MESH, P(*spec))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(step, shapes, shardings, habits=PLAIN, **options):
    lowered = jax.jit(step, in_shardings=shardings, **options).trace(*shapes).lower(lowering_platforms=("cuda",))
    return memory(partition(lowered), habits)


@pytest.mark.parametrize("leaves", [1, 3])
def test_new_parameters_gathered_along_an_inner_dimension_wait_beside_the_old_ones(leaves):
    """Computed in parts, gathered for the result, as a sharded optimizer does: all in flight at the end of the step."""

    def temporaries(*spec):
        def step(ws):
            return [jax.lax.with_sharding_constraint(jnp.tanh(w), on(*spec)) for w in ws]

        ws = [f32(64, 64)] * leaves
        out = [on()] * leaves
        return planned(step, (ws,), (out,), out_shardings=out, donate_argnums=0).temporaries

    whole = 64 * 64 * 4
    assert temporaries(None, "d") - temporaries("d", None) == pytest.approx(leaves * whole, rel=0.01)


def test_a_stack_that_a_loop_gathers_along_an_inner_dimension_is_transposed_once():
    layers, deep, wide = 5, 32, 64

    def temporaries(*spec):
        def step(x, stack):
            def layer(x, w):
                w = jax.lax.with_sharding_constraint(w, on())
                return jax.lax.with_sharding_constraint(jnp.tanh(x @ w) @ w.T, on("d")), None

            return jax.lax.scan(layer, x, stack)[0]

        return planned(step, (f32(16, deep), f32(layers, deep, wide)), (on("d"), on(None, *spec))).temporaries

    assert temporaries(None, "d") - temporaries("d", None) == pytest.approx(layers * deep * wide * 4 / 4, rel=0.05)


def test_the_gradient_of_an_output_layer_is_made_after_the_loop_over_the_layers():
    """So what it is made from waits through that loop, where most is alive."""
    tokens, width, hidden, layers = 256, 32, 4096, 3

    def temporaries(vocabulary):
        def loss(stack, head, x):
            body = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None))
            x = jax.lax.scan(body, x, stack)[0]
            return (jax.nn.logsumexp(x @ head, axis=-1)).mean()

        shapes = f32(layers, width, hidden), f32(width, vocabulary), f32(tokens, width)
        return planned(jax.grad(loss, (0, 1)), shapes, (on(), on(), on("d"))).temporaries

    logits = 512 * tokens / 4 * 4
    assert temporaries(1024) - temporaries(512) == pytest.approx(logits, rel=0.05)


def test_what_a_convolution_made_is_copied_where_its_channels_are_scattered():
    """Partial sums over split input channels, scattered over the batch or over the output channels (the last)."""
    deep = 16

    def temporaries(*spec):
        def step(x, w):
            y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jax.lax.with_sharding_constraint(y, on(*spec))

        ins = (on(None, None, None, "d"), on(None, None, "d", None))
        return planned(step, (f32(4, 8, 8, deep), f32(3, 3, deep, deep)), ins).temporaries

    copy = 4 * 8 * 8 * deep * 4
    assert temporaries(None, None, None, "d") - temporaries("d", None, None, None) == copy


def test_constants_reach_into_loops():
    """A value read twice in a loop, made with a constant of its size from outside: cheap to make twice."""

    def temporaries(constant):
        def step(x, ws):
            zero = jnp.zeros(x.shape) if constant else x * 3

            def layer(x, w):
                y = jax.lax.optimization_barrier(x @ w).astype(jnp.float32) - zero
                return ((jnp.tanh(y) @ w) + (jnp.sin(y) @ w)).astype(x.dtype), None

            return jax.lax.scan(layer, x, ws)[0]

        return planned(step, (f32(64, 64), f32(3, 64, 64)), (on(), on())).temporaries

    assert temporaries(True) < temporaries(False)


def test_sums_are_not_put_off_past_a_loop():
    """What a sum reads before a loop is given up before it, though only what follows the loop reads the sum."""

    def temporaries(summed):
        def step(x, w):
            large = jnp.tanh(x @ w)
            total = large.sum(axis=0) if summed else x[0] @ w
            x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w.T, None), large @ w.T, None, length=3)
            return x[0] @ w + total

        return planned(step, (f32(256, 64), f32(64, 512)), (on(), on())).temporaries

    assert temporaries(True) == pytest.approx(temporaries(False), rel=0.02)


def head(x, w, table, rows):
    """A loop between an output layer's gradient and the gradient of a table, as training steps have them."""
    logits = jnp.tanh(x @ table.T)
    gradient = logits.T @ x
    x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w.T, None), logits @ table, None, length=3)
    return table - gradient * x[0], jnp.zeros(table.shape).at[rows].add(x)


def test_work_is_put_off_on_hopper_alone():
    """Where it is, logits wait for a loop to end, since the matmul that reads them last comes after it."""
    assert habits_of(Cluster.parse("dgx-h100:1").device) == Habits(2.0**25, prompt=False)
    assert habits_of(Cluster.parse("dgx-h100:1").device, alone=True) == Habits(2.0**25, prompt=True)
    assert habits_of(Cluster.parse("dgx-a100-80:1").device) == Habits(2.0**22, prompt=True)
    assert habits_of(Cluster.parse("gb200-nvl72:1").device) == Habits(2.0**25, prompt=True)
    vocab, rows, wide, hidden = 64, 4096, 32, 1024
    shapes = (f32(rows, wide), f32(wide, hidden), f32(vocab, wide), jax.ShapeDtypeStruct((rows,), jnp.int32))
    late, prompt = (planned(head, shapes, (on(),) * 4, Habits(prompt=p)).temporaries for p in (False, True))
    assert late - prompt == pytest.approx(rows * vocab * 4, rel=0.05)


@pytest.mark.parametrize("prompt", [False, True])
def test_a_weight_gathered_along_an_inner_dimension_is_held_until_its_last_use(prompt):
    """Only what is gathered for the step's result is copied away at once."""

    def step(x, w):
        whole = jax.lax.with_sharding_constraint(w, on())
        y = jnp.tanh(x @ whole)
        for _ in range(3):
            y = jnp.tanh(jnp.sin(y @ jnp.ones((256, 256))) @ jnp.ones((256, 256)))
        return y @ whole.T

    weight = 8 * 256 * 4
    held = planned(step, (f32(512, 8), f32(8, 256)), (on(), on(None, "d")), Habits(prompt=prompt)).held
    assert held["communication"] == weight, held
