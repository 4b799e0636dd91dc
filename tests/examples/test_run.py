"""The examples run from end to end as a newcomer runs them: their own process, their own emulated devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path, script, *args):
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "examples" / script), *args]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), ("--plan", "fsdp"), ("--processes", "2")])
def test_gpt_trains_equal_to_one_device(tmp_path, extra):
    out = run(tmp_path, "train_gpt.py", "--steps", "5", "--check", *extra)
    assert "equal to one device" in out and "NOT" not in out
    assert "step 5/5" in out and "tokens/s" in out
    assert (tmp_path / "out" / "train_gpt.png").stat().st_size > 5000
    if "--processes" in extra:
        assert "Gloo" not in out


@pytest.mark.slow
def test_vit_trains_equal_to_one_device(tmp_path):
    pytest.importorskip("sklearn")
    out = run(tmp_path, "train_vit_digits.py", "--steps", "20", "--check")
    assert "equal to one device" in out and "NOT" not in out


@pytest.mark.slow
def test_an_8b_model_is_planned_for_256_gpus(tmp_path):
    out = run(tmp_path, "plan_only.py")
    assert "dgx-h100:32" in out
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["schema"] == 1
