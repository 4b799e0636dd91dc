"""What holds memory over a step: it adds up to the priced peak, and each class is where it must be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lensjax.cost.composition import composition, composition_of
from lensjax.cost.heap import live
from lensjax.cost.memory import heap_of
from lensjax.cost.price import price
from lensjax.models.targets import target
from lensjax.partition import partition
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster

MATRIX = 64 * 64 * 4


def split(fn, *shapes, **kwargs):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return partition(jax.jit(fn, **kwargs).trace(*arguments).lower(lowering_platforms=("cpu",)))


def program(**changes):
    step, *arguments = target("llama3-tiny", 16, 64, **changes)
    return analyze(step, tuple(arguments))


@pytest.mark.parametrize("name, changes", [("dp", {"remat": "none"}), ("fsdp", {}), ("tp", {"scan": False})])
def test_the_classes_at_the_peak_add_up_to_the_priced_peak(name, changes):
    p, cluster = program(**changes), Cluster.parse("dgx-h100:1")
    made = price(p, preset(name, p, 4 if name == "tp" else 8), cluster)
    assert made.predicted is not None
    found = composition_of(p, made, cluster)
    assert found.peak == pytest.approx(made.predicted.peak_bytes, rel=1e-12)
    assert found.peak_by == pytest.approx(dict(made.predicted.memory))
    total = sum(found.classes.values())
    assert total.argmax() == found.at and total.max() + found.fragments == pytest.approx(found.peak)
    assert all((v >= 0).all() for v in found.classes.values())


def test_a_plan_that_offloads_holds_on_the_device_what_its_price_says():
    p, cluster = program(remat="none"), Cluster.parse("dgx-h100:1")
    made = price(p, preset("dp", p, 8).replace(layers={"*": "offload"}), cluster)
    assert made.predicted is not None and made.predicted.memory["host"] > 0
    assert composition_of(p, made, cluster).peak == pytest.approx(made.predicted.peak_bytes, rel=1e-12)


def test_activations_pile_up_before_the_backward_and_gradients_after_it():
    def step(w, x):
        def loss(w):
            return (jax.lax.scan(lambda c, m: (jnp.sin(c @ m), None), x, w)[0] ** 2).sum()

        return w - 0.1 * jax.grad(loss)(w)

    found = composition(split(step, (10, 64, 64), (64, 64), donate_argnums=0), roles=["parameter", "batch"])
    activations, gradients = found.classes["activations"], found.classes["gradients"]
    assert 20 * MATRIX <= activations.max() <= 21 * MATRIX  # each layer's input, and its cosine
    assert gradients.max() >= 10 * MATRIX
    assert activations.argmax() < gradients.argmax() and gradients[activations.argmax()] == 0
    assert activations[-1] == 0


def test_what_is_made_anew_for_the_backward_is_no_activation():
    def step(w, x):
        def loss(w):
            return (jax.lax.scan(jax.checkpoint(lambda c, m: (jnp.sin(c @ m), None)), x, w)[0] ** 2).sum()

        return w - 0.1 * jax.grad(loss)(w)

    found = composition(split(step, (10, 64, 64), (64, 64), donate_argnums=0), roles=["parameter", "batch"])
    assert 10 * MATRIX <= found.classes["activations"].max() <= 12 * MATRIX


def test_copies_of_parameters_are_neither_gradients_nor_activations():
    def step(w, x):
        def loss(w):
            low = w.astype(jnp.bfloat16)
            return (jnp.tanh(x.astype(jnp.bfloat16) @ low) @ low).astype(jnp.float32).sum()

        return w - 0.1 * jax.grad(loss)(w)

    found = composition(split(step, (512, 512), (8, 512), donate_argnums=0), roles=["parameter", "batch"])
    assert found.classes["activations"].max() < 8 * 512 * 4 * 3
    assert found.classes["temporaries"].max() >= 512 * 512 * 2


def test_pieces_are_the_buffers_at_every_moment():
    p = split(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w) @ w, (64, 64), (64, 64))
    heap = heap_of(p)
    end = max(b.end for b in heap.buffers) + 1

    def alive(found):
        return np.array([sum(b.size for b in found if b.start <= t <= b.end) for t in range(end)])

    assert (alive(heap.buffers) == alive(heap.pieces)).all() and live(heap.pieces)[0] == live(heap.buffers)[0]


def test_the_partial_sums_of_a_gradient_are_gradients():
    p, cluster = program(remat="none"), Cluster.parse("dgx-h100:1")
    found = composition_of(p, preset("zero1", p, 8), cluster)
    parameters = sum(a.nbytes for a in p.arguments if a.role == "parameter")
    assert found.classes["gradients"].max() >= 0.5 * parameters  # whole on every device, before they are summed up
