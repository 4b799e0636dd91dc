"""Processes that do not agree: a clear error on every one of them within 30 s, and no hang.

Two processes run one program; what is wrong with one of them is the test's parameter. Real processes, real sockets.
"""

import re
import signal
import socket
import textwrap
import threading
import time

import pytest

from lensjax._errors import ProcessError
from lensjax.execute.processes import difference
from lensjax.execute.rendezvous import meet
from tests.execute import several

PROGRAM = textwrap.dedent("""
    import os, signal, subprocess, sys, time
    fault, rank = sys.argv[1], int(os.environ["LENSJAX_PROCESS"])

    def at(*faults, where=(0, 1)):
        # The last such moment of all processes is the one at which the fault is there.
        if fault in faults and rank in where:
            print("FAULT", time.monotonic(), flush=True)
            return True

    def pause(seconds):
        again = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", again], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.kill(os.getpid(), signal.SIGSTOP)
        print("RESUMED", time.monotonic(), flush=True)

    import lensjax
    from lensjax.execute import processes
    if fault == "release" and rank == 1:
        processes.__version__ = "0.0.7"
    if at("killed", where=[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    at("release", "killed", "killed after", "alone")
    lensjax.connect(timeout=12)
    import jax, jax.numpy as jnp, numpy as np

    def step(p, x):
        loss, grads = jax.value_and_grad(lambda p: ((x @ p) ** 2).mean())(p)
        return p - (0.1 if not (fault == "program" and rank) else 0.2) * grads, loss

    if at("killed after", where=[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    plan = "fsdp" if not (fault == "plan" and rank) else "dp"
    if fault == "file":
        lensjax.parallelize(step, plan="dp", cluster="cpu:4").plan_for  # nothing is planned here
        plan = f"{sys.argv[2]}.{rank}.json"
    train = lensjax.parallelize(step, plan=plan)
    rows = np.ones((4 if not (fault == "batch" and rank) else 3, 16), np.float32)
    at("plan", "program", "file")
    state = train.init(lambda: jnp.ones((16, 64)), batch=np.ones((8, 16), np.float32))
    if at("raises", "another hook", where=[1]):
        if fault == "another hook":
            sys.excepthook = lambda *_: print("my own report", flush=True)
        raise RuntimeError("the disk is full")
    at("batch")
    if at("exits", where=[1]):
        sys.exit(3)
    for i in range(3):
        if i == 1 and at("later size", "later type", where=[1]):
            rows = rows[:3] if fault == "later size" else rows.astype(np.int32)
        state, loss = train(state, train.from_local(rows))
        loss.block_until_ready()
        if i == 1 and fault == "paused" and at("paused", where=[int(sys.argv[2])]):
            pause(40)
        if i == 1 and fault == "all paused":
            pause(45)
    at("save")
    if fault == "save":
        train.save(sys.argv[2], state, 3 + rank)
    print("LOSS", float(loss), flush=True)
    if fault == "more to do" and rank == 0:
        time.sleep(25)
    if fault == "shut down":
        jax.distributed.shutdown()
        time.sleep(25)
""")


def run(fault, port, *more, only=None):
    return several.run(PROGRAM, fault, *more, processes=2, devices=2, port=port, only=only)


def moments(word, processes):
    return [float(line.split()[1]) for p in processes for line in p.text.splitlines() if line.startswith(word + " ")]


def in_time(processes, until=None):
    """Every one (or those in `until`) ended at most 30 s after the fault: a deadline, not a measurement."""
    fault = max(moments("FAULT", processes))
    late = [round(p.ended - fault, 1) for p in until or processes]
    print("seconds from the fault to the end:", late)
    assert max(late) <= 30, late


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["more to do", "shut down"])
def test_processes_that_agree(free_port, fault):
    """However much longer one of them has to do at the end."""
    first, second = run(fault, free_port)
    assert first.after("LOSS") == second.after("LOSS")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, words",
    [
        ("plan", "do not agree on the plan that was given: fsdp in process 0; dp in process 1"),
        ("program", "do not agree on the program of the step"),
        ("release", "do not agree on the lensjax: 0.1.0 in process 0; 0.0.7 in process 1"),
        ("batch", "do not agree on the shapes of its own part of the batch: [[4, 16]] in process 0; [[3, 16]]"),
        ("later size", "process 0 goes on with batches as before, and process 1 brings another: float32[3,16]"),
        ("later type", "process 0 goes on with batches as before, and process 1 brings another: int32[4,16]"),
    ],
)
def test_a_difference_is_an_error_on_every_process(free_port, fault, words):
    found = run(fault, free_port)
    for process in found:
        assert process.status == 1 and words in process.text and "LOSS" not in process.text, process.text[-3000:]
    in_time(found)


@pytest.mark.slow
def test_checkpoints_of_two_numbers(free_port, tmp_path):
    found = run("save", free_port, tmp_path)
    for process in found:
        assert "do not agree on the number of the checkpoint: 3 in process 0; 4 in process 1" in process.text
    in_time(found)


