"""From `jax.devices()`: the emulated ones here, and objects with the attributes of others."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lensjax._errors import ClusterError
from lensjax.topology.discover.live import live
from lensjax.topology.mesh import make_mesh

H100, V5E, V4 = "NVIDIA H100 80GB HBM3", "TPU v5 lite", "TPU v4"


def gpus(processes, each, kind=H100):
    return [
        SimpleNamespace(platform="gpu", device_kind=kind, process_index=p, coords=None)
        for p in range(processes)
        for _ in range(each)
    ]


def tpus(shape, slices=1, kind=V5E, order=None):
    at = [(s, c) for s in range(slices) for c in np.ndindex(*shape)]
    at = at if order is None else [at[i] for i in order]
    return [
        SimpleNamespace(
            platform="tpu",
            device_kind=kind,
            process_index=0,
            slice_index=s,
            coords=tuple(int(x) for x in (*c, 0, 0)[:3]),
            core_on_chip=0,
        )
        for s, c in at
    ]


def test_the_emulated_devices_of_this_process():
    cluster = live()
    assert cluster.devices == len(jax.devices()) == 8 and cluster.device.platform == "cpu"
    assert make_mesh(cluster, {"data": 4, "model": 2}).devices.shape == (4, 2)


def test_cpu_devices_of_several_processes_in_any_order():
    devices = [SimpleNamespace(platform="cpu", device_kind="cpu", process_index=p) for p in (1, 0, 1, 0)]
    cluster = live(devices)
    assert [t.size for t in cluster.tiers] == [2, 4] and cluster.tier_of([[0, 2], [1, 3], [0, 1]]).tolist() == [0, 0, 1]


def test_gpus_with_one_process_a_node():
    cluster = live(gpus(4, 8))
    assert [(t.name, t.size) for t in cluster.tiers] == [("nvlink", 8), ("rail", 32)]
    assert cluster.device.name == "H100-SXM5-80GB" and any("catalogue" in n for n in cluster.notes)


def test_gpus_with_one_process_each_and_host_names():
    hosts = ["a", "b"] * 4
    cluster = live(gpus(8, 1), hosts)
    assert [t.size for t in cluster.tiers] == [4, 8] and int(cluster.tier_of([0, 2, 4, 6])) == 0


def test_gpus_with_one_process_each_under_slurm(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    cluster = live(gpus(8, 1))
    assert [t.size for t in cluster.tiers] == [4, 8] and any("SLURM" in n for n in cluster.notes)


def test_gpus_with_one_process_each_and_nobody_to_ask(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    cluster = live(gpus(16, 1))
    assert [t.size for t in cluster.tiers] == [8, 16] and any("no host names" in n for n in cluster.notes)


def test_a_tpu_slice_whose_devices_come_in_another_order():
    shuffled = [int(i) for i in np.random.default_rng(0).permutation(16)]
    cluster = live(tpus((4, 4), order=shuffled))
    assert cluster.tiers[0].shape == (4, 4) and cluster.slots.tolist() == shuffled
    straight = live(tpus((4, 4)))
    assert dataclasses.replace(cluster, order=None) == straight and straight.order is None


def test_several_slices_and_a_three_dimensional_torus():
    assert [(t.size, t.shape) for t in live(tpus((4, 4), 2)).tiers] == [(16, (4, 4)), (32, ())]
    assert live(tpus((4, 4, 8), kind=V4)).tiers[0].wrap == (True, True, True)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (gpus(1, 2) + gpus(1, 2, "NVIDIA A100-SXM4-80GB"), "2 kinds"),
        (gpus(1, 2, "NVIDIA Riva 128"), "no 'NVIDIA Riva 128'"),
        (tpus((4, 4))[:-1], "do not fill"),
        (tpus((2, 2), kind="TPU v99"), "no 'TPU v99'"),
        (
            [SimpleNamespace(platform="cpu", device_kind="cpu", process_index=p) for p in (0, 0, 1)],
            "processes with [1, 2]",
        ),
    ],
)
def test_devices_that_are_no_known_machine(devices, said):
    with pytest.raises(ClusterError) as e:
        live(devices)
    assert said in str(e.value) and e.value.hint
