"""Processes that do not agree: a clear error on every one of them within 30 s, and no hang.

Two processes run one program; what is wrong with one of them is the test's parameter. Real processes, real sockets.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from lensjax._errors import ProcessError
from lensjax.execute.processes import difference
from lensjax.execute.rendezvous import meet

PROGRAM = textwrap.dedent("""
    import os, signal, sys
    fault, rank = sys.argv[1], int(os.environ["LENSJAX_PROCESS"])
    import lensjax
    if fault == "release" and rank == 1:
        lensjax.execute.processes.__version__ = "0.0.7"
    if fault == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lensjax.connect(timeout=12)
    import jax, jax.numpy as jnp, numpy as np

    def step(p, x):
        loss, grads = jax.value_and_grad(lambda p: ((x @ p) ** 2).mean())(p)
        return p - (0.1 if not (fault == "program" and rank) else 0.2) * grads, loss

    if fault == "killed after" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    plan = "fsdp" if not (fault == "plan" and rank) else "dp"
    if fault == "file":
        lensjax.parallelize(step, plan="dp", cluster="cpu:4").plan_for  # nothing is planned here
        plan = f"{sys.argv[2]}.{rank}.json"
    train = lensjax.parallelize(step, plan=plan)
    rows = np.ones((4 if not (fault == "batch" and rank) else 3, 16), np.float32)
    state = train.init(lambda: jnp.ones((16, 64)), batch=np.ones((8, 16), np.float32))
    if fault == "raises" and rank == 1:
        raise RuntimeError("the disk is full")
    for _ in range(3):
        state, loss = train(state, train.from_local(rows))
    print("LOSS", float(loss), flush=True)
""")


def run(fault, port, *more, only=None):
    """[(exit status, output)] of two processes, and the seconds until both had ended."""
    base = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    base |= {"LENSJAX_COORDINATOR": f"localhost:{port}", "LENSJAX_PROCESSES": "2", "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, fault, *more], env={**base, "LENSJAX_PROCESS": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in ((0, 1) if only is None else (only,))
    ]  # fmt: skip
    out = []
    for w in workers:
        text, _ = w.communicate(timeout=240)
        out.append((w.returncode, text))
    return out, time.monotonic() - started


@pytest.mark.slow
def test_processes_that_agree(free_port):
    found, _ = run("none", free_port)
    losses = {text.split("LOSS")[1].split()[0] for status, text in found if status == 0}
    assert len(losses) == 1 and len(found) == 2, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, words",
    [
        ("plan", "do not agree on the plan that was given: fsdp in process 0; dp in process 1"),
        ("program", "do not agree on the program of the step"),
        ("release", "do not agree on the lensjax: 0.1.0 in process 0; 0.0.7 in process 1"),
        ("batch", "do not agree on the shapes of its own part of the batch: [[4, 16]] in process 0; [[3, 16]]"),
    ],
)
def test_a_difference_is_an_error_on_every_process(free_port, fault, words):
    found, _ = run(fault, free_port)
    for status, text in found:
        assert status == 1 and words in text and "LOSS" not in text, text[-3000:]


@pytest.mark.slow
def test_plan_files_that_differ(free_port, tmp_path):
    import lensjax
    from lensjax.plan.plan import Axis, MeshPlan, Plan, Rules

    for rank, name in enumerate(("one", "two")):
        rules = Rules(activations={"batch": ("dp",)})
        Plan(MeshPlan((Axis("dp", 4),)), name=name, rules=rules).save(tmp_path / f"p.{rank}.json")
    found, _ = run("file", free_port, str(tmp_path / "p"))
    for status, text in found:
        assert status == 1 and "do not agree on the plan that was given: one (" in text, text[-3000:]
    assert lensjax.ProcessError is ProcessError


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "killed after", "raises"])
def test_a_process_that_dies_takes_the_other_with_it(free_port, fault):
    (first, second), seconds = run(fault, free_port)
    assert first[0] != 0 and "LOSS" not in first[1]
    why = {
        "killed": "process 1 of 2 did not come within 12 s",
        "killed after": "process 1",
        "raises": "process 1 failed: RuntimeError: the disk is full",
    }[fault]
    assert why in first[1], first[1][-3000:]
    assert second[0] == (-signal.SIGKILL if "killed" in fault else 1)
    assert seconds < 120  # an idle machine needs 25; the point is that it ends


@pytest.mark.slow
@pytest.mark.parametrize("only", [0, 1])
def test_a_process_that_never_starts_is_named(free_port, only):
    ((status, text),), _ = run("none", free_port, only=only)
    assert status == 1 and f"process {1 - only} of 2 did not come within 12 s" in text, text[-2000:]


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
