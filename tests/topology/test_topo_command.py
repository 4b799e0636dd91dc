"""`lensjax topo` as a user runs it."""

import json
from pathlib import Path

import pytest

from lensjax.cli import main
from lensjax.topology.cluster import Cluster

TEXTS = Path(__file__).parent / "texts"


def run(capsys, *argv):
    status = main(["topo", *map(str, argv)])
    out, err = capsys.readouterr()
    return status, out, err


def run_json(capsys, *argv):
    status, out, _ = run(capsys, *argv, "--json")
    return status, json.loads(out)


def test_json_keeps_its_promised_keys(capsys):
    status, data = run_json(capsys, "dgx-h100:32")
    assert status == 0 and data["schema"] == 1 and data["devices"] == 256
    assert [(t["name"], t["size"], t["bandwidth"], t["latency"]) for t in data["tiers"]] == [
        ("nvlink", 8, 450e9, 1.9e-6),
        ("rail", 256, 50e9, 4e-6),
    ]
    assert Cluster.from_dict(data["cluster"]) == Cluster.parse("dgx-h100:32")
    assert data["mesh"]["axes"] == {"data": 32, "model": 8} and data["mesh"]["seconds"] is None


def test_a_mesh_with_traffic(capsys):
    status, data = run_json(capsys, "dgx-h100:4", "--mesh", "model=8,data=-1", "--traffic", "model=9e9,data=1e9")
    mesh = data["mesh"]
    assert (
        status == 0
        and mesh["axes"] == {"model": 8, "data": 4}
        and mesh["tiers"] == {"model": ["nvlink"], "data": ["rail"]}
    )
    assert mesh["seconds"] > 9e9 / 450e9 + 1e9 / 50e9 and mesh["tier_bytes"]["rail"] == 1e9  # no link gives all it has


def test_the_terminal_shows_tiers_tree_matrix_and_mesh(capsys):
    status, out, _ = run(capsys, "cpu:2x4")
    assert status == 0
    for part in ("tiers of links", "process", "host", "2 x process of 4", "between devices", "a mesh data=2 x model=4"):
        assert part in out


def test_without_a_spec_it_is_the_machine_at_hand(capsys):
    status, data = run_json(capsys)
    assert status == 0 and data["devices"] == 8 and data["device"] == "cpu"


@pytest.mark.parametrize("spec", ["dgx-h100:2048", "tpu-v5p:4x4x8", "gb200:2", "mi300x", "tpu-v5e:1", "cpu:1"])
def test_a_picture_of_every_kind(capsys, tmp_path, spec):
    from matplotlib.image import imread

    path = tmp_path / "topo.png"
    status, _, _ = run(capsys, spec, "--png", path)
    image = imread(path)
    assert status == 0 and image.shape[0] > 300 and image.shape[1] > 600
    assert image[:, :, :3].std() > 0.02  # something is drawn


def test_saving_and_reading_back(capsys, tmp_path):
    for name in ("a.yaml", "a.json"):
        run(capsys, "p4d:2", "--save", tmp_path / name)
        assert run_json(capsys, tmp_path / name)[1]["cluster"] == Cluster.parse("p4d:2").to_dict()


def test_the_catalogue_is_listed(capsys):
    assert "dgx-h100" in run(capsys, "--list")[1]
    names = {m["name"] for m in run_json(capsys, "--list")[1]["machines"]}
    assert {"p5", "tpu-v6e", "hbm2e-nvswitch"} <= names


def test_reading_what_tools_print(capsys):
    assert run_json(capsys, "--read", "nvidia-smi", TEXTS / "smi_h100_535.txt", "--nodes", 4)[1]["devices"] == 32
    assert run_json(capsys, "--read", "nccl-xml", TEXTS / "nccl_dgx1_cube.xml")[1]["breaking"]
    assert (
        run_json(capsys, "--read", "ibnetdiscover", TEXTS / "ib_one_leaf_edr.txt", "--machine", "dgx1-v100")[1][
            "devices"
        ]
        == 24
    )
    _, out, _ = run(capsys, "--read", "nvidia-smi", TEXTS / "smi_v100_440.txt")
    assert "do not fit a tree" in out and "note:" in out


def test_a_damaged_cluster_says_what_is_idle(capsys, tmp_path):
    path = tmp_path / "damaged.yaml"
    path.write_text(Cluster.parse("dgx-h100:4").to_yaml() + "missing: [13]\n")
    status, out, _ = run(capsys, path)
    assert status == 0 and "7 of 8 devices" in out and "7 devices stay idle" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["dgx-h100:0"],
        ["nosuch"],
        ["cpu:8", "--mesh", "data"],
        ["cpu:8", "--mesh", "data=3x"],
        ["cpu:8", "--mesh", "a=64"],
        ["cpu:8", "--mesh", "a=8", "--traffic", "b=1"],
        ["--read", "lspci", "x"],
        ["--read", "nvidia-smi", "/nosuch"],
        ["--read", "slurm", "/dev/null"],
        ["cpu:8", "--read", "nvidia-smi", "x"],
        ["--nodes"],
    ],
)
def test_errors_are_json_too_with_status_two(capsys, argv):
    status, data = run_json(capsys, *argv)
    assert status == 2 and data["error"]["message"] and data["error"]["code"] in ("cluster", "usage")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["dgx-h100:2", "--mesh", "data=2,data=8"], "'data' stands twice"),
        (["dgx-h100:2", "--mesh", "data=2.5"], "data=32,model=8"),
        (["dgx-h100:2", "--traffic", "data=1GB"], "data=1e9,model=9e9"),
        (["dgx-h100:2", "--png", "/nowhere/x.png"], "no folder '/nowhere'"),
        (["dgx-h100:2", "--png", "/proc/x.png"], "/proc/x.png cannot be written: no such file or directory"),
        (["dgx-h100:2", "--png", "x.xyz"], "ends in .png"),
        (["dgx-h100:2", "--save", "/nowhere/x.yaml"], "no folder '/nowhere'"),
        (["dgx-h100:2", "--save", "x.toml"], "ends in .yaml"),
        (["dgx-h100:2", "--nodes", "3"], "--nodes is for"),
        (["dgx-h100:2", "--machine", "p5"], "--machine is for"),
        (["--read", "nvidia-smi", TEXTS / "smi_h100_535.txt", "--nodes", "0"], "--nodes 0"),
        (["dgx-h100:9999999999"], "too large"),
    ],
)
def test_a_wrong_call_is_a_sentence_not_a_traceback(capsys, argv, said):
    status, _, err = run(capsys, *argv)
    assert status == 2 and said in err and "Traceback" not in err


def test_a_machine_names_the_device_of_a_text(capsys):
    status, data = run_json(capsys, "--read", "nvidia-smi", TEXTS / "smi_h100_535.txt", "--machine", "dgx-h200")
    assert status == 0 and data["device"] == "H200-SXM5-141GB"
