"""Cluster files and specs that nobody meant: an error with the place, or the machine that was meant; never another."""

import dataclasses
import math

import pytest

from lensjax._errors import ClusterError
from lensjax.topology import catalogue
from lensjax.topology.cluster import Cluster, Device, Other

BASE = """name: mine
device: {name: X, platform: cuda, memory: 80 GB, memory_bandwidth: 3 TB/s, peak: {float32: 1e13, bfloat16: 9e14}}
tiers:
  - {name: nvlink, size: 8, bandwidth: 450 GB/s, latency: 1.9 us}
  - {name: rail, size: 64, bandwidth: 400 Gbit/s, latency: 4 us}
"""


def test_the_text_as_it_stands_is_a_cluster():
    for text in (BASE, "\ufeff" + BASE, BASE.replace("\n", "\r\n"), BASE.replace("400 Gbit/s", ".4 Tb/s")):
        assert Cluster.from_yaml(text).tiers[1].bandwidth == 50e9


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("size: 8,", "size: 8, size: 16,", "line 4.*'size' stands twice"),
        ("name: mine", "name: mine\nname: other", "line 2.*'name' stands twice"),
        ("float32: 1e13", "float32: 1e13, float32: 2e13", "'float32' stands twice"),
        ("size: 64,", "size: 80000000000,", "80,000,000,000 slots"),
        ("size: 64,", "size: 64, oversubscription: .inf,", "oversubscribed inf"),
        ("450 GB/s", "1.0e+300", "not a quantity"),
        ("size: 8,", "size: 8, kind: ring,", "kind 'ring'"),
        ("size: 8,", "size: 8, shape: [2, 4],", "only a torus has a shape|shape"),
        ("size: 8,", "size: 8, kind: torus, shape: [-2, -4],", "a torus of 8"),
        ("size: 8,", "size: 8, kind: torus, shape: [2, 4], wrap: true,", r"tiers\[0\].wrap"),
        ("size: 8,", "size: 8, kind: torus, shape: [2, 4], wrap: ['no', 'no'],", r"tiers\[0\].wrap\[0\]"),
        ("size: 64,", "size: 64, kind: torus, shape: [8, 8],", "torus outside 'nvlink'"),
        ("80 GB,", "80 Gb,", "device.memory: '80 Gb'"),
        ("80 GB,", "0,", "memory 0.0"),
        ("3 TB/s", "0", "memory_bandwidth 0.0"),
        ("float32: 1e13", "float32: 0", "float32 0.0"),
        ("bfloat16", "bf16", "no dtype 'bf16'"),
        ("bfloat16", "float8_e4m3fn", "no dtype 'float8_e4m3fn'"),
        ("platform: cuda", "platform: gpu", "platform: 'gpu'"),
        ("platform: cuda", "platform: cuda, kinds: NVIDIA H100", "kinds: expected a list"),
        ("platform: cuda", "platform: cuda, achievable: {bfloat16: 70}", "bfloat16 70.0"),
        ("name: mine", "name: mine\nnotes: 5", "notes: expected a list"),
        ("name: mine", "name: mine\nschema: true", "schema True"),
        ("name: mine", "name: 2024-13-45", "not YAML that lensjax reads: month"),
        ("name: mine", "name: " + "[" * 5000, "not YAML"),
    ],
)
def test_a_broken_file_is_an_error_about_that_place(old, new, said):
    with pytest.raises(ClusterError, match=said):
        Cluster.from_yaml(BASE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("9" * 400, "not a quantity"),
        ("9" * 5000, "not JSON"),
        ("NaN", "not a quantity"),
        ('1e9, "bandwidth": 2e9', "'bandwidth' stands twice"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_broken_json_is_an_error_too(number, said):
    text = '{"name": "a", "device": "cpu", "tiers": [{"name": "n", "size": 8, "latency": 0, "bandwidth": %s}]}'
    with pytest.raises(ClusterError, match=said):
        Cluster.from_json(text % number)


def test_ranges_of_other_devices_that_meet_are_an_error():
    cluster, other = Cluster.parse("dgx-h100:4"), catalogue.device("A100-SXM4-80GB")
    with pytest.raises(ClusterError, match=r"others 0..16 and 8..24 share slots"):
        dataclasses.replace(cluster, others=(Other(0, 16, other), Other(8, 24, other)))
    assert dataclasses.replace(cluster, others=(Other(0, 8, other), Other(8, 24, other))).devices == 32


def test_a_device_made_in_code_is_checked_as_one_in_a_file():
    for memory in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ClusterError, match="memory"):
            Device("X", "cuda", memory, 1e12, {"float32": 1e13})


def test_files_that_are_no_text_or_no_files(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(ClusterError, match=r"UTF-8|utf-8"):
        Cluster.parse(tmp_path / "x.yaml")
    (tmp_path / "machine").write_text(BASE)
    with pytest.raises(ClusterError, match="no spec and no cluster file"):
        Cluster.parse(str(tmp_path / "machine"))
    (tmp_path / "x.json").write_text("\ufeff" + Cluster.parse("cpu:4").to_json(), encoding="utf-8")
    assert Cluster.parse(tmp_path / "x.json") == Cluster.parse("cpu:4")


@pytest.mark.parametrize("machine", [m.name for m in catalogue.machines().values() if m.unit != "chip"])
@pytest.mark.parametrize(("units", "used"), [(1, 1), (2, 1), (2, 3), (2, 4), (3, 7), (5, 8), (40, 5)])
def test_part_of_each_unit_is_that_many_devices_on_nested_tiers(machine, units, used):
    cluster = Cluster.parse(f"{machine}:{units}x{used}")
    sizes = [t.size for t in cluster.tiers]
    assert cluster.devices == units * used and sizes[0] == used
    assert sizes == sorted(set(sizes)) and sizes[-1] == units * used
    whole = Cluster.parse(f"{machine}:{units}")
    assert [t.name for t in whole.tiers] == [t.name for t in cluster.tiers]


def test_a_slice_below_a_cube_closes_no_side():
    for shape in ("2x2x4", "2x4x4", "1x1x1"):
        assert not any(Cluster.parse(f"tpu-v5p:{shape}").tiers[0].wrap)
    assert all(Cluster.parse("tpu-v4:4x4x8").tiers[0].wrap)
    assert Cluster.parse("tpu-v5e:8x16").tiers[0].wrap == (False, True)


@pytest.mark.parametrize("spec", [None, 5, ("a",), b"cpu:8", "cpu:+8", "cpu:1_0", "cpu:٨", "cpu:8x", "cpu:99999999999"])
def test_what_is_no_spec_is_an_error(spec):
    with pytest.raises(ClusterError, match=r"expected a spec|no number of devices|too large"):
        Cluster.parse(spec)


def test_a_name_in_capitals_or_in_part_is_understood():
    assert Cluster.parse(" DGX-H100:2 ") == Cluster.parse("dgx-h100:2")
    with pytest.raises(ClusterError) as e:
        Cluster.parse("a100:8")
    assert "dgx-a100-40 or dgx-a100-80" in str(e.value)
    with pytest.raises(ClusterError) as e:
        catalogue.device("h100")
    assert "H100-SXM5-80GB" in str(e.value)
