"""Vectors that codecs have trouble with, as hypothesis strategies, and the codecs that are tested with them."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import numpy as np
from hypothesis import strategies as st

from lensjax.comm import parse_codec

SIZE = 256
VECTORS = (
    "bf16", "int8", "int8:256", "int8:2", "int4", "int4:32", "int4:32:hadamard", "int4:hadamard", "int4:back=int8",
    "fp8", "fp8:e5m2", "fp8:block=64",
)  # fmt: skip
# Every float32, subnormals and the largest ones included; and ordinary ones at one scale with a few outliers.
_any = hnp.arrays(np.float32, SIZE, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
_powers = st.integers(-149, 127)


@st.composite
def _gaussian(draw, size=SIZE):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal(size) * 2.0 ** draw(_powers)
    for place in draw(st.lists(st.integers(0, size - 1), max_size=3)):
        x[place] *= 2.0 ** draw(st.integers(0, 40))
    x[rng.random(size) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0
    top = np.finfo(np.float32).max
    return np.clip(x, -top, top).astype(np.float32)


finite = st.one_of(_any, _gaussian())


@functools.cache
def round_trip(name: str):
    """x -> (decode(encode(x)), error bound, message), compiled once for each codec."""
    made = parse_codec(name)

    def run(x):
        message = made.encode(x)
        return made.decode(message), made.error_bound(x), message

    return jax.jit(run)
