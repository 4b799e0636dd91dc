"""`lensjax plan`: one JSON object and nothing else with --json; a table for people; errors with exit status 2."""

import json
import textwrap

import pytest

from lensjax import Plan
from lensjax.cli import main

TINY = ["plan", "llama3-tiny", "--cluster", "cpu:2x4", "--batch", "16", "--seq", "32"]


def run(capsys, *argv):
    status = main(list(argv))
    return status, capsys.readouterr()


def test_json_has_the_stable_keys(capsys, tmp_path):
    out = tmp_path / "plan.json"
    status, io = run(capsys, *TINY, "--json", "--out", str(out))
    assert status == 0 and io.err == ""
    data = json.loads(io.out)
    assert data["schema"] == 1 and (data["gap"] is None or data["gap"] >= 0)
    assert set(data["predicted"]) == {"step_s", "peak_bytes", "tiers"}
    assert set(data["predicted"]["tiers"]) == {"process", "host"}
    assert set(data["seconds"]) == {"trace", "analysis", "search", "pipelines"}
    assert isinstance(data["pipelines"], list)
    names = [p["name"] for p in data["presets"]]
    assert {"dp", "zero1", "fsdp:again", "fsdp:once", "dp=2,fsdp:again=4"} <= set(names)
    assert Plan.load(out) == Plan.from_dict(data["plan"])
    assert sum(data["peak_by"].values()) == pytest.approx(data["predicted"]["peak_bytes"])
    assert {"parameter", "optimizer"} <= set(data["peak_by"])


@pytest.mark.slow
def test_the_choice_is_never_worse_than_a_preset_that_fits(capsys):
    _, io = run(capsys, *TINY, "--json")
    data = json.loads(io.out)
    assert data["predicted"]["step_s"] <= min(p["step_s"] for p in data["presets"] if p["fits"])
    every = [*data["presets"], *data["proposals"]]
    assert data["predicted"]["step_s"] == min(p["step_s"] for p in every if p["fits"])


def test_people_get_the_table(capsys):
    status, io = run(capsys, *TINY, "--search", "presets-only")
    assert status == 0
    words = " ".join(io.out.split())
    for word in ("exposed", "chosen over", "largest tensors", "seconds: trace", "fsdp:again"):
        assert word in words


def test_one_plan_says_what_holds_its_memory_and_draws_it(capsys, tmp_path):
    status, io = run(capsys, *TINY, "--plan", "fsdp", "--picture", str(tmp_path / "memory.png"))
    words = " ".join(io.out.split())
    assert status == 0 and "at the peak: " in words and "optimizer 2" in words
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    status, io = run(capsys, *TINY, "--plan", "fsdp", "--picture", str(tmp_path / "memory.txt"))
    assert status == 2 and "cannot be written as a picture" in io.err


def test_a_file_of_ones_own(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import jax, jax.numpy as jnp
        def step(params, x):
            return params - jax.grad(lambda p: (x @ p).mean())(params)
        def small():
            return step, (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32))
        def wrong():
            return step
        """)
    )
    status, io = run(capsys, "plan", f"{tmp_path}/mine.py:small", "--cluster", "dgx-h100:1", "--json")
    assert status == 0 and json.loads(io.out)["plan"]["mesh"]["axes"][0]["size"] == 8
    status, io = run(capsys, "plan", f"{tmp_path}/mine.py:wrong", "--cluster", "cpu:8", "--json")
    assert status == 2 and "expected (step, arguments)" in json.loads(io.out)["error"]["message"]
    status, io = run(capsys, "plan", f"{tmp_path}/mine.py:none", "--cluster", "cpu:8")
    assert status == 2 and "has no 'none'" in io.err and "small, step, wrong" in io.err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "argv, code, message",
    [
        (["plan", "llama3-tiny", "--cluster", "cpu:8"], "usage", "needs --batch"),
        (["plan", "none", "--cluster", "cpu:8", "--batch", "8", "--seq", "8"], "usage", "no built-in target 'none'"),
        (["plan", "none.py:f", "--cluster", "cpu:8"], "usage", "there is no file none.py"),
        (["plan", "none.py:f", "--cluster", "cpu:8", "--seq", "8"], "usage", "are for built-in models"),
        (["plan", "llama3-tiny"], "usage", "--cluster"),
        (["plan", "llama3-tiny", "--cluster", "cpu:8", "--batch", "0", "--seq", "8"], "usage", "not a whole number"),
        ([*TINY, "--memory", "1000"], "does_not_fit", "nothing fits 1000 B per device"),
        ([*TINY, "--plan", "zero9"], "plan", "is not a preset"),
        (["plan", "llama3-tiny", "--cluster", "moon:8", "--batch", "8", "--seq", "8"], "cluster", "moon"),
        (
            ["plan", "llama3-tiny", "--cluster", "cpu:8", "--batch", "12", "--seq", "8", "--plan", "dp"],
            "batch",
            "8 or 16",
        ),
    ],
)
def test_errors_are_json_with_status_2(capsys, argv, code, message):
    status, io = run(capsys, *argv, "--json")
    error = json.loads(io.out)["error"]
    assert status == 2 and error["code"] == code and message in error["message"] + error["hint"]
    assert set(error) == {"code", "message", "hint"} and "Traceback" not in io.err


def test_help_does_not_import_jax():
    import subprocess
    import sys

    code = "import sys; from lensjax.cli import main; main([]); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "plan" in done.stdout and "topo" in done.stdout


BROKEN = """
import jax, jax.numpy as jnp
SHAPES = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32))
def step(params, x):
    return params - jax.grad(lambda p: (x @ p).mean())(params)
