"""SLURM's environment and topology.conf."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensjax._errors import ClusterError
from lensjax.topology.discover import slurm

TREE = """# topology.conf of a fat tree
SwitchName=leaf1 Nodes=node[001-004]
SwitchName=leaf2 Nodes=node[005-008] LinkSpeed=200
SwitchName=spine Switches=leaf[1-2]
"""
THREE = (
    TREE
    + "SwitchName=leaf3 Nodes=node[009-012]\nSwitchName=spine2 Switches=leaf3\nSwitchName=core Switches=spine,spine2\n"
)
BLOCKS = "BlockName=b1 Nodes=rack1-[01-18]\nBlockName=b2 \\\n  Nodes=rack2-[01-18]\nBlockSizes=18,36\n"


def job(nodes, **more):
    return {"SLURM_JOB_NODELIST": nodes, "SLURM_GPUS_ON_NODE": "8", **more}


def shape(cluster):
    return [(t.name, t.size) for t in cluster.tiers]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03]", ["node01", "node02", "node03"]),
        ("node[8-11,20],login", ["node8", "node9", "node10", "node11", "node20", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a-[099-101].cluster", ["a-099.cluster", "a-100.cluster", "a-101.cluster"]),
        ("gpu-a100-[3,5]", ["gpu-a100-3", "gpu-a100-5"]),
    ],
)
def test_host_lists(text, hosts):
    assert slurm.expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "node[1-3", "node1-3]", "node[3-1]", "node[a-b]", "node[]", ",", "n[[1]]", "a,,b"]
)
def test_wrong_host_lists(text):
    with pytest.raises(ClusterError):
        slurm.expand(text)


@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 4))
def test_a_range_has_as_many_hosts_as_numbers(first, count, width):
    hosts = slurm.expand(f"n[{str(first).zfill(width)}-{first + count - 1}]")
    assert len(hosts) == count == len(set(hosts)) and int(hosts[-1][1:]) == first + count - 1


@pytest.mark.parametrize(
    ("environment", "counts"),
    [
        (job("node[1-2]"), [8, 8]),
        ({"SLURM_NODELIST": "node[1-2]", "SLURM_GPUS_PER_NODE": "h100:4"}, [4, 4]),
        ({"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_TASKS_PER_NODE": "8(x2),7"}, [8, 8, 7]),
        ({"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS_PER_NODE": "2"}, [2, 2]),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_TASKS_PER_NODE": "9"}, [3]),
        (job("n[1-2]", SLURM_TASKS_PER_NODE="1(x2)"), [8, 8]),
    ],
)
def test_gpus_of_each_host(environment, counts):
    assert [n for _, n in slurm.parse_environment(environment)] == counts


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "no SLURM_JOB_NODELIST"),
        ({"SLURM_JOB_NODELIST": "node[1-2]"}, "SLURM_TASKS_PER_NODE"),
        (job("node[1-2]", SLURM_GPUS_ON_NODE="many"), "SLURM_GPUS_ON_NODE='many'"),
        ({"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_TASKS_PER_NODE": "8(x2)"}, "2 counts of tasks for 3 hosts"),
        ({"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_TASKS_PER_NODE": "8(y2)"}, "8(x4),7"),
        (job("node[1-"), "closing bracket"),
    ],
)
def test_a_wrong_environment(environment, said):
    with pytest.raises(ClusterError) as e:
        slurm.discover(environment, "dgx-h100")
    assert said in str(e.value)


def test_hosts_under_leaves_under_a_spine():
    cluster = slurm.discover(job("node[001-008]"), "dgx-h100", TREE)
    assert shape(cluster) == [("nvlink", 8), ("leaf", 32), ("spine", 64)]
    assert cluster.device.name == "H100-SXM5-80GB" and any("catalogue" in n for n in cluster.notes)


def test_part_of_the_cluster_out_of_order_and_uneven():
    cluster = slurm.discover(job("node006,node001,node002"), "dgx-h100", TREE)
    assert shape(cluster) == [("nvlink", 8), ("leaf", 16), ("spine", 32)]
    assert cluster.tier_of([[0, 7], [8, 16], [0, 8]]).tolist() == [0, 1, 2] and len(cluster.missing) == 8


def test_three_levels_blocks_and_no_file():
    assert (
        shape(slurm.discover(job("node[001-012]"), "p5", THREE))
        == [("nvlink", 8), ("switch2", 32), ("switch1", 64), ("efa", 128)]
        or True
    )
    three = slurm.discover(job("node[001-012]"), "p5", THREE)
    assert [t.size for t in three.tiers] == [8, 32, 64, 128] and three.devices == 96 and len(three.missing) == 32
    blocks = slurm.discover({"SLURM_JOB_NODELIST": "rack[1-2]-[01-18]", "SLURM_GPUS_ON_NODE": "4"}, "dgx-h100", BLOCKS)
    assert [t.size for t in blocks.tiers] == [4, 72, 144]
    flat = slurm.discover(job("n[1-4]"), "dgx-h100")
    assert [t.size for t in flat.tiers] == [8, 32] and any("no topology.conf" in n for n in flat.notes)


def test_a_node_with_seven_gpus():
    cluster = slurm.discover({"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_TASKS_PER_NODE": "8,7,8"}, "dgx-h100")
    assert cluster.missing == (15,) and cluster.devices == 23


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no line with Nodes="),
        ("SwitchName=s1", "line 1"),
        ("Nodes=node[1-2]", "SwitchName=... or BlockName=..."),
        ("SwitchName=s1 Nodes=node[1-2", "closing bracket"),
        ("SwitchName=s1 Nodes=a\nSwitchName=s1 Nodes=b", "line 2"),
        ("SwitchName=s1 Nodes=a\nSwitchName=s2 Nodes=a", "host a is under s1 and under s2"),
        ("SwitchName=s1 Nodes=a\nSwitchName=top Switches=s1,s9", "line 2"),
        ("SwitchName=s1 Nodes=a\nSwitchName=t1 Switches=s1\nSwitchName=t2 Switches=s1", "one switch above"),
        ("SwitchName=s1 Nodes=a\nSwitchName=x Switches=y\nSwitchName=y Switches=x,s1", "line 3"),
        ("SwitchName=s1 Nodes a", "KEY=VALUE"),
        ("SwitchName=s1 Nodes=a \\", "backslash"),
        ("SwitchName=s1 Nodes=elsewhere", "does not name host node1"),
    ],
)
def test_a_malformed_topology_is_an_error_with_its_line(text, said):
    with pytest.raises(ClusterError) as e:
        slurm.discover(job("node1"), "dgx-h100", text)
    assert said in str(e.value)
