"""Clusters as data: specs, the catalogue, files, damage, and errors that say what to write instead."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensjax._errors import ClusterError
from lensjax.topology import catalogue, units
from lensjax.topology.cluster import Cluster, Device, Other, Slow, Tier

SPECS = [name for name in catalogue.machines()] + [
    "cpu:8",
    "cpu:2x4",
    "dgx-h100:33",
    "tpu-v5e:4x8x8",
    "gb200:4",
    "h100:3x5",
]
WANTED = """dgx1-v100 p3.16xlarge dgx-a100-40 dgx-a100-80 p4d p4de dgx-h100 p5 a3-high a3-mega a3-ultra dgx-h200
dgx-b200 gb200-nvl72 mi300x tpu-v4 tpu-v5e tpu-v5p tpu-v6e hbm2e-nvswitch""".split()


@pytest.mark.parametrize("name", WANTED)
def test_the_catalogue_has_the_machine(name):
    cluster = Cluster.parse(f"{name}:256") if "tpu" in name else Cluster.parse(f"{name}:4")
    assert cluster.devices == (256 if "tpu" in name else 4 * catalogue.make(catalogue.machine(name), (1,)).devices)


@pytest.mark.parametrize("spec", SPECS)
def test_round_trip_through_json_yaml_and_a_file(spec, tmp_path):
    cluster = Cluster.parse(spec)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    for suffix, text in ((".json", cluster.to_json()), (".yaml", cluster.to_yaml())):
        path = tmp_path / f"machine{suffix}"
        path.write_text(text)
        assert Cluster.parse(path) == cluster == Cluster.parse(str(path))


def test_round_trip_of_a_damaged_cluster():
    cluster = dataclasses.replace(
        Cluster.parse("dgx-h100:4"),
        missing=(5, 17),
        slow=(Slow("rail", (8, 9), 0.25, "seen"),),
        others=(Other(24, 32, catalogue.device("A100-SXM4-80GB")),),
        order=tuple(reversed(range(30))),
        notes=("measured yesterday",),
    )
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    assert Cluster.from_json(cluster.to_json()).to_json() == cluster.to_json()
    assert hash(cluster) == hash(Cluster.from_json(cluster.to_json()))


@pytest.mark.parametrize("name", list(catalogue.machines()))
def test_every_number_of_the_catalogue_has_a_source(name):
    machine = catalogue.machine(name)
    cluster = catalogue.make(machine, (catalogue.make(machine).devices * 4,) if machine.unit == "chip" else (4096,))
    device = cluster.device
    for field in ("memory", "memory_bandwidth", "peak", "achievable", "host_bandwidth", "host_memory"):
        if getattr(device, field):
            assert device.sources.get(field), f"{device.name}.{field}"
    for tier in cluster.tiers:
        default = Tier("x", 1, 1.0, 0.0)
        changed = [
            f
            for f in ("nic_sharing", "oversubscription", "multicast", "takes_cores")
            if getattr(tier, f) != getattr(default, f)
        ]
        for field in ["bandwidth", "latency", *changed]:
            assert tier.sources.get(field), f"{name}.{tier.name}.{field}"


def test_a_number_counts_nodes_chips_or_a_shape():
    assert Cluster.parse("dgx-h100:32").devices == 256
    assert [t.size for t in Cluster.parse("dgx-h100:2048").tiers] == [8, 256, 16384]
    assert [t.size for t in Cluster.parse("dgx-h100:4x4").tiers] == [4, 16]
    assert Cluster.parse("gb200-nvl72:2").devices == 144
    assert Cluster.parse("tpu-v5e:8").tiers[0].shape == (2, 4)
    assert Cluster.parse("tpu-v5p:128").tiers[0].shape == (4, 4, 8)
    assert [t.size for t in Cluster.parse("tpu-v5e:512").tiers] == [256, 512]
    assert Cluster.parse("tpu-v5e:16x16").tiers[0].wrap == (True, True)
    assert Cluster.parse("tpu-v5e:8x16").tiers[0].wrap == (False, True)
    assert [t.size for t in Cluster.parse("cpu:2x4").tiers] == [4, 8]
    assert Cluster.parse(Cluster.parse("cpu:3")) == Cluster.parse("cpu:3")


BAD_SPECS = [
    "dgx-h10:2",
    "dgx-h100:0",
    "dgx-h100:-1",
    "dgx-h100:two",
    "dgx-h100:2x9",
    "dgx-h100:1x2x3",
    "tpu-v5e:2x3x4x5",
    "tpu-v5e:257",
    "tpu-v5p:3x9000x1",
    "cpu:1x2x3",
    "cpu:0",
    "nosuch.yaml",
    "nosuch.json",
    "",
    ":8",
]


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_wrong_spec_is_an_error_about_that_spec(spec):
    with pytest.raises(ClusterError) as e:
        Cluster.parse(spec)
    assert e.value.message


def test_a_misspelt_machine_is_answered_with_the_close_ones():
    with pytest.raises(ClusterError, match="dgx-h100"):
        Cluster.parse("dgxh100:2")


FILE = """
name: mine
device: H100-SXM5-80GB
tiers:
  - {name: nvlink, size: 8, bandwidth: 450 GB/s, latency: 2 us}
  - {name: ib, size: 32, bandwidth: 400 Gbit/s, latency: 5 us, nic_sharing: 2}
