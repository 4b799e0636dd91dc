"""Starts all processes of one run, each with emulated devices of its own, and gives what became of each of them."""

import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status, all that it wrote, and when, on the machine's clock (time.monotonic)."""

    status: int
    text: str
    ended: float

    def after(self, word: str) -> str:
        """The rest of the line that begins with `word`; fails with the whole output where the process failed."""
        assert self.status == 0, self.text[-3000:]
        return next(line[len(word) :] for line in self.text.splitlines() if line.startswith(word))


def run(program, *arguments, processes, devices, port=None, only=None, timeout=400) -> list[Ended]:
    """The processes of a run of `program` (source text), as `lensjax launch` would start them; `only` these ranks."""
    base = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    base["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    if processes > 1:
        base |= {"LENSJAX_COORDINATOR": f"localhost:{port}", "LENSJAX_PROCESSES": str(processes)}

    def one(rank):
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)], env={**base, "LENSJAX_PROCESS": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, time.monotonic())

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(one, range(processes) if only is None else only))
