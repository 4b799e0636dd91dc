"""Where weights and the sequence claim one mesh axis: what matmuls and lookups do about it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lensjax.models.targets import target
from lensjax.partition import partition
from lensjax.passes.claims import claimed
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from lensjax.verify.proof import ring_bytes

FREE = P.UNCONSTRAINED
DATA, MODEL = ("data",), ("model",)


def only(function, *shapes):
    (eqn,) = jax.make_jaxpr(function)(*(jnp.zeros(s, jnp.float32) for s in shapes)).eqns
    return eqn


def asked(eqn, *specs):
    wanted = dict(zip((*eqn.invars, *eqn.outvars), specs))
    return claimed(eqn, wanted.get, DATA)


def test_a_matmul_into_a_split_axis_gathers_the_sequence():
    eqn = only(lambda x, w: jnp.einsum("bsd,dhe->bshe", x, w), (4, 8, 16), (16, 4, 4))
    (x, w), result = asked(eqn, [DATA, MODEL, None], [None, MODEL, None], [DATA, None, MODEL, None])
    assert x == P(FREE, None, FREE) and w == P(FREE, MODEL, FREE) and result == P(FREE, FREE, MODEL, FREE)


def test_a_matmul_out_of_a_split_axis_sums_parts():
    eqn = only(lambda x, w: jax.lax.dot_general(x, w, (((2, 3), (0, 1)), ((), ()))), (4, 8, 4, 4), (4, 4, 16))
    (x, w), result = asked(eqn, [DATA, None, MODEL, None], [MODEL, None, None], [DATA, MODEL, None])
    assert x == P(FREE, FREE, MODEL, FREE) and w == P(MODEL, FREE, FREE) and result == P(FREE, None, FREE)


def test_a_weights_gradient_gathers_the_operand_that_has_the_sequence_alone():
    eqn = only(lambda g, x: jax.lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ()))), (4, 8, 64), (4, 8, 16))
    (g, x), result = asked(eqn, [DATA, None, MODEL], [DATA, MODEL, None], [MODEL, None])
    assert g == P(FREE, FREE, MODEL) and x == P(FREE, None, FREE) and result == P(MODEL, FREE)


@pytest.mark.parametrize(
    "specs",
    [
        ([DATA, None, None], [None, MODEL, None], [DATA, None, MODEL, None]),  # tensor parallelism
        ([DATA, MODEL, None], [None, None, None], [DATA, MODEL, None, None]),  # the sequence has an axis of its own
        ([DATA, None, None], [None, DATA, None], [None, None, DATA, None]),  # experts and batch exchange
    ],
)
def test_without_a_clash_nothing_is_pinned(specs):
    eqn = only(lambda x, w: jnp.einsum("bsd,dhe->bshe", x, w), (4, 8, 16), (16, 4, 4))
    assert asked(eqn, *specs) is None


def test_what_is_looked_up_in_split_rows_is_whole_along_the_sequence_first():
    numbers = jax.lax.GatherDimensionNumbers((2,), (0,), (0,))
    look = lambda table, i: jax.lax.gather(table, i, numbers, (1, 16))
    eqn = jax.make_jaxpr(look)(np.zeros((64, 16)), np.zeros((4, 8, 1), np.int32)).eqns[-1]
    (table, rows), result = asked(eqn, [MODEL, None], [DATA, MODEL, None], [DATA, MODEL, None])
    assert table == P(MODEL, None) and rows == result == P(DATA, None, None)
    assert asked(eqn, [None, MODEL], [DATA, None, None], [DATA, None, MODEL]) is None


def test_what_a_vocabulary_parallel_decoder_sends_along_its_axis():
    """Korthikanti et al. 2022, section 4.2.2, and Megatron-LM's vocabulary-parallel loss: in each layer six gathers
    along the sequence (two of them for the weights' gradients) and four scatters; the head's input and the lookup's
    gradient gathered, the head's gradient scattered, the lookup summed. No logits and no vocabulary weights."""
    layers, width, vocab = 2, 128, 4096
    step, state, batch = target(
        "llama3-tiny", 16, 64, remat="none", dtype=jnp.float32, width=width, mlp=512, vocab=vocab, layers=layers
    )
    program = analyze(step, (state, batch))
    plan = preset("fsdp=2,tp_sp=4", program, 8)
    found = collections.Counter()
    for c in partition(lower(emit(program, plan, abstract_mesh(plan)), "cuda")).collectives:
        if any(a.startswith("tp") for a in c.axes):
            found[c.op] += c.trips * ring_bytes(c)
    activation = 3 / 4 * (16 / 2 * 64 * width * 4)
    assert found["all_gather"] == pytest.approx((6 * layers + 2) * activation, rel=0.02)
    assert found["reduce_scatter"] == pytest.approx((4 * layers + 1) * activation, rel=0.02)
    assert found["all_reduce"] == pytest.approx(2 * activation, rel=0.05)
    assert not found["all_to_all"] and not found["collective_permute"]
