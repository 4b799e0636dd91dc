"""`lensjax bench`: a real measurement of a tiny step, resumed and crashed; and what the rows are made into."""

import contextlib
import csv
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest

from lensjax._errors import UsageError
from lensjax.cli import main
from lensjax.commands import bench, bench_rows

TARGET = """
import os, signal
import jax, jax.numpy as jnp, numpy as np

def step(p, x):
    def check(v):
        flag = os.environ.get("CRASH_ONCE")
        if flag and not os.path.exists(flag):
            open(flag, "w").close()
            os._exit(3) if flag.endswith("exit") else os.kill(os.getpid(), signal.SIGKILL)
        return v
    loss, grads = jax.value_and_grad(lambda p: ((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2).mean())(p)
    if "CRASH_ONCE" in os.environ:
        loss = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), loss)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), loss

def target():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return step, ({"w": f(16, 64), "v": f(64, 16)}, f(16, 16))
"""


def run(tmp_path, *arguments, **environment):
    (tmp_path / "train.py").write_text(TARGET)
    command = [sys.executable, "-m", "lensjax.cli", "bench", f"{tmp_path}/train.py:target", "--devices", "8", "--json"]
    done = subprocess.run(
        [*command, "--visits", "2", *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_a_measurement_and_its_resumption(tmp_path):
    keep, png, table = tmp_path / "journal", tmp_path / "bench.png", tmp_path / "rows.csv"
    more = ("--steps", "4", "--resume", str(keep))
    status, found, err = run(tmp_path, "--plans", "dp,fsdp,ep=8", *more)
    assert status == 0, err
    dp, fsdp, ep = found["rows"]
    assert dp["result"] == fsdp["result"] == "measured" and ep["result"] == "refused" and "no experts" in ep["reason"]
    assert dp["steps"] == 4 and dp["measured_s"] > 0 and dp["predicted_s"] > 0 and dp["compile_s"] > 0
    assert dp["peak_bytes"] is None and dp["compiled_peak_bytes"] > 0  # emulated devices do not tell
    assert dp["tiers"] and dp["batch"] == 16 and found["devices"] == 8
    # Nothing is measured again: the same numbers, one more plan, and the files.
    status, again, err = run(tmp_path, "--plans", "dp,fsdp,zero1", *more, "--png", str(png), "--rows", str(table))
    assert status == 0, err
    assert again["rows"][:2] == [dp, fsdp] and again["rows"][2]["result"] == "measured"
    assert png.read_bytes()[:4] == b"\x89PNG"
    with open(table, encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    assert [r["dp"] for r in rows] == ["8", "", "8"] and rows[1]["fsdp"] == "8" and float(rows[0]["step_time_s"]) > 0
    status, wrong, _ = run(tmp_path, "--steps", "9", "--resume", str(keep))
    assert status == 2 and "another run: steps was 4, and is now 9" in wrong["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "result", "said"),
    [("kill", "out of memory", "signal 9"), ("exit", "crashed", "status 3")],  # SIGKILL is what the kernel sends
)
def test_a_plan_that_ends_the_process_is_a_row_and_the_others_go_on(tmp_path, flag, result, said):
    status, found, err = run(tmp_path, "--plans", "dp,fsdp", "--steps", "2", CRASH_ONCE=str(tmp_path / flag))
    assert status == 0, err
    assert [r["result"] for r in found["rows"]] == [result, "measured"]
    assert f"died with {said}" in found["rows"][0]["reason"]


@pytest.mark.parametrize("name", ["bench.foo", "bench", "bench.jpg/"])
def test_a_picture_that_cannot_be_drawn_is_told_before_measuring(tmp_path, name):
    for command, option in (("bench", "--png"), ("lint", "--picture"), ("verify", "--picture")):
        more = ("plan.json", "llama3-tiny", "--cluster", "cpu:8") if command == "verify" else ("none.py:target",)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main([command, *more, option, f"{tmp_path}/{name}", "--json"]) == 2
        error = json.loads(out.getvalue())["error"]
        assert "cannot be written as a picture" in error["message"] and ".png or .svg or .pdf" in error["hint"]


# ---- what is made of it ---------------------------------------------------------------------------------------------


def events(plan, seconds, predicted, **more):
    about = {"plan": plan, "chosen": plan, "predicted_s": predicted, "mesh": {"dp": 8}, "batch": 16, **more}
    return [
        {"event": "plan", **about},
        {"event": "compiled", "plan": plan, "compile_s": 1.0, "lower_s": 0.5, "compiled_peak_bytes": 10, "tiers": {}},
        *({"event": "visit", "plan": plan, "visit": i, "seconds": x, "peak_bytes": None} for i, x in enumerate(seconds))
    ]  # fmt: skip


def test_medians_over_all_visits():
    (row,) = bench_rows.rows(events("dp", [[3.0, 1.0], [2.0, 9.0, 4.0]], 2.0), ["dp"])
    assert row["measured_s"] == statistics.median([3, 1, 2, 9, 4]) and row["steps"] == 5
    low, high = row["quartiles_s"]
    assert low < row["measured_s"] < high


def test_order_and_regret():
    found = bench_rows.rows(
        events("a", [[1.0]], 3.0) + events("b", [[2.0]], 1.0) + events("c", [[4.0]], 5.0)
        + [{"event": "failed", "plan": "d", "reason": "RESOURCE_EXHAUSTED", "out_of_memory": True}],
        ["a", "b", "c", "d", "e"],
    )  # fmt: skip
    total = bench_rows.summary(found)
    assert total["pairs"] == 3 and total["order"] == pytest.approx(2 / 3)
    assert total["best"] == "a" and total["predicted_best"] == "b" and total["regret"] == pytest.approx(1.0)
    assert total["out_of_memory"] == ["d"] and [r["result"] for r in found[3:]] == ["out of memory", "unfinished"]


@pytest.mark.parametrize("tiers", [1, 2])
def test_the_table_names_every_plan_and_every_number_in_eighty_columns(tiers):
    from rich.console import Console

    names = ["searched fsdp=4,cp=2", "dp=4,tp=2"]
    made = [e for n in names for e in events(n, [[1.0, 1.5, 2.0]], 0.3126, predicted_peak_bytes=56000000)]
    for e in made:
        e.update(tiers={f"tier{i}": 21410000 for i in range(tiers)} if e["event"] == "compiled" else {})
    found = bench_rows.rows(made, names)
    console = Console(width=80, file=io.StringIO())
    console.print(bench_rows.table(found, "cpu:8"))
    text = console.file.getvalue()
    for n in names:
        assert all(part in text for part in re.findall(r"\w+=\d", n)), text
    for number in ("1.50 s ±33%", "312.6 ms", "53.41 MiB", "20.42 MiB", "1.00 s"):
        assert text.count(number) >= 2, (number, text)


def test_every_axis_of_the_mesh_is_in_the_rows_for_calibration(tmp_path):
    mesh = {"zero1": 2, "fsdp": 3, "tp": 5, "cp": 7, "ep": 11}
    about = {"year": 2026, "stack": "jax", "target": "x", "accelerator": "cpu", "devices": 8, "devices_per_node": 8}
    found = bench_rows.rows([{**e, "mesh": mesh} for e in events("p", [[1.0]], 1.0)], ["p"])
    bench_rows.write_rows(found, about, tmp_path / "rows.csv")
    (row,) = csv.DictReader(open(tmp_path / "rows.csv", newline=""))
    assert [row[a] for a in ("dp", "fsdp", "tp", "cp", "ep")] == ["2", "3", "5", "7", "11"]


def test_an_interrupt_is_a_line_and_a_status(monkeypatch, capsys, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "train.py").write_text(TARGET)
    monkeypatch.setattr(bench, "_measure", interrupted)
    assert main(["bench", f"{tmp_path}/train.py:target"]) == 130
    assert capsys.readouterr().err == "lensjax: interrupted\n"
    assert main(["bench", f"{tmp_path}/train.py:target", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "interrupted"


def test_the_same_plan_under_two_names_is_no_pair():
    best = [{**e, "plan": "best"} for e in events("dp", [[1.1]], 1.0)]
    found = bench_rows.rows(best + events("dp", [[1.0]], 1.0), ["best", "dp"])
    assert bench_rows.summary(found)["order"] is None


def test_plans_on_the_command_line():
    assert bench.split_plans(["best,fsdp,tp=4"]) == ["best", "fsdp", "tp=4"]
    assert bench.split_plans(["best;dp=2,fsdp=4", "dp"]) == ["best", "dp=2,fsdp=4", "dp"]
    with pytest.raises(UsageError, match="a name is missing"):
        bench.split_plans(["a,,b"])


def test_a_journal_whose_last_line_was_cut_off(tmp_path):
    path = tmp_path / "journal"
    path.write_text('{"event": "visit", "plan": "dp"}\n{"event": "vis')
    assert len(bench.read(path)) == 1


def test_a_wrong_command_line(tmp_path, capsys):
    assert main(["bench", str(tmp_path / "none.py:target")]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("held", [b"\xff\xfe\x00not text", b"[1]\n", b"{}\n", b'{"event": "visit", "plan": "dp"}\n'])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path, capsys, held):
    script, journal = tmp_path / "step.py", tmp_path / "journal"
    script.write_text("")
    journal.write_bytes(held)
    assert main(["bench", f"{script}:target", "--resume", str(journal)]) == 2
    assert "is no journal of lensjax bench" in capsys.readouterr().err
    assert journal.read_bytes() == held


def test_no_devices(tmp_path, capsys):
    assert main(["bench", f"{tmp_path}/step.py:target", "--devices", "0"]) == 2
    assert "--devices 0" in capsys.readouterr().err


def test_termination_ends_what_measures(tmp_path):
    script = tmp_path / "step.py"
    script.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    bench = subprocess.Popen([sys.executable, "-m", "lensjax.cli", "bench", f"{script}:target"])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert bench.poll() is None
        time.sleep(0.02)
    bench.terminate()
    assert bench.wait(timeout=20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
