"""The laws of a codec: bounds that hold for every input, shapes, sizes, determinism, non-finite values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensjax.comm import Int4, Int8, parse_codec
from lensjax.comm.integers import hadamard_matrix
from lensjax.comm.low_rank import orthonormal
from lensjax.comm.scales import bf16_bits, from_bf16_bits
from tests.comm.arrays import SIZE, VECTORS, finite, round_trip


@pytest.mark.few(6)
@pytest.mark.parametrize("name", VECTORS)
@settings(max_examples=40, deadline=None)
@given(x=finite)
def test_the_error_bound_holds_for_every_finite_vector(name, x):
    decoded, bound, _ = (np.asarray(a, np.float64) for a in round_trip(name)(x))
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - x.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "bf16"])
def test_the_bound_is_tight_enough_to_mean_something(name):
    x = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    decoded, bound, _ = (np.asarray(a, np.float64) for a in round_trip(name)(x))
    assert bound.max() < 3 * np.abs(decoded - x).max()


@pytest.mark.parametrize("name", VECTORS)
def test_shape_type_and_size_of_what_is_sent(name):
    made = parse_codec(name)
    for rows, n in (((), 256), ((3,), 512), ((2, 2), 256)):
        x = jnp.ones((*rows, n), jnp.float32)
        message = jax.eval_shape(made.encode, x)
        assert jnp.issubdtype(message.dtype, jnp.unsignedinteger)
        assert message.shape[:-1] == rows
        assert message.shape[-1] * message.dtype.itemsize == made.message_bytes(n)
        back = jax.eval_shape(made.decode, message)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name", VECTORS)
@settings(max_examples=10, deadline=None)
@given(x=finite)
def test_coding_is_deterministic_and_odd(name, x):
    run = round_trip(name)
    decoded, _, message = run(x)
    again, _, message_again = run(x.copy())
    assert np.array_equal(message, message_again) and np.array_equal(decoded, again)
    assert np.array_equal(-np.asarray(decoded), run(-x)[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", VECTORS)
def test_a_non_finite_value_stays_non_finite(name, bad):
    x = np.ones(SIZE, np.float32)
    x[37] = bad
    decoded = np.asarray(round_trip(name)(x)[0])
    assert not np.isfinite(decoded[37])


@pytest.mark.parametrize("name", VECTORS)
def test_zeros_and_numbers_too_small_for_a_scale(name):
    zeros = np.zeros(SIZE, np.float32)
    assert not np.asarray(round_trip(name)(zeros)[0]).any()
    subnormal = np.full(SIZE, 1e-42, np.float32)
    assert np.abs(np.asarray(round_trip(name)(subnormal)[0])).max() <= 2e-38


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-7, 7), min_size=64, max_size=64).filter(lambda v: max(map(abs, v)) == 7))
def test_four_bit_codes_survive_packing(values):
    x = jnp.asarray(values, jnp.float32)
    made = Int4(64)
    assert np.array_equal(made.decode(made.encode(x)), x)
    assert made.encode(x).shape == (64 // 2 + 2,)


def test_eight_bit_codes_survive():
    x = jnp.arange(-127, 127, dtype=jnp.float32)
    x = jnp.concatenate([x, jnp.full(2, 127.0)])
    assert np.array_equal(Int8(256).decode(Int8(256).encode(x)), x)


@settings(deadline=None)
@given(st.floats(width=32))
def test_bf16_bits_are_jax_s_bfloat16(x):
    x = np.float32(x)
    bits = np.asarray(bf16_bits(x))
    wanted = np.asarray(jnp.asarray(x).astype(jnp.bfloat16).view(jnp.uint16))
    if np.isnan(x):
        assert np.isnan(from_bf16_bits(bits))
    elif np.isfinite(x) and abs(x) >= np.finfo(np.float32).tiny and wanted & 0x7FFF != 0x7F80:
        assert bits == wanted
    elif np.isfinite(x):
        assert np.isfinite(from_bf16_bits(bits))


def test_the_rotation_is_n_times_its_own_inverse():
    h = hadamard_matrix(64)
    assert np.array_equal(h @ h, 64 * np.eye(64)) and np.array_equal(h, h.T)


def test_orthonormal_columns_even_where_the_matrix_has_not_full_rank():
    rng = np.random.default_rng(0)
    full = rng.standard_normal((2, 50, 4)).astype(np.float32)
    q = np.asarray(orthonormal(full), np.float64)
    assert np.allclose(q.swapaxes(1, 2) @ q, np.eye(4), atol=1e-5)
    poor = full.copy()
    poor[..., 2] = poor[..., 0] * 3 - poor[..., 1]
    q = np.asarray(orthonormal(poor), np.float64)
    gram = q.swapaxes(1, 2) @ q
    assert np.allclose(gram, np.diag([1, 1, 0, 1]), atol=1e-5)
    assert not np.asarray(orthonormal(np.zeros((1, 8, 2), np.float32))).any()
    for scale in (1e-30, 1e30):
        assert np.allclose(orthonormal(full * np.float32(scale)), orthonormal(full), atol=1e-4)
