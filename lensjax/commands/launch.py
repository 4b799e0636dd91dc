"""`lensjax launch`: one program in several processes of this machine, as on as many hosts."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any

from lensjax._errors import UsageError
from lensjax.commands import Result

HELP = "run a script in several processes on this machine"
# What `lensjax.connect` reads; the names live there.
_COORDINATOR, _COUNT, _RANK = "LENSJAX_COORDINATOR", "LENSJAX_PROCESSES", "LENSJAX_PROCESS"
_GLOO = "Expected number of connected peer ranks is"
GRACE = 10.0  # seconds for the other processes to say why they cannot go on, once one is gone

PATIENCE = 3  # signals: the first may start a checkpoint, the second may be meant; the third is
# Seconds from a termination signal to the end, heeded or not. Schedulers give as many; and a process of several that
# JAX runs does not end by itself: JAX takes the signal for a notice that a checkpoint is due.
STOP = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument("--devices", type=int, metavar="M", help="emulated CPU devices in each (default: real devices)")
    parser.add_argument("--port", type=int, help="port on which they meet (default: a free one)")
    parser.add_argument("script", metavar="SCRIPT.py", help="calls lensjax.connect() first")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(args: argparse.Namespace) -> Result:
    """Exit status: 0 when all processes ended well, else that of the first that did not (128 + N for signal N)."""
    if args.processes < 1:
        raise UsageError(f"--processes {args.processes}", hint="1 or more")
    if args.devices is not None and args.devices < 1:
        raise UsageError(f"--devices {args.devices}", hint="1 or more; leave it out for real devices")
    if args.port is not None and not 1 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}", hint="1 to 65535; leave it out for a free one")
    if not os.path.isfile(args.script):
        raise UsageError(f"there is no file {args.script}")
    if args.port is not None:
        _check_port(args.port)
    port = args.port or _free_port()
    out = sys.stderr if args.json else sys.stdout
    children: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    lock = threading.Lock()
    # Before the first one starts: a signal may come as soon as there is something to see.
    with _Forward(children) as told:
        for rank in range(args.processes):
            try:
                child = _start(args, rank, port)
            except OSError as e:  # no more processes, memory or files
                _signal(children, signal.SIGKILL)
                raise UsageError(
                    f"process {rank} of {args.processes} could not be started: {e}", hint="start fewer"
                ) from e
            children.append(child)
            for pipe, stream in ((child.stdout, out), (child.stderr, sys.stderr)):
                readers.append(threading.Thread(target=_label, args=(f"[{rank}] ", pipe, stream, lock), daemon=True))
                readers[-1].start()
        first = _wait(children, told)
    for reader in readers:
        reader.join(timeout=5)
    statuses = [_status(c.returncode) for c in children]
    rows = [{"process": i, "status": s} for i, s in enumerate(statuses)]
    status = statuses[first] if first is not None else 0
    said = [f"lensjax launch: process {first} ended with status {status}"] if first is not None else []
    return Result({"processes": rows, "status": status}, tuple(said), status)


def _start(args: argparse.Namespace, rank: int, port: int) -> subprocess.Popen[bytes]:
    env = {**os.environ, _COORDINATOR: f"localhost:{port}", _COUNT: str(args.processes), _RANK: str(rank)}
    env["PYTHONUNBUFFERED"] = "1"
    if args.devices is not None:
        flags = [f for f in env.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
        env["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={args.devices}"])
        env["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, args.script, *args.arguments]
    # A group of its own: Ctrl-C in the terminal reaches the children once, through us.
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def _label(label: str, pipe: IO[bytes], stream: Any, lock: threading.Lock) -> None:
    """Copies whole lines with a label in front. Gloo's own lines about its connections (several threads write them, in
    pieces) are nobody's output. Once nobody reads `stream` (`| head`), lines are dropped: a process whose pipe is full
    would wait forever."""
    heard = True
    for line in iter(pipe.readline, b""):
        text = line.decode(errors="replace")
        if heard and not text.startswith("[Gloo]") and _GLOO not in text:
            with lock:
                try:
                    # One write: where it fails, nothing of it is left to be flushed at the end.
                    stream.write(label + text + "\n" * (not text.endswith("\n")))
                    stream.flush()
                except UnicodeEncodeError:  # a terminal of another encoding
                    stream.write(label + ascii(text) + "\n")
                except OSError:
                    heard = False


class _Forward:
    """While active, interrupt and termination signals go to all children; the third one ends them, heeded or not, and
    so does STOP seconds after a termination (`until`)."""

    def __init__(self, children: list[subprocess.Popen[bytes]]):
        self._children = children
        self._count = 0
        self.until: float | None = None

    def __enter__(self) -> _Forward:
        if threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._pass_on) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        else:
            self._old = {}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _: Any) -> None:
        self._count += 1
        if number != signal.SIGINT and self.until is None:
            self.until = time.monotonic() + STOP
        _signal(self._children, number if self._count < PATIENCE else signal.SIGKILL)


def _signal(children: list[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            try:
                os.killpg(child.pid, number)
            except ProcessLookupError:
                pass


def _wait(children: list[subprocess.Popen[bytes]], told: _Forward) -> int | None:
    """Waits for all; once one has failed, ends the others after GRACE seconds. The first that failed, None where none
    did."""
    first: int | None = None
    since = 0.0
    terminated = False
    while any(c.poll() is None for c in children):
        time.sleep(0.05)
        if told.until is not None and time.monotonic() > told.until:
            _signal(children, signal.SIGKILL)
        if first is None:
            first = next((i for i, c in enumerate(children) if c.poll() not in (None, 0)), None)
            since = time.monotonic()
        elif time.monotonic() - since > GRACE:
            _signal(children, signal.SIGKILL if terminated else signal.SIGTERM)
            terminated, since = True, time.monotonic()
    return first if first is not None else next((i for i, c in enumerate(children) if c.returncode), None)


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _check_port(port: int) -> None:
    """Raises UsageError where process 0 could not listen there: it would only say so after all had waited for it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left is free
                if family == socket.AF_INET6:
                    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                s.bind(("", port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"--port {port}: it is in use on this machine",
                    hint="leave --port out for a free one, or give another ('ss -ltnp' says who listens)",
                ) from e
            if e.errno == errno.EACCES:
                raise UsageError(
                    f"--port {port}: this user may not listen there", hint="ports from 1024 on are for everyone"
                ) from e
            # Anything else (no IPv6 on this machine) is no reason not to try.


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]
