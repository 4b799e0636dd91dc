"""Logical axes found from Shardy's rules: what people declare by hand as batch, embed, mlp, heads, vocab."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax.partition import dimension_factors
from tests.partition.decoder import WEIGHTS, Config, Rules, abstract_mesh, lowered


def lower(fn, *shapes):
    args = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cpu",))


def test_a_decoder_has_the_axes_that_its_author_would_name():
    low = lowered(Config(), Rules(abstract_mesh(d=1), {}, P()), P())
    found = dimension_factors(low)
    by_name = dict(zip(sorted(WEIGHTS), found.arguments))  # a dict flattens in the order of its keys
    names: dict[str, set] = {}
    for weight, dims in WEIGHTS.items():
        for name, dimension in zip(dims, by_name[weight]):
            names.setdefault(name, set()).add(dimension)
    assert len(names["embed"]) == len(names["mlp"]) == len(names["kv"]) == 1
    (embed,), (mlp,), (kv,) = next(iter(names["embed"])), next(iter(names["mlp"])), next(iter(names["kv"]))
    assert len({embed, mlp, kv}) == 3
    # Query heads are key heads times the group that shares one: two factors, the major one shared with `kv`.
    (heads,) = names["heads"]
    assert heads[0] == kv and len(heads) == 2
    assert found.axes[heads[1]].size == Config().heads // Config().kv
    # Queries and keys are contracted over one head dimension, values and outputs over another.
    assert by_name["wq"][3] == by_name["wk"][3] != by_name["wv"][3] == by_name["wo"][2]
    # The table is looked up, the output is not tied to it: two vocabularies.
    assert by_name["emb"][0] != by_name["out"][1]
    assert found.axes[embed].reductions["dot_general"] > 0
    batch, seq = found.arguments[-1]
    assert found.axes[batch[0]].reductions["scatter"] == 1 and found.axes[batch[0]].twice == 0
    assert found.axes[seq[0]].twice > 0  # attention scores
    assert found.axes[seq[0]].sizes == (32, 33)


def test_moments_follow_their_parameter():
    found = dimension_factors(lowered(Config(), Rules(abstract_mesh(d=1), {}, P()), P()))
    n = len(WEIGHTS)
    assert found.arguments[:n] == found.arguments[n + 1 : 2 * n + 1] == found.arguments[2 * n + 1 : 3 * n + 1]


def test_merged_batch_and_sequence_are_two_factors():
    found = dimension_factors(lower(lambda x, w: x.reshape(-1, 16) @ w, ((8, 32, 16), "f4"), ((16, 4), "f4")))
    (batch, seq, embed), (contracted, out) = found.arguments
    assert found.results[0] == (batch + seq, out)
    assert embed == contracted


def test_marks_inside_a_loop_body_are_found():
    mesh = abstract_mesh(d=1)

    def step(ws, x):
        def layer(x, w):
            with jax.named_scope("lensjax.mark.4"):
                y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(*[P.UNCONSTRAINED] * 2)))
            return jnp.tanh(y), None

        return jax.lax.scan(layer, x, ws)[0]

    found = dimension_factors(lower(step, ((3, 16, 16), "f4"), ((8, 16), "f4")))
    assert found.marks[4] == found.arguments[1] == found.results[0]


def test_data_flows_through_branches_barriers_and_loops():
    def step(x, y, p):
        x = jax.lax.cond(p, lambda a: a + 1, lambda a: a * 2, x)
        x = jax.lax.optimization_barrier(x)
        return jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x) + y

    found = dimension_factors(lower(step, ((8, 4), "f4"), ((8, 4), "f4"), ((), "bool")))
    assert found.arguments[0] == found.arguments[1] == found.results[0]
    assert not found.without_rule


def test_sorted_dimension_needs_replication_and_top_k_keeps_the_others():
    found = dimension_factors(lower(lambda x: (jnp.sort(x, 1), jax.lax.top_k(x, 3)[0]), ((8, 16), "f4")))
    rows, columns = found.arguments[0]
    assert found.axes[columns[0]].replications["sort"] == 1
    assert found.results[1][0] == rows
    assert found.results[1][1] != columns


def test_constants_relate_nothing():
    found = dimension_factors(lower(lambda x, y: (x + jnp.zeros((8, 8)), y + jnp.zeros((8, 8))), *[((8, 8), "f4")] * 2))
    assert not {d for dims in found.arguments[0] for d in dims} & {d for dims in found.arguments[1] for d in dims}
