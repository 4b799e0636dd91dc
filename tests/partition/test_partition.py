"""What Shardy says about a step, against closed forms."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax._errors import PartitionError
from lensjax.partition import partition, template
from tests.partition.decoder import Config, Rules, abstract_mesh, fsdp, lowered, shapes, tensor

CONFIG = Config()


def wire(p, axes=None):
    """Bytes that a device sends in a step with rings: the convention of `Collective.bytes`."""
    factor = {"all_reduce": 2.0, "collective_permute": 1.0}
    return sum(
        c.trips * c.bytes * factor.get(c.op, 1.0) * ((c.group - 1) / c.group if c.op != "collective_permute" else 1)
        for c in p.collectives
        if axes is None or c.axes == axes
    )


def weight_bytes(c, *names):
    return sum(4 * math.prod(shapes(c)[n].shape) for n in names or shapes(c))


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once_under_remat():
    p = partition(lowered(CONFIG, Rules(abstract_mesh(d=8), fsdp("d"), P("d"), gather=True), P("d")))
    layers = weight_bytes(CONFIG) - weight_bytes(CONFIG, "emb", "out")
    # The table's gradient is not summed: its rows move to the devices that own the columns, with the indices.
    rows, indices = CONFIG.batch * CONFIG.seq * CONFIG.embed * 4 / 8, CONFIG.batch * CONFIG.seq * 4
    table = weight_bytes(CONFIG, "emb") + rows + indices
    expected = 7 / 8 * (3 * layers + 2 * weight_bytes(CONFIG, "out") + table) + 2 * 7 / 8 * 4  # and the loss
    assert wire(p) == pytest.approx(expected)


def test_fsdp_gathers_weights_once_without_remat():
    c = dataclasses.replace(CONFIG, remat=False)
    p = partition(lowered(c, Rules(abstract_mesh(d=8), fsdp("d"), P("d"), gather=True), P("d")))
    gathered = sum(x.trips * x.bytes for x in p.collectives if x.op == "all_gather" and x.dtype == "f32")
    assert gathered == weight_bytes(c)


def test_data_parallel_reduces_every_gradient_once():
    p = partition(lowered(CONFIG, Rules(abstract_mesh(d=8), {}, P("d")), P("d")))
    assert {c.op for c in p.collectives} == {"all_reduce"}
    assert wire(p) == pytest.approx(2 * 7 / 8 * (weight_bytes(CONFIG) + 4))


def test_hsdp_scatters_inside_and_reduces_the_shard_across():
    both = P(("r", "d"))
    p = partition(lowered(CONFIG, Rules(abstract_mesh(r=2, d=4), fsdp("d"), both, gather=True), both))
    layers = weight_bytes(CONFIG) - weight_bytes(CONFIG, "emb")
    assert wire(p, ("r",)) == pytest.approx(2 * 1 / 2 * layers / 4)
    scattered = sum(c.trips * c.bytes for c in p.collectives if c.op == "reduce_scatter")
    assert scattered == layers


def test_tensor_parallel_sums_once_a_block_and_direction():
    p = partition(lowered(CONFIG, Rules(abstract_mesh(t=4), tensor("t")), P()))
    act = CONFIG.batch * CONFIG.seq * CONFIG.embed * 4
    # Forward: attention and MLP; recomputed: attention; backward: one for q, k, v together, and the two of the gated
    # MLP stay apart because the residual is added between them.
    layers = CONFIG.layers * (2 + 1 + 1 + 2) * act
    vocab = 2 * act + 3 * CONFIG.batch * CONFIG.seq * 4  # lookup, logits' input gradient; max, sum, picked logit
    assert wire(p) == pytest.approx(2 * 3 / 4 * (layers + vocab))


def test_matmul_flops_are_exact_and_shared():
    c = dataclasses.replace(CONFIG, remat=False)
    tokens = c.batch * c.seq
    per_layer = sum(math.prod(shapes(c)[n].shape) for n in ("wq", "wk", "wv", "wo", "wg", "wu", "wd"))
    attention = 2 * c.layers * c.batch * c.heads * c.seq**2 * c.head
    forward = 2 * tokens * (per_layer + c.embed * c.vocab) + 2 * attention
    for mesh, rules, batch in (
        (abstract_mesh(d=8), fsdp("d"), P("d")),
        (abstract_mesh(t=4), tensor("t"), P()),
    ):
        p = partition(lowered(c, Rules(mesh, rules, batch, gather="d" in mesh.shape), batch))
        dots = sum(o.flops * o.trips for o in p.operations if o.name == "dot_general")
        assert dots * mesh.size == pytest.approx(3 * forward)


def test_trip_counts_of_loops():
    def step(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, length=7)
        return jax.lax.fori_loop(2, 11, lambda i, c: c @ c, y), jax.lax.while_loop(
            lambda c: (c < 3).all(), lambda c: c @ c, x
        )

    p = partition(jax.jit(step).trace(jax.ShapeDtypeStruct((8, 8), jnp.float32)).lower(lowering_platforms=("cpu",)))
    assert sorted(o.trips for o in p.operations if o.name == "dot_general") == [1, 7, 9]
    assert p.unknown_trips == 1


def marked_step(mesh, spec):
    """A layer whose activation and weight are marked, once with these shardings and once left open."""

    def mark(x, n, s):
        with jax.named_scope(f"lensjax.mark.{n}"):
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s))

    def step(ws, x):
        def layer(x, w):
            return mark(jnp.tanh(x @ mark(w, 2, spec[1])), 1, spec[0]), None

        return jax.lax.scan(layer, x, ws)[0].sum()

    shapes = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    jitted = jax.jit(jax.value_and_grad(step), in_shardings=tuple(NamedSharding(mesh, s) for s in spec[2:]))
    return jitted.trace(*shapes).lower(lowering_platforms=("cpu",))


def test_a_template_scores_what_lowering_anew_would():
    open_ = P(P.UNCONSTRAINED, P.UNCONSTRAINED)
    mesh = abstract_mesh(a=4, b=2)
    source = template(marked_step(abstract_mesh(x=8), (open_, open_, P(), P())))
    assert source.marks == {1: (16, 64), 2: (64, 64)}
    plans = {
        "column": (P("a", "b"), P(None, "b"), P(None, None, "b"), P("a")),
        "fsdp": (P("a", None), P(), P(None, "a"), P("a")),
    }
    for act, weight, stack, x in plans.values():
        anew = partition(marked_step(mesh, (act, weight, stack, x)))
        again = partition(
            source,
            mesh={"a": 4, "b": 2},
            arguments={0: spec(stack, 3), 1: spec(x, 2)},
            marks={1: spec(act, 2), 2: spec(weight, 2)},
        )
        assert facts(again) == facts(anew)
        assert anew.collectives


def spec(p, rank):
    entries = [*p, *[None] * (rank - len(p))]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def facts(p):
    return [(c.op, c.axes, c.bytes, c.trips) for c in p.collectives], [v.local for v in p.arguments]


def test_a_lowered_step_is_left_as_it_was():
    low = lowered(CONFIG, Rules(abstract_mesh(d=8), fsdp("d"), P("d")), P("d"))
    before = low.as_text()
    partition(low)
    assert low.as_text() == before


def test_donated_arguments_are_known():
    p = partition(lowered(CONFIG, Rules(abstract_mesh(d=8), fsdp("d"), P("d")), P("d")))
    assert len(p.donated) == len(p.arguments) - 1
    assert all(p.arguments[a].local == p.results[r].local for a, r in p.donated.items())


def test_lines_of_collectives():
    jax.clear_caches()  # the slices of a scan come from functions that JAX traces once, with their first caller's line
    p = partition(lowered(CONFIG, Rules(abstract_mesh(d=8), fsdp("d"), P("d"), gather=True), P("d")))
    known = [c for c in p.collectives if "decoder.py:" in c.source]
    assert len(known) >= 0.95 * len(p.collectives)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"marks": {9: ((), ())}}, "no marks"),
        ({"arguments": {0: (("z",), (), ())}}, "names"),
        ({"arguments": {0: ((), ())}}, "2 entries"),
        ({"arguments": {7: ()}}, "does not exist"),
    ],
)
def test_slots_that_do_not_fit_are_errors(kwargs, words):
    open_ = P(P.UNCONSTRAINED, P.UNCONSTRAINED)
    source = template(marked_step(abstract_mesh(x=8), (open_, open_, P(), P())))
    with pytest.raises(PartitionError, match=words):
        partition(source, **kwargs)
