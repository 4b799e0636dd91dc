"""`lensjax launch`: labels, exit statuses, signals, and the end of all when one dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from lensjax import cli
from lensjax.commands import launch

SCRIPT = """
import os, signal, sys, time
rank = int(os.environ["LENSJAX_PROCESS"])
what = sys.argv[1] if len(sys.argv) > 1 else ""
print("hello", rank, os.environ.get("XLA_FLAGS"), sys.argv[1:])
print("[Gloo] Rank is connected")
print("2 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7")
print("to stderr", file=sys.stderr)
def all_said_hello():
    open(f"{__file__}.{rank}", "w").close()
    while not all(os.path.exists(f"{__file__}.{r}") for r in range(3)):
        time.sleep(0.02)
if what:
    all_said_hello()
if what == "die" and rank == 1:
    sys.exit(7)
if what == "signal" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (print("told", rank), sys.exit(3)))
    print("ready")
if what:
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*arguments, json_too=False, grace=0.5):
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        command = [sys.executable, "-c", "import sys; from lensjax import cli; from lensjax.commands import launch; "]
        command[-1] += f"launch.GRACE = {grace}; sys.exit(cli.main(sys.argv[1:]))"
        options = ["launch", *(["--json"] if json_too else []), "--processes", "3", "--devices", "4", str(script)]
        return subprocess.Popen(
            [*command, *options, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return run


def test_every_line_is_labelled_and_the_processes_have_their_devices(start):
    worker = start()
    out, err = worker.communicate(timeout=60)
    lines = sorted(out.splitlines())
    assert worker.returncode == 0, err
    assert lines == [f"[{r}] hello {r} --xla_force_host_platform_device_count=4 []" for r in range(3)]
    assert sorted(err.splitlines()) == [f"[{r}] to stderr" for r in range(3)]


@pytest.mark.few(1)
@pytest.mark.parametrize("how, status", [("die", 7), ("signal", 137)])
def test_one_that_dies_ends_all_with_its_status(start, how, status):
    worker = start(how)
    out, _ = worker.communicate(timeout=60)
    assert worker.returncode == status and f"process 1 ended with status {status}" in out


def test_signals_are_passed_on(start):
    worker = start("wait", grace=30.0)
    ready = 0
    while ready < 3:
        ready += "ready" in worker.stdout.readline()
    worker.send_signal(signal.SIGTERM)
    out, _ = worker.communicate(timeout=60)
    assert worker.returncode == 3 and {f"[{r}] told {r}" for r in range(3)} <= set(out.splitlines())


def test_json_is_one_object(start):
    worker = start("die", json_too=True)
    out, err = worker.communicate(timeout=60)
    found = json.loads(out)
    assert found["status"] == 7 and found["processes"][1] == {"process": 1, "status": 7} and "[0] hello 0" in err


def test_the_names_are_those_that_connect_reads():
    from lensjax.execute import processes

    assert (launch._COORDINATOR, launch._COUNT, launch._RANK) == (
        processes.COORDINATOR, processes.COUNT, processes.RANK,
    )  # fmt: skip


def test_a_wrong_command_line(tmp_path, capsys):
    from lensjax.cli import main

    assert main(["launch", "--processes", "2", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["launch", "--processes", "0", __file__]) == 2


def test_a_reader_that_leaves_stops_nothing(tmp_path):
    """`lensjax launch ... | head -1`: the processes end, though more is written than a pipe holds."""
    script = tmp_path / "flood.py"
    script.write_text("for i in range(20000): print('line', i)\n")
    command = [sys.executable, "-m", "lensjax.cli", "launch", "--processes", "2", str(script)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker.stdout.readline()
    worker.stdout.close()
    assert worker.wait(timeout=30) == 0
    assert worker.stderr.read() == ""


def test_the_third_signal_ends_processes_that_heed_none(tmp_path):
    script = tmp_path / "deaf.py"
    script.write_text(
        "import signal, time\nfor s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
        "print('up')\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "lensjax.cli", "launch", "--processes", "1", str(script)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "[0] up\n"
    for _ in range(launch.PATIENCE):
        assert worker.poll() is None
        worker.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert worker.wait(timeout=20) == 128 + signal.SIGKILL


def test_a_termination_that_is_not_heeded_ends_processes_after_a_while(tmp_path):
    script = tmp_path / "deaf.py"
    script.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(60)\n"
    )
    patched = "import sys; from lensjax import cli; from lensjax.commands import launch; launch.STOP = 1.0; "
    command = [sys.executable, "-c", patched + "sys.exit(cli.main(sys.argv[1:]))", "launch", "--processes", "1"]
    worker = subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "[0] up\n"
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=20) == 128 + signal.SIGKILL


def test_json_after_the_script_is_the_scripts(tmp_path):
    script = tmp_path / "args.py"
    script.write_text("import sys; print(sys.argv[1:])\n")
    command = [sys.executable, "-m", "lensjax", "launch", "--processes", "1", str(script), "--json"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "[0] ['--json']\n"


@pytest.mark.parametrize("port", ["-4", "0", "65536"])
def test_a_port_that_cannot_be(capsys, port):
    assert cli.main(["launch", "--processes", "1", "--port", port, __file__]) == 2
    assert f"--port {port}" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "", "::1"])
def test_a_port_in_use_is_said_before_anything_starts(tmp_path, capsys, host):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('started')")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        try:
            s.bind((host, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        s.listen()
        port = s.getsockname()[1]
        assert cli.main(["launch", "--processes", "2", "--port", str(port), str(script)]) == 2
    said = capsys.readouterr().err
    assert f"--port {port}: it is in use on this machine" in said and "leave --port out" in said
    assert "started" not in said and "Traceback" not in said


def test_a_port_that_was_just_left_is_free():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as JAX's coordinator does
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0] as end:
            end.close()  # this side closes first, and waits for stragglers
    launch._check_port(port)
