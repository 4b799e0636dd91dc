"""The devices an example runs on: emulated ones where nothing else was asked for, in one process or in several.

Import this before JAX: how many CPU devices JAX emulates is fixed when it starts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

_RANK, _COUNT, _PORT = "EXAMPLE_PROCESS", "EXAMPLE_PROCESSES", "EXAMPLE_PORT"
_EMULATE = "--xla_force_host_platform_device_count"


def emulate(hosts: int = 2, devices: int = 4) -> str | None:
    """Sets up `hosts` x `devices` emulated CPU devices and returns the cluster they stand for.

    Returns None, and touches nothing, where the environment already says which devices to use (JAX_PLATFORMS or
    XLA_FLAGS): then the cluster is whatever JAX sees. To train on GPUs: `JAX_PLATFORMS=cuda python examples/...`.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _COUNT in os.environ:  # one of several processes started by `spawn`: it owns its part of the devices
        local, flags = hosts * devices // int(os.environ[_COUNT]), ""
    elif "jax" in sys.modules or "JAX_PLATFORMS" in os.environ or _EMULATE in flags:
        return None
    else:
        local = hosts * devices
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{flags} {_EMULATE}={local}".strip()
    return f"cpu:{hosts}x{devices}"


def spawn(processes: int) -> int:
    """Runs this very command in `processes` processes that find each other; the first failing exit status, or 0."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    shared = {**os.environ, _COUNT: str(processes), _PORT: str(port)}
    children = [
        subprocess.Popen([sys.executable, *sys.argv], env={**shared, _RANK: str(rank)}) for rank in range(processes)
    ]
    try:
        waiting, status = set(children), 0
        while waiting and not status:
            for child in list(waiting):
                try:
                    status = child.wait(timeout=0.2) or status
                    waiting.discard(child)
                except subprocess.TimeoutExpired:
                    pass
        return status
    finally:  # a process that lost its peers would wait for them for minutes
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            child.wait()


def spawned() -> bool:
    """Whether this process is one of those started by `spawn`."""
    return _RANK in os.environ


def join() -> None:
    """Connects this process with its peers (a no-op unless started by `spawn`). Call before any output."""
    if spawned():
        import jax

        # Gloo prints eight lines for every group of devices, straight to file descriptor 1: only ours stay on it.
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        rank, count = int(os.environ[_RANK]), int(os.environ[_COUNT])
        jax.distributed.initialize(f"localhost:{os.environ[_PORT]}", num_processes=count, process_id=rank)


def to_host(tree):
    """A pytree of arrays, however sharded and over however many processes -> the whole arrays, as numpy."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