def raising():
    return step, [][3]
def shapes():
    return step, SHAPES
def lax(params=1.0, x=2.0):
    return params, x
def leaving():
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    "text, name, message, hint",
    [
        ("def f(:\n", "f", "mine.py cannot be loaded: SyntaxError: invalid syntax", "mine.py:1"),
        ("import nothing_of_this_name\n", "f", "cannot be loaded: ModuleNotFoundError: No module", "mine.py:1 (import"),
        ("x = 1 / 0\n", "f", "mine.py cannot be loaded: ZeroDivisionError: division by zero", "mine.py:1 (x = 1"),
        (BROKEN, "raising", "mine.py:raising failed: IndexError: list index out of range", "(return step, [][3])"),
        (BROKEN, "leaving", "mine.py:leaving failed: SystemExit: 3", "(raise SystemExit(3))"),
        (BROKEN, "step", "mine.py:step takes arguments (params, x), as a step does; expected a function", "def NAME()"),
        (BROKEN, "lax", "gave a tuple of 2 (float, float); expected (step, arguments)", "def NAME()"),
        (BROKEN, "SHAPES", "gave a tuple of 2 (ShapeDtypeStruct, ShapeDtypeStruct)", "def NAME()"),
        (BROKEN, "shapes", "the step of", "(return params - jax.grad(lambda p: (x @ p).mean())(params))"),
    ],
)
def test_what_the_users_file_raises_is_told_with_its_line(capsys, tmp_path, text, name, message, hint):
    (tmp_path / "mine.py").write_text(text)
    argv = ["plan", f"{tmp_path}/mine.py:{name}", "--cluster", "cpu:8"]
    status, io = run(capsys, *argv, "--json")
    error = json.loads(io.out)["error"]
    assert status == 2 and io.err == ""
    assert message in error["message"] and hint in error["hint"]
    status, io = run(capsys, *argv)
    assert status == 2 and "Traceback" not in io.err and message in io.err


@pytest.mark.parametrize("out, why", [("", "it is a folder"), ("none/plan.json", "there is no folder")])
def test_a_file_that_cannot_be_written_is_told_before_planning(capsys, tmp_path, out, why):
    status, io = run(capsys, "plan", "no-such-model", "--cluster", "cpu:8", "--out", f"{tmp_path}/{out}", "--json")
    assert status == 2 and why in json.loads(io.out)["error"]["message"]


def test_the_hint_of_a_wrong_command_line_is_short(capsys):
    status, io = run(capsys, "plan", "llama3-tiny", "--json")
    error = json.loads(io.out)["error"]
    assert status == 2 and error["hint"] == "lensjax plan --help shows how it is called"


@pytest.mark.parametrize("memory", ["nan", "-1", "inf"])
def test_a_memory_that_is_no_number_of_bytes(capsys, memory):
    status, io = run(capsys, *TINY, f"--memory={memory}", "--json")
    assert status == 2 and "expected a positive number of bytes" in json.loads(io.out)["error"]["message"]


def test_a_cluster_of_too_many_factors_is_a_sentence(capsys):
    status, io = run(capsys, "topo", "cpu:2x4x2", "--json")
    assert status == 2 and "'cpu:2x4x2' has 3 factors" in json.loads(io.out)["error"]["message"]


def test_what_native_code_prints_is_not_in_the_json(capfd, tmp_path):
    """Solvers and compilers write to the file descriptor, not to `sys.stdout`."""
    (tmp_path / "loud.py").write_text(
        "import os, jax\n"
        "def target():\n"
        "    os.write(1, b'presolve: debug\\n'); print('hello')\n"
        "    shape = lambda *n: jax.ShapeDtypeStruct(n, 'float32')\n"
        "    return (lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)), (shape(4, 4), shape(8, 4))\n"
    )
    status = main(["plan", f"{tmp_path}/loud.py:target", "--cluster", "cpu:1", "--json"])
    io = capfd.readouterr()
    assert status == 0 and json.loads(io.out)["plan"]
    assert "presolve: debug" in io.err and "hello" in io.err
