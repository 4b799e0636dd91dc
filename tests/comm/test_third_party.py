"""A codec of one's own, as docs/comm.md shows it: the page's code runs, and obeys the laws of every codec."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lensjax import comm
from lensjax.comm import registry
from tests.comm.arrays import finite

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comm.md"


def code(title):
    """The Python of a section of the page."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", section, re.S))


@pytest.fixture(scope="module")
def sign():
    space = {}
    exec(compile(code("A codec of your own"), str(PAGE), "exec"), space)
    return space["Sign"]


def test_it_is_a_codec_like_any_other(sign, monkeypatch):
    class Entry:
        name = "sign"

        @staticmethod
        def load():
            return sign

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry] if group == "lensjax.codecs" else [])
    registry._parse.cache_clear()
    assert comm.parse_codec("sign:64") == sign(64) and str(sign(64)) == "sign:block=64"
    registry._parse.cache_clear()


def test_its_bound_holds_and_its_messages_have_the_size_it_says(sign):
    made = sign()
    run = jax.jit(lambda x: (made.encode(x), made.decode(made.encode(x)), made.error_bound(x)))

    @settings(max_examples=30, deadline=None)
    @given(x=finite)
    def holds(x):
        message, decoded, bound = map(np.asarray, run(x))
        assert message.nbytes == made.message_bytes(x.size)
        assert (np.abs(decoded.astype(np.float64) - x) <= bound).all()

    holds()


def test_it_reduces_with_feedback_and_leaves_nothing_behind(sign):
    mesh = jax.make_mesh((4, 2), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    how = dict(mesh=mesh, spec=P(), axes="node", inner="gpu", codec=sign())
    shape = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    step = jax.jit(lambda x, s: comm.reduce_stacked(x, state=s, **how))
    state, sent, given_sum = comm.init_state(shape, **how), 0.0, 0.0
    for i in range(5):
        x = np.random.default_rng(i).normal(size=(4, 16, 128)).astype("f")
        total, state = step(x, state)
        assert not comm.differing(total)
        sent, given_sum = sent + np.asarray(total, np.float64), given_sum + x.astype(np.float64).sum(0)
    nodes = {k: np.asarray(v, np.float64).reshape(4, 2, -1) for k, v in state[0].items()}
    left = np.concatenate([nodes["sent"][:, g].sum(0) + nodes["owned"][:, g].reshape(-1) for g in (0, 1)])
    assert np.abs(sent + left.reshape(16, 128) - given_sum).max() < 1e-3


def test_the_example_by_hand_runs():
    space = {}
    exec(compile(code("By hand, in your own shard_map"), str(PAGE), "exec"), space)
    assert space["losses"][-1] < 0.5 * space["losses"][0]
