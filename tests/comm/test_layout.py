"""Names, buckets, policies and the choice of a codec: pure functions."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

from lensjax import CodecError, comm
from lensjax.comm.gate import choose, link_seconds
from lensjax.comm.policy import Policy

codecs = st.one_of(
    st.sampled_from([comm.Exact(), comm.BFloat16()]),
    st.builds(comm.Int8, st.integers(1, 200).map(lambda n: 2 * n), st.sampled_from([0.0, 0.25, 1.0])),
    st.builds(
        comm.Int4, st.sampled_from([2, 32, 512]), st.floats(0, 1), st.booleans(), st.sampled_from(["int4", "int8"])
    ),
    st.builds(comm.Float8, st.sampled_from(["e4m3", "e5m2"]), st.just(64)),
    st.builds(comm.PowerSGD, st.integers(1, 99), st.booleans(), st.integers(0, 2), st.floats(1, 8)),
)  # fmt: skip


@settings(deadline=None)
@given(codecs)
def test_a_codec_s_name_reads_back(made):
    assert comm.parse_codec(str(made)) == made


def test_names():
    assert comm.parse_codec("int8") == comm.Int8(block=128)
    assert comm.parse_codec("int8:256") == comm.Int8(256)
    assert comm.parse_codec("int4:32:hadamard:back=int8") == comm.Int4(32, hadamard=True, back="int8")
    assert comm.parse_codec("powersgd:8:feedback=off") == comm.PowerSGD(8, feedback=False)
    assert str(comm.Int8()) == "int8" and str(comm.Exact()) == "exact"


@pytest.mark.parametrize(
    "name, says",
    [
        ("int2", "no codec 'int2'"), ("int8:x", "block is 'x'"), ("int8:7", "block of 7"), ("bf16:3", "no parameters"),
        ("int4:24:hadamard", "power of two"), ("int4:feedback=2", "between 0"), ("int4:back=fp8", "back is int4"),
        ("fp8:e3m4", "no format 'e3m4'"), ("powersgd:0", "rank is at least 1"), ("int8:128:0:1", "int8 takes block"),
        ("int8:128:block=2", "no parameter"),
    ],
)  # fmt: skip
def test_what_a_wrong_name_says(name, says):
    with pytest.raises(CodecError, match=says):
        comm.parse_codec(name)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), max_size=40),
    st.integers(1, 150),
)
def test_buckets_hold_every_leaf_once_in_backward_order(leaves, limit):
    keys, sizes = [k for k, _ in leaves], [s for _, s in leaves]
    made = comm.buckets(keys, sizes, limit)
    assert sorted(i for b in made for i in b) == list(range(len(leaves)))
    assert [b[0] for b in made] == sorted((b[0] for b in made), reverse=True)
    for b in made:
        assert list(b) == sorted(b, reverse=True) and len({keys[i] for i in b}) == 1
        assert len(b) == 1 or sum(sizes[i] for i in b) <= limit


@pytest.mark.parametrize(
    "path, shape, wanted",
    [
        ("layers/0/mlp/up/kernel", (512, 2048), "int4"),
        ("layers/0/mlp/gate/kernel", (512, 2048), "int4"),
        ("layers/0/moe/gate/kernel", (4096, 8), "bf16"),
        ("layers/moe/router/kernel", (4096, 512), "bf16"),
        ("LayerNorm_0/scale", (70000,), "bf16"),
        ("layers/input_layernorm/weight", (64, 4096), "bf16"),
        ("attention/query/bias", (64, 4096), "bf16"),
        ("small/kernel", (16, 16), "bf16"),
        ("embed/embedding", (32000, 512), "int8"),
        ("lm_head/kernel", (512, 32000), "int8"),
    ],
)
def test_what_stays_out_of_a_coarse_codec(path, shape, wanted):
    assert Policy("int4")(path, jax.ShapeDtypeStruct(shape, jnp.float32)) == comm.parse_codec(wanted)


def test_pins_come_first_and_float64_is_kept():
    policy = Policy("int8", pins={"*/router/*": "exact", "layers/*": "int4:32"})
    leaf = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    assert policy("a/router/kernel", leaf) == comm.Exact()
    assert policy("layers/3/norm", jax.ShapeDtypeStruct((4,), jnp.float32)) == comm.Int4(32)
    assert policy("other", leaf) == comm.Int8()
    assert policy("other", jax.ShapeDtypeStruct((512, 512), jnp.float64)) == comm.Exact()
    assert Policy("exact")("layers/norm", leaf) == comm.Exact()
    with pytest.raises(CodecError, match="no codec 'int9'"):
        Policy("int8", pins={"a": "int9"})


def test_a_pin_that_matches_nothing_is_an_error():
    mesh = jax.make_mesh((2,), ("node",), devices=jax.devices()[:2])
    tree = {"a": {"kernel": jax.ShapeDtypeStruct((512, 512), jnp.float32)}}
    with pytest.raises(CodecError, match=r"no leaf matches the pattern 'b/\*'"):
        comm.reduction(tree, mesh=mesh, spec=jax.P(), axes="node", codec=Policy("int8", pins={"b/*": "exact"}))


def test_powersgd_takes_only_what_becomes_smaller():
    made = comm.PowerSGD(4)
    assert made.matrix((3, 3, 64, 128)) == (1, 576, 128)
    assert dataclasses.replace(made, stacked=1).matrix((12, 64, 128)) == (12, 64, 128)
    assert made.takes((64, 128)) and not made.takes((8, 128)) and not made.takes((1000,)) and not made.takes(())


def test_compression_is_chosen_only_where_it_pays():
    """A 7B model, 8 GPUs a node, 16 nodes, 8192 tokens a GPU at 400 TFLOP/s: 0.57 s of backward to hide behind."""
    how = dict(values=7_000_000_000 // 8, members=16, backward_s=0.57, step_s=0.86, memory_bandwidth=3.35e12)
    fast, slow = choose(bandwidth=400e9 / 8, **how), choose(bandwidth=25e9 / 8, **how)
    assert fast.codec == "off" and "nothing to gain" in fast.reason
    assert (
        slow.codec == "int8" and slow.exposed_s["bf16"] == pytest.approx(0.48, abs=0.01) and not slow.exposed_s["int8"]
    )
    assert choose(bandwidth=5e9 / 8, **how).codec == "int4"
    assert choose(**{**how, "members": 1}, bandwidth=1e6).codec == "off"
    assert link_seconds("bf16", 2_000_000, 2, 12.5e6) == pytest.approx(0.32)
    assert link_seconds("bf16", 0, 3, 1.0, latency=0.5) == 2.0