missing: [7]
"""


def test_a_file_by_hand_with_units():
    cluster = Cluster.from_yaml(FILE)
    assert cluster.devices == 31 and cluster.tiers[1].bandwidth == 50e9 and cluster.tiers[0].latency == 2e-6
    assert cluster.device.memory_bandwidth == 3350e9


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("bandwidth: 450 GB/s", "bandwidth: 450 GB", "tiers[0].bandwidth"),
        ("bandwidth: 450 GB/s", "bandwith: 450 GB/s", "did you mean 'bandwidth'"),
        ("latency: 2 us", "latency: fast", "tiers[0].latency"),
        ("size: 32", "size: 4", "whole groups"),
        ("size: 32", "size: 3.5", "tiers[1].size"),
        ("name: ib", "name: nvlink", "share a name"),
        ("missing: [7]", "missing: [99]", "do not exist"),
        ("missing: [7]", "missing: [7, 7]", "twice"),
        ("missing: [7]", "slow: [{tier: ib, slots: [0], factor: 2}]", "factor"),
        ("missing: [7]", "slow: [{tier: eth, slots: [0], factor: 0.5}]", "'eth'"),
        ("missing: [7]", "order: [0, 1]", "permutation"),
        ("device: H100-SXM5-80GB", "device: H100", "H100-SXM5-80GB"),
        ("device: H100-SXM5-80GB", "", "lacks 'device'"),
        ("name: mine", "schema: 2\nname: mine", "schema 2"),
        ("name: mine", "name: [mine", "line"),
        ("nic_sharing: 2", "kind: cube", "switch, mesh"),
        ("nic_sharing: 2", "kind: torus, shape: [4, 4]", "torus of 32"),
        ("nic_sharing: 2", "multicast: maybe", "multicast"),
        ("nic_sharing: 2", "oversubscription: 0.5", "oversubscription"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place(old, new, said):
    assert old in FILE
    with pytest.raises(ClusterError) as e:
        Cluster.from_yaml(FILE.replace(old, new), "mine.yaml")
    assert said in str(e.value)


def test_tier_of_is_the_innermost_tier_with_all_members():
    cluster = Cluster.parse("dgx-h100:64")
    groups = np.array([[0, 1, 7], [0, 8, 16], [0, 256, 257], [511, 510, 504]])
    assert cluster.tier_of(groups).tolist() == [0, 1, 2, 0]
    assert int(cluster.tier_of([3, 9])) == 1
    for wrong in ([0, 512], [-1, 3]):
        with pytest.raises(ClusterError, match=r"0\.\.511"):
            cluster.tier_of(wrong)


def test_device_ids_stay_dense_where_slots_are_missing():
    cluster = dataclasses.replace(Cluster.parse("dgx-h100:2"), missing=(7,))
    assert cluster.devices == 15 and cluster.slots.tolist() == [*range(7), *range(8, 16)]
    assert int(cluster.tier_of([0, 6])) == 0 and int(cluster.tier_of([6, 7])) == 1
    assert not cluster.regular and Cluster.parse("dgx-h100:2").regular


def test_slow_links_and_other_devices_are_where_they_are_said_to_be():
    old = catalogue.device("A100-SXM4-80GB")
    cluster = dataclasses.replace(
        Cluster.parse("dgx-h100:2"), missing=(0,), slow=(Slow("rail", (15,), 0.5),), others=(Other(8, 16, old),)
    )
    assert cluster.bandwidth_of(1).tolist() == [50e9] * 14 + [25e9]
    assert cluster.device_of(6) == cluster.device and cluster.device_of(7) == old


def test_peaks_fall_back_to_float32_and_float8_has_one_name():
    v100, h100 = catalogue.device("V100-SXM2-32GB"), catalogue.device("H100-SXM5-80GB")
    assert v100.peak_flops("bfloat16") == 15.7e12
    assert h100.peak_flops("float8_e4m3fn") == 1978.9e12
    assert h100.achievable_flops("bfloat16") == pytest.approx(794.5e12, rel=1e-2)


def test_devices_are_found_by_what_jax_calls_them():
    found = catalogue.device_of_kind("NVIDIA H100 80GB HBM3")
    assert isinstance(found, Device) and found.name == "H100-SXM5-80GB"
    assert catalogue.machine_of(found).name == "dgx-h100"
    assert catalogue.device_of_kind("Abacus") is None


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("400 Gbit/s", "bytes/s", 50e9),
        ("400Gbps", "bytes/s", 50e9),
        ("1.9 us", "seconds", 1.9e-6),
        ("12 ns", "seconds", 12e-9),
        ("989.4 TFLOP/s", "flops", 989.4e12),
        (7, "seconds", 7.0),
        ("1_000", "bytes", 1000.0),
        ("10.", "bytes", 10.0),
        ("3.35 TB/s", "bytes/s", 3.35e12),
    ],
)
def test_units(text, kind, value):
    assert units.parse(text, kind, "x") == value


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("80 FLOP/s", "bytes/s"),
        ("80 GB", "bytes/s"),
        ("3 GB/s", "bytes"),
        ("3 s", "bytes"),
        ("-1 GB", "bytes"),
        ("inf", "bytes"),
        (True, "bytes"),
        (None, "bytes"),
        ([1], "bytes"),
        ("1e400", "bytes"),
        ("five", "seconds"),
        ("3 TFLOP/s", "bytes/s"),
        (float("nan"), "bytes"),
    ],
)
def test_wrong_units(text, kind):
    with pytest.raises(ClusterError, match="x: "):
        units.parse(text, kind, "x")


@given(st.floats(1e-9, 1e16, allow_nan=False))
def test_pretty_keeps_three_digits(value):
    text = units.pretty(value, "B/s")
    assert units.parse(text, "bytes/s", "x") == pytest.approx(value, rel=6e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_tier_of_agrees_with_its_definition(lengths, data):
    sizes = np.cumprod(lengths)
    device = Cluster.parse("cpu:1").device
    missing = data.draw(st.sets(st.integers(0, int(sizes[-1]) - 1), max_size=int(sizes[-1]) - 1))
    order = data.draw(st.permutations(range(int(sizes[-1]) - len(missing))))
    tiers = tuple(Tier(f"t{i}", int(s), 1e9 / 2**i, 1e-6) for i, s in enumerate(sizes))
    cluster = Cluster("c", device, tiers, tuple(sorted(missing)), order=tuple(order))
    ids = data.draw(st.lists(st.integers(0, cluster.devices - 1), min_size=1, max_size=6))
    found = int(cluster.tier_of(ids))
    together = [len({int(cluster.slots[i]) // t.size for i in ids}) == 1 for t in tiers]
    assert together[found] and not any(together[:found])
