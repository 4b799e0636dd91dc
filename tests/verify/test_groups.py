"""Replica groups: the three spellings say the same, and nothing else is guessed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensjax.verify.hlo.groups import UnknownGroups, as_lists, replica_groups, source_target_pairs
from lensjax.verify.traffic import mesh_axes


def test_lists():
    assert as_lists(replica_groups("{{0,1},{2,3}}, use_global", 4)) == [[0, 1], [2, 3]]
    assert as_lists(replica_groups("{}", 3)) == [[0, 1, 2]]
    assert replica_groups("{{0,1,2},{3}}", 4) == ((0, 1, 2), (3,))


def test_iota():
    assert as_lists(replica_groups("[2,4]<=[8]", 8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert as_lists(replica_groups("[4,2]<=[2,4]T(1,0), x", 8)) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_mesh():
    text = "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, use_global_device_ids=true"
    assert as_lists(replica_groups(text, 8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert as_lists(replica_groups("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", 4)) == [[3, 1], [2, 0]]
    assert as_lists(replica_groups("mesh['a'=8] {'a':(1)2}", 8)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert as_lists(replica_groups("mesh['a'=8] {'a':(2)2}", 8)) == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    "text",
    ["foo[2]", "", "[2,4]<=[9]", "[4,2]<=[2,4]T(1,1)", "mesh['a'=4], device_ids=([3]) {'a'}", "mesh['a'=4] {'z'}",
     "mesh['a'=4] {'a':(3)2}"],
)  # fmt: skip
def test_anything_else_raises(text):
    with pytest.raises(UnknownGroups):
        replica_groups(text, 4)


def test_pairs():
    assert source_target_pairs("{{0,1},{1,0}}, channel_id=1").tolist() == [[0, 1], [1, 0]]
    with pytest.raises(UnknownGroups):
        source_target_pairs("{0->1}")


@st.composite
def meshes(draw):
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(dims))))
    picked = draw(st.lists(st.sampled_from(range(len(dims))), min_size=1, max_size=len(dims), unique=True))
    return dims, order, picked


@given(meshes())
def test_spellings_agree(drawn):
    """The same groups written as a mesh, as an iota and as lists are read alike."""
    dims, order, picked = drawn
    ids = np.arange(np.prod(dims)).reshape(dims).transpose(order)
    shape = ids.shape
    rest = [i for i in range(len(shape)) if i not in picked]
    members = int(np.prod([shape[i] for i in picked]))
    groups = ids.transpose(rest + picked).reshape(-1, members)
    axes = ",".join(f"'x{i}'={n}" for i, n in enumerate(shape))
    sizes, perm = ",".join(map(str, dims)), ",".join(map(str, order))
    mesh = f"mesh[{axes}], device_ids=([{sizes}]T({perm})) {{{','.join(f'{chr(39)}x{i}{chr(39)}' for i in picked)}}}"
    after = ",".join(str(order[i]) for i in rest + picked)
    iota = f"[{len(groups)},{members}]<=[{sizes}]T({after})"
    lists = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups.tolist()) + "}"
    for text in (mesh, iota, lists):
        assert np.array_equal(replica_groups(text, ids.size), groups)


@given(meshes())
def test_groups_are_a_partition_along_their_axes(drawn):
    dims, _, picked = drawn
    names = {f"x{i}": n for i, n in enumerate(dims)}
    axes = ",".join(f"'x{i}'={n}" for i, n in enumerate(dims))
    text = f"mesh[{axes}] {{{','.join(f'{chr(39)}x{i}{chr(39)}' for i in picked)}}}"
    groups = replica_groups(text, int(np.prod(dims)))
    assert sorted(itertools.chain(*as_lists(groups))) == list(range(int(np.prod(dims))))
    assert set(mesh_axes(groups, names)) == {f"x{i}" for i in picked if dims[i] > 1}
