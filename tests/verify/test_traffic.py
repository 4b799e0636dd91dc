"""Bytes on the wire: closed forms, conservation, tiers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax.topology.cluster import Cluster
from lensjax.verify.artifact import Artifact
from lensjax.verify.collectives import Collective, collectives
from lensjax.verify.hlo import Shape, parse_hlo
from lensjax.verify.prices import Priced
from lensjax.verify.traffic import sent_bytes, traffic


def made(kind, groups, elements=1024, trips=1):
    shape = (Shape("f32", (elements,)),)
    return Collective("c", kind, "main", np.array(groups), shape, shape, trips, False, False, "", ())


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for n in (2, 3, 8, 512):
        whole = 4096.0 * n
        assert sent_bytes("all-reduce", whole, n) == pytest.approx(
            sent_bytes("reduce-scatter", whole, n) + sent_bytes("all-gather", whole / n, n)
        )


@given(st.integers(1, 64), st.floats(1, 1e12), st.integers(1, 100))
def test_bytes_add_up_and_scale(n, payload, trips):
    one = made("all-gather", [list(range(n))], max(int(payload) % 10_000, 1))
    many = traffic([made("all-gather", [list(range(n))], one.operands[0].elements, trips)])
    assert many.total == pytest.approx(trips * traffic([one]).total)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-broadcast"])
def test_tiers(kind):
    cluster = Cluster.parse("dgx-h100:2")
    priced = Priced(cluster, 16)
    inside = priced.bytes(made(kind, np.arange(16).reshape(2, 8)))
    across = priced.bytes(made(kind, np.arange(16).reshape(2, 8).T))
    assert set(inside) == {"nvlink"} and set(across) == {"rail"}
    assert inside["nvlink"] == pytest.approx(sent_bytes(kind, 4096, 8))
    assert across["rail"] == pytest.approx(sent_bytes(kind, 4096, 2))
    assert priced.bytes(made(kind, [[0], [1]])) == {}


def test_a_permute_counts_once_and_not_to_itself():
    cluster = Cluster.parse("dgx-h100:2")
    ring = [[i, (i + 1) % 16] for i in range(16)]
    assert set(Priced(cluster, 16).bytes(made("collective-permute", ring))) == {"nvlink", "rail"}
    assert traffic([made("collective-permute", ring)]).total == 4096
    assert traffic([made("collective-permute", [[0, 0], [1, 1]])]).total == 0


def test_the_device_order_decides_the_tier():
    cluster = Cluster.parse("dgx-h100:2")
    rows = made("all-reduce", np.arange(16).reshape(2, 8))
    strided = np.arange(16).reshape(8, 2).T.ravel().tolist()
    assert set(Priced(cluster, 16).bytes(rows)) == {"nvlink"}
    assert "rail" in Priced(cluster, 16, strided).bytes(rows)


def test_closed_forms_on_a_compiled_step():
    """Data parallel over 8: the gradients' all-reduce, 2 (n-1)/n of them; and a matmul split over 'model'."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(w, v, x):
        return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ v))(w)

    def on(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w, v, x = on((64, 128), None, "model"), on((128, 1), "model", None), on((32, 64), "data", None)
    compiled = jax.jit(step, out_shardings=w.sharding).lower(w, v, x).compile()
    found = collectives(parse_hlo(Artifact.of(compiled, backend="cpu").hlo))
    flow = traffic(found.collectives, dict(mesh.shape))
    assert flow.axes[("data",)] == pytest.approx(2 * 3 / 4 * 64 * 64 * 4)
