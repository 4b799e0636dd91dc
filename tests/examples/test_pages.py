"""The two training scripts: ten lines between them, shown in the docs as they are; and both run and resume."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pages():
    spec = importlib.util.spec_from_file_location("example_pages", ROOT / "examples" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_at_most_ten_lines_differ_and_the_docs_show_them():
    lines = pages().difference()
    changed = [x for x in lines if x[:1] in ("+", "-") and not x.startswith(("+++", "---"))]
    assert 0 < len(changed) <= 10
    assert "\n".join(["```diff", *lines, "```"]) in (ROOT / "docs" / "training_script.md").read_text()


def test_the_page_is_of_the_examples_that_there_are():
    page = (ROOT / "docs" / "gallery.md").read_text()
    names = {p.stem for p in (ROOT / "examples" / "gallery").glob("*.py")} - {"demo"}
    shown = set(re.findall(r"^## (\w+)$", page, re.M))
    assert shown and shown <= names == set(pages().GALLERY)


def run(*command, devices, cwd=None):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    done = subprocess.run([sys.executable, *map(str, command)], env=env, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_both_scripts_train_and_resume_alike(tmp_path):
    """The one with lensjax goes on from the other's checkpoint, on eight devices, with the same losses."""
    shown = {}
    for name, devices in (("before", 1), ("after", 8)):
        script = ROOT / "examples" / f"script_{name}.py"
        run(script, "--folder", name, "--steps", 50, devices=devices, cwd=tmp_path)
        shown[name] = run(script, "--folder", name, "--steps", 100, devices=devices, cwd=tmp_path)
        assert "resumed at step 50" in shown[name]
    loss = {name: float(re.search(r"step 100  loss ([\d.]+)", text)[1]) for name, text in shown.items()}
    assert loss["after"] == pytest.approx(loss["before"], abs=2e-4)
    moved = run(ROOT / "examples" / "script_after.py", "--folder", tmp_path / "before", "--steps", 150, devices=8)
    assert "resumed at step 100" in moved


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe", "lora", "dlrm", "unet", "keras_step"])
def test_the_gallery_runs(name):
    if name == "keras_step":
        pytest.importorskip("keras")
    out = run(ROOT / "examples" / "gallery" / f"{name}.py", "--steps", 5, devices=8)
    assert re.search(r"loss [\d.]+ -> [\d.]+ in 5 steps", out)


@pytest.mark.slow
def test_the_gallery_runs_in_two_processes(tmp_path):
    example = ROOT / "examples" / "gallery" / "two_processes.py"
    out = run(
        "-m", "lensjax.cli", "launch", "--processes", 2, "--devices", 4, example, "--steps", 10, "--folder", tmp_path,
        devices=1,
    )  # fmt: skip
    held, back = re.search(r"held out ([\d.]+)", out)[1], re.search(r"restored: ([\d.]+)", out)[1]
    assert "[0] 2 processes, 8 devices" in out and held == back
