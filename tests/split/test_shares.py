"""A step in shares computes what the step computes: micro-batches, nodes, both; every loss that is accepted."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax._errors import PlanError
from lensjax.passes import shares as shares_module
from lensjax.passes.draw import Draw
from lensjax.passes.share_layout import own
from tests.split.harness import apart, micro, nodes, plain, program, run
from tests.split.losses import LOSSES, MICRO, NODE, arguments, step_of

EXACT = 1e-9


@functools.cache
def whole(name: str):
    """(program, flat results of the plain step) in float64."""
    with jax.enable_x64(True):
        step, args = step_of(LOSSES[name]), arguments()
        return program(step, args), plain(step, *args)


def check(name: str, *plans) -> None:
    p, expected = whole(name)
    for plan in plans:
        with jax.enable_x64(True):
            found = apart(run(p, plan), expected)
        assert found <= EXACT, f"{name} under {plan.mesh.shape}, {plan.micro}: {found:.1e}"


# One of each kind; the rest is slow.
FAST = {
    "dropout": (micro(3), nodes(2, 2)),
    "model_denominator": (micro(4, 2),),
    "batch_norm": (nodes(4),),
    "batch_norm_in_a_scan": (nodes(2),),
    "own_accumulation": (micro(2, 2),),
    "carry_of_partial_sums": (nodes(2),),
}


@pytest.mark.parametrize("name", FAST)
def test_shares_are_exact(name):
    check(name, *FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NODE))
def test_every_accepted_loss_is_exact(name):
    plans = [nodes(2), nodes(4, 2)] if "own" not in name else [nodes(2), nodes(2, 2)]
    if name in MICRO:
        plans += [micro(8), micro(3), micro(2, 2), nodes(2, 2, 2)] if "own" not in name else [micro(4), micro(2, 2)]
    check(name, *plans)


def test_what_is_refused_says_so_and_falls_back():
    p, _ = whole("contrastive")
    with pytest.raises(PlanError, match="every example with every example") as e:
        run(p, micro(2))
    assert e.value.code == "split" and "losses.py" in e.value.message

    from lensjax.passes.emit import abstract_mesh, emit

    emitted = emit(p, nodes(2), abstract_mesh(nodes(2)))
    assert len(emitted.notes) == 1 and "left to the compiler, exact and uncompressed" in emitted.notes[0]


def test_counts_that_do_not_come_out_are_refused():
    p, _ = whole("mean")
    for plan, word in (
        (micro(7), "micro.count 4"),
        (micro(1, 2, share=3), "a multiple of 2"),
        (micro(5, 2), "up to 4"),
        (micro(3, 2, share=4), "makes 2 shares of 4"),
        (micro(1, 1, share=1024), "at most"),
    ):
        with pytest.raises(PlanError, match=word):
            run(p, plan)


def test_a_missing_cut_shows_in_the_gradient(monkeypatch):
    """The measure sees what it is for: one total left partial makes the gradient wrong."""
    p, expected = whole("dropout")
    biggest = max((c for c in p.split.cuts), key=lambda c: c.bytes)
    real = shares_module.Shares.reduced

    def reduced(self, one, sums, state):
        totals, state = real(self, one, sums, state)
        left = {c.var: x[0].astype(c.var.aval.dtype) for c, x in zip(one.wanted, sums) if c.var is biggest.var}
        return {**totals, **left}, state

    monkeypatch.setattr(shares_module.Shares, "reduced", reduced)
    with jax.enable_x64(True):
        assert apart(run(p, nodes(2)), expected) > 1e-2


def test_per_example_results_sums_and_states_come_back():
    """Results of every kind, with an uneven last share: concatenated, added up, kept."""

    def step(state, b):
        w, seen = state
        h = jnp.tanh(b["x"] @ w)
        g = jax.grad(lambda w: jnp.tanh(b["x"] @ w).mean())(w)
        out = {
            "logits": h, "flat": h.reshape(-1), "turned": h.T, "most": h.max(0), "any": (h > 0.9).any(),
            "right": (h.argmax(-1) == b["y"]).sum(), "count": seen, "norm": jnp.linalg.norm(g),
        }  # fmt: skip
        return (w - g, seen + b["x"].shape[0]), out

    w, b = arguments()
    args = ((w, jnp.int32(3)), b)
    p, expected = program(step, args), plain(step, *args)
    assert apart(run(p, micro(3)), expected) <= 1e-6
    assert apart(run(p, nodes(2, 2)), expected) <= 1e-6


def test_bfloat16_gradients_are_added_up_in_float32():
    """256 equal parts of 1 + 2**-8: in bfloat16 the sum would stop growing."""

    def step(p, b):
        return p, {"grad": (b["x"].astype(jnp.bfloat16).sum(0) * jnp.bfloat16(1.0))}

    x = np.full((256, 2), 1 + 2**-7, np.float32)
    p = program(step, (jnp.zeros((2,)), {"x": jnp.asarray(x)}))
    assert p.split.micro
    (_, grad) = run(p, micro(256))
    np.testing.assert_allclose(grad, 256 * (1 + 2**-7), rtol=2**-8)


@pytest.mark.parametrize(("width", "dim"), [(32, 0), (64, 1), (8, 2)])
def test_a_share_draws_its_part_of_the_full_draw(width, dim):
    with jax.enable_x64(True):
        full, key = (12, 6, 3), jax.random.key(5)
        dtype = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[width]
        bits = np.asarray(jax.random.bits(key, full, dtype))
        mine = jax.jit(Draw(full, dim, 1, 2, width))
        for offset in (0, 1):
            np.testing.assert_array_equal(mine(key, jnp.int32(offset)), np.take(bits, range(offset, offset + 2), dim))


def test_counters_beyond_32_bits():
    """A draw of more than 2**32 elements: a share far behind counts in two words."""
    from lensjax.passes.draw import _times

    for x, factor in ((3_000_000_000, 5_000_000_000), (7, 2**33 + 5), (2**31, 2), (12345, 1)):
        high, low = _times(jnp.uint32(x), factor)
        assert (int(high) << 32 | int(low)) == x * factor % 2**64


def test_what_every_group_has_is_not_sent():
    """Each device takes the row of its own group: no collective."""
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = jax.device_put(jnp.broadcast_to(jnp.arange(8.0), (2, 8)), NamedSharding(mesh, P("dp", "fsdp")))
    kept = NamedSharding(mesh, P("fsdp"))
    made = jax.jit(lambda x: jax.lax.with_sharding_constraint(own(x, mesh, ("dp",)), kept)).lower(rows).compile()
    assert not re.search("all-reduce|all-gather|collective-permute|all-to-all", made.as_text())
    assert made(rows).sharding.is_equivalent_to(kept, 1) and (made(rows) == jnp.arange(8.0)).all()
