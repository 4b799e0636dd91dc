"""The batch-status analysis: what splits, what does not and why, and that it sees every total that is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.split.harness import program
from tests.split.losses import LOSSES, MICRO, NODE, arguments, step_of

# Traced in each run; the others with the slow tests.
FAST = [
    *sorted(LOSSES)[::3],
    "class_token",
    "pattern_for_each_example",
    "pattern_over_pairs",
    "contrastive",
    "batch_norm",
    "prints",
    "other_generator",
    "index_behind_the_end",
]


def check(name):
    split = program(step_of(LOSSES[name]), arguments()).split
    assert bool(split.node) == (name in NODE), f"{name}: {split.node}"
    assert bool(split.micro) == (name in MICRO), f"{name}: {split.micro}"
    if not split.node:
        assert split.node.reason and not split.cuts
    return split


@pytest.mark.parametrize("name", sorted(set(FAST)))
def test_what_splits_and_what_does_not(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(LOSSES) - set(FAST)))
def test_the_rest_of_what_splits_and_what_does_not(name):
    check(name)


@pytest.mark.parametrize("name", ["contrastive", "prints", "first_example", "one_example_after_the_other"])
def test_a_refusal_names_the_users_line(name):
    split = program(step_of(LOSSES[name]), arguments()).split
    source, _, line = split.node.line.rpartition(":")
    assert source.endswith("losses.py") and int(line) > 0


def test_status_of_each_kind():
    """One value of each status, by what the rules say of it."""

    def step(p, b):
        h = b["x"] @ p
        g = jax.grad(lambda p: (b["x"] @ p).mean())(p)
        return p - g, {"each": h.sum(1), "most": h.max(), "loss": h.mean()}

    p = program(step, arguments())
    split = p.split
    by_path = dict(zip(p.result_paths, split.results))
    assert by_path["1/each"].kind == "B" and by_path["1/each"].dim == 0
    assert by_path["0"].kind == "R" and by_path["1/loss"].kind in "RP"
    assert {c.op for c in split.cuts} == {"sum", "max"}
    assert not any(c.early or c.inside for c in split.cuts) and split.passes == 1


def test_totals_needed_before_are_early_and_counted():
    split = program(step_of(LOSSES["covariance"]), arguments()).split
    early = [c for c in split.cuts if c.early]
    assert len(early) == 1 and early[0].op == "sum" and early[0].var.aval.shape == (6, 6)
    assert split.passes == 2 and 0 < split.repeated <= 0.5


def test_a_denominator_from_data_needs_no_pass_of_its_own():
    split = program(step_of(LOSSES["data_denominator"]), arguments()).split
    assert split.passes == 1 and split.left_out, "the scalar is left out and multiplied in afterwards"


def test_cuts_are_hoisted_to_the_smallest_value():
    """A gradient that is broadcast before it is used is reduced before it is broadcast."""

    def step(p, b):
        s = (b["x"] @ p).sum()  # a scalar
        return p + jnp.broadcast_to(s, p.shape) ** 2, {"loss": s}

    split = program(step, arguments()).split
    assert [c.var.aval.shape for c in split.cuts] == [()]


def test_a_sum_is_reduced_before_it_is_rounded_and_after_it_is_widened():
    def step(p, b):
        g = (b["x"].astype(jnp.bfloat16).T @ b["x"].astype(jnp.bfloat16)).astype(jnp.float32)
        return p - g, {"loss": g.sum().astype(jnp.bfloat16)}

    split = program(step, arguments()).split
    assert {c.var.aval.dtype for c in split.cuts} == {jnp.dtype("float32")}


def test_statuses_of_the_last_trip_only_are_kept():
    """A loop's body is read until its carry settles; what the first readings noted (the carry is zero there) goes."""

    def step(p, b):
        def trip(c, _):
            h = jnp.tanh(b["x"] @ (p + c))
            return c + h.T @ b["x"], None

        c, _ = jax.lax.scan(trip, jnp.zeros_like(p), None, length=3)
        return p - c, {"loss": c.sum()}

    split = program(step, arguments()).split
    assert split.node and not split.micro, "in the second trip the carry's total is needed"
    assert [c.inside for c in split.cuts if c.early] == [True]


def test_without_a_second_trace_nothing_is_split_and_the_reason_is_told():
    split = program(step_of(LOSSES["branch_in_python"]), arguments()).split
    assert not split.node and "second batch size" in split.node.reason


def test_an_unknown_primitive_is_refused_by_name():
    call = lambda x: jax.ffi.ffi_call("somebody_elses", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def step(p, b):
        return p + call(b["x"]).sum(), {"loss": (b["x"] @ p).mean()}

    split = program(step, arguments()).split
    assert not split.node and "ffi_call" in split.node.reason


def test_callbacks_and_regions_are_refused():
    def calls(p, b):
        h = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(b["x"].shape, b["x"].dtype), b["x"])
        return p, {"loss": (h @ p).mean()}

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    P = jax.sharding.PartitionSpec
    region = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    def maps(p, b):
        return p - jax.grad(lambda p: (region(b["x"]) @ p).mean())(p), {"loss": (b["x"] @ p).mean()}

    for step, word in ((calls, "pure_callback"), (maps, "shard_map")):
        split = program(step, arguments()).split
        assert not split.node and word in split.node.reason


def test_a_refusal_names_the_line_that_called_a_function_of_jax():
    """JAX traces its own functions (`jnp.sort`) apart: their equations have no line of the user."""

    def step(w, x):
        grads = jax.grad(lambda w: jnp.sort(((x @ w) ** 2).mean(-1))[-4:].mean())(w)
        return w - grads

    on = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    verdict = program(step, (on(16, 4), on(32, 16))).split.micro
    assert "a sort over the batch" in str(verdict) and "test_status.py:" in str(verdict)