@pytest.mark.slow
def test_plan_files_that_differ(free_port, tmp_path):
    import lensjax
    from lensjax.plan.plan import Axis, MeshPlan, Plan, Rules

    for rank, name in enumerate(("one", "two")):
        rules = Rules(activations={"batch": ("dp",)})
        Plan(MeshPlan((Axis("dp", 4),)), name=name, rules=rules).save(tmp_path / f"p.{rank}.json")
    found = run("file", free_port, tmp_path / "p")
    for process in found:
        assert process.status == 1, process.text[-3000:]
        assert "do not agree on the plan that was given: one (" in process.text, process.text[-3000:]
    in_time(found)
    assert lensjax.ProcessError is ProcessError


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "killed after", "raises", "another hook", "exits"])
def test_a_process_that_dies_takes_the_other_with_it(free_port, fault):
    first, second = run(fault, free_port)
    assert first.status != 0 and "LOSS" not in first.text
    why = {
        "killed": "process 1 of 2 did not come within 12 s",
        "killed after": "process 1",
        "raises": "process 1 failed: RuntimeError: the disk is full",
        "another hook": "process 1 failed: RuntimeError: the disk is full",
        "exits": "process 1 did not come to what process 0 does next (make a global batch): it ended",
    }[fault]
    assert why in first.text, first.text[-3000:]
    assert second.status == (-signal.SIGKILL if "killed" in fault else 1) or fault == "exits"
    in_time([first, second])


@pytest.mark.slow
@pytest.mark.parametrize("only", [0, 1])
def test_a_process_that_never_starts_is_named(free_port, only):
    (process,) = run("alone", free_port, only=[only])
    assert process.status == 1, process.text[-2000:]
    assert f"process {1 - only} of 2 did not come within 12 s" in process.text, process.text[-2000:]
    in_time([process])


@pytest.mark.slow
@pytest.mark.parametrize("who", [1, 0])
def test_a_process_that_is_paused_alone_is_taken_for_dead(free_port, who):
    """The others cannot tell it from one whose host is lost, and wait in a collective."""
    found = run("paused", free_port, who)
    paused, other = found[who], found[1 - who]
    assert (
        other.status == 1 and f"process {1 - who} ends: process {who} has not been heard of for 20 s" in other.text
    ), other.text[-3000:]
    in_time([other, paused], until=[other])
    assert paused.status != 0 and "LOSS" not in paused.text, paused.text[-3000:]
    assert paused.ended - max(moments("RESUMED", [paused])) <= 30
    assert re.search("Connection closed by peer|failed before|service detected", paused.text), paused.text[-3000:]


@pytest.mark.slow
def test_processes_that_are_paused_together_go_on(free_port):
    """A container that is frozen, Ctrl-Z, a job that SLURM suspends: nobody is missing."""
    for process in run("all paused", free_port):
        assert process.status == 0 and "RESUMED" in process.text, process.text[-3000:]
        process.after("LOSS")


# ---- the parts, without processes ----------------------------------------------------------------------------------


def test_a_difference_names_the_field_and_the_processes():
    same = {"lensjax": "1", "plan": "dp"}
    assert difference({0: same, 1: dict(same)}) == ""
    said = {p: {**same, "plan": "fsdp" if p in (1, 3) else "dp"} for p in range(5)}
    assert difference(said) == "the processes do not agree on the plan: dp in processes 0, 2, 4; fsdp in processes 1, 3"
    assert "None in process 1" in difference({0: same, 1: {"lensjax": "1"}})


def together(port, count, come, timeout=3.0):
    """What `meet` gives each process that comes (an exception as itself)."""
    found = {}

    def one(rank):
        try:
            found[rank] = meet(f"localhost:{port}", count, rank, {"rank": rank}, timeout)
        except ProcessError as e:
            found[rank] = e

    threads = [threading.Thread(target=one, args=(r,)) for r in come]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return found


def test_all_come_and_hear_what_each_said(free_port):
    found = together(free_port, 4, (3, 1, 0, 2))
    assert list(found.values()) == 4 * [{p: {"rank": p} for p in range(4)}]


def test_who_is_missing_is_told_to_all(free_port):
    found = together(free_port, 4, (0, 2), timeout=1.0)
    assert set(found) == {0, 2}
    assert all("process 1, 3 of 4 did not come within 1 s" in e.message for e in found.values())


def test_strangers_on_the_port_are_ignored(free_port):
    def stranger():
        for _ in range(20):
            try:
                with socket.create_connection(("localhost", free_port), timeout=1) as s:
                    s.sendall(b"GET / HTTP/1.1\\r\\n\n")
                return
            except OSError:
                time.sleep(0.05)

    thread = threading.Thread(target=stranger)
    thread.start()
    found = together(free_port, 2, (0, 1), timeout=10)
    thread.join()
    assert found[0] == found[1] == {0: {"rank": 0}, 1: {"rank": 1}}


@pytest.mark.parametrize("address, rank, words", [("nowhere", 0, "is no address"), ("a:1", 7, "process 7 of 2")])
def test_addresses_that_cannot_be_meant(address, rank, words):
    with pytest.raises(ProcessError, match=words):
        meet(address, 2, rank, {}, 1.0)


def test_alone_there_is_nothing_to_connect():
    import lensjax

    lensjax.connect()


@pytest.mark.parametrize(
    "environment, given, words",
    [
        ({"LENSJAX_COORDINATOR": "localhost:1"}, {}, "LENSJAX_PROCESSES is '' and LENSJAX_PROCESS is ''"),
        ({}, {"coordinator": "localhost:1", "processes": 2}, "was not told process, and no launcher says so"),
        ({}, {"processes": 2, "process": 0}, "was not told coordinator"),
        ({}, {"timeout": float("nan")}, "timeout=nan; expected a number of seconds from 1"),
        ({}, {"silence": "long"}, "silence='long'; expected a number"),
        ({}, {"coordinator": "localhost:1", "processes": 2, "process": 0}, "has made its devices already"),
    ],
)
def test_what_connect_cannot_do(monkeypatch, environment, given, words):
    import jax

    import lensjax

    jax.devices()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessError, match=words):
        lensjax.connect(**given)
