"""The probe: its fit on clusters whose numbers are known, and the whole command on this machine's emulated devices."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from lensjax import cli
from lensjax._errors import ClusterError
from lensjax.topology.catalogue import device
from lensjax.topology.cluster import Cluster, Tier
from lensjax.topology.collectives import collective_time
from lensjax.topology.probe import OPS, Level, Point, levels, measure, sweep
from lensjax.topology.probe_fit import fit_cluster
from lensjax.topology.probe_plot import plot_png, terminal_plot

LEVELS = [Level("process", 4, np.arange(8).reshape(2, 4)), Level("network", 8, np.arange(8).reshape(2, 4).T)]
TRUE = Cluster("true", device("cpu"), (Tier("process", 4, 3e9, 2e-4), Tier("network", 8, 3e6, 3e-4, nic_sharing=4)))


def points_of(cluster, noise=0.0, wild=0, seed=0):
    rng = np.random.default_rng(seed)
    points = []
    for level in LEVELS:
        for op in OPS:
            for size in 2.0 ** np.arange(10, 22):
                seconds = collective_time(cluster, op, level.groups, size) * np.exp(noise * rng.standard_normal())
                points.append(Point(level.name, op, level.groups.shape[1], size, seconds))
        if level.name == "network":
            for size in 2.0 ** np.arange(10, 22):
                seconds = collective_time(cluster, "all_reduce", level.groups[:1], size)
                points.append(Point(level.name, "all_reduce", 2, size, seconds, alone=True))
    for i in rng.choice(len(points), wild, replace=False):
        points[i] = Point(*list(vars(points[i]).values())[:4], points[i].seconds * 50, points[i].alone)
    return points


@pytest.mark.parametrize(("noise", "wild", "rel"), [(0.0, 0, 0.01), (0.1, 0, 0.08), (0.1, 8, 0.12)])
def test_the_fit_finds_bandwidth_latency_and_who_shares_the_nic(noise, wild, rel):
    found, fits = fit_cluster(device("cpu"), LEVELS, points_of(TRUE, noise, wild))
    for mine, true in zip(found.tiers, TRUE.tiers):
        assert mine.bandwidth == pytest.approx(true.bandwidth, rel=rel)
        assert mine.latency == pytest.approx(true.latency, rel=2 * rel)
        assert mine.nic_sharing == true.nic_sharing
    assert all(f.median_error <= noise + 0.01 for f in fits)


def test_every_probed_number_says_where_it_is_from():
    found, _ = fit_cluster(device("cpu"), LEVELS, points_of(TRUE))
    assert all("lensjax probe" in t.sources[name] for t in found.tiers for name in ("bandwidth", "latency"))


def test_too_few_points_are_refused():
    with pytest.raises(ClusterError, match="too few"):
        fit_cluster(device("cpu"), LEVELS, points_of(TRUE)[:2])


def test_the_devices_of_one_process_are_one_tier():
    ordered, found = levels(jax.devices())
    assert [d.id for d in ordered] == [d.id for d in jax.devices()]
    assert [(level.name, level.size) for level in found] == [("process", 8)]
    assert found[0].groups.tolist() == [list(range(8))]


def test_one_device_has_no_links():
    with pytest.raises(ClusterError, match="no links"):
        levels(jax.devices()[:1])


@pytest.mark.parametrize("op", OPS)
def test_every_collective_can_be_timed(op):
    groups = np.arange(8).reshape(2, 4)
    assert 0 < measure(jax.devices(), groups, op, 1 << 12, budget=0.05) < 10


def test_a_sweep_stops_at_calls_that_are_too_slow():
    _, found = levels(jax.devices())
    points = list(sweep(jax.devices(), found, [1 << 10, 1 << 12], ops=("all_reduce",), budget=1e-9))
    assert [p.bytes for p in points] == [1 << 10]


def test_plots_show_every_tier(tmp_path):
    points = points_of(TRUE)
    text = terminal_plot(TRUE, LEVELS, points)
    assert "o process" in text and "+ network" in text and "." in text
    plot_png(TRUE, LEVELS, points, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_command_writes_a_cluster_that_can_be_used(tmp_path):
    """In a process of its own: it makes its devices itself."""
    command = [sys.executable, "-m", "lensjax.cli", "probe", "--emulate", "4", "--largest", "64KiB", "--budget", "0.1"]
    command += ["--out", str(tmp_path / "c.yaml"), "--png", str(tmp_path / "c.png"), "--json"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["devices"] == 4
    assert [t["size"] for t in found["tiers"]] == [4]
    cluster = Cluster.parse(tmp_path / "c.yaml")
    assert cluster.tiers[0].bandwidth == pytest.approx(found["tiers"][0]["bandwidth"])
    assert collective_time(cluster, "all_reduce", np.arange(4), 1e6) > 0
    assert (tmp_path / "c.png").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "c.txt"], ".yaml or .yml or .json"),
        (["--out", "/nowhere/at/all/c.yaml"], "no folder"),
        (["--processes", "2"], "--coordinator"),
        (["--emulate", "0"], "--emulate 0"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_measured(arguments, text, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert cli.main(["probe", *arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert text in f"{error['message']}: {error['hint']}"


@pytest.mark.slow
def test_two_processes_on_one_host(tmp_path):
    """Each process runs the command; process 0 writes, the other says who it is."""
    command = [sys.executable, "-m", "lensjax.cli", "probe", "--emulate", "2", "--largest", "64KiB", "--json"]
    command += ["--out", str(tmp_path / "c.json"), "--coordinator", "127.0.0.1:31877", "--processes", "2"]
    runs = [
        subprocess.Popen([*command, "--process", str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    outputs = [json.loads(run.communicate(timeout=300)[0]) for run in runs]
    assert [(t["name"], t["size"]) for t in outputs[0]["tiers"]] == [("process", 2), ("host", 4)]
    assert outputs[1] == {"schema": 1, "process": 1}
    assert Cluster.parse(tmp_path / "c.json").devices == 4
