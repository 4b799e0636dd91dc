"""What XLA copies since gathers want their dimension first, and what it makes only after a loop: in planned memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax.cost.memory import memory
from lensjax.partition import partition

MESH = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))


def on(*spec):
    return NamedSharding(MESH, P(*spec))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(step, shapes, shardings, **options):
    return memory(partition(jax.jit(step, in_shardings=shardings, **options).trace(*shapes).lower(
        lowering_platforms=("cuda",)
    )))  # fmt: skip


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
