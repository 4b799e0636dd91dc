"""Where the processes of a run meet before JAX does: `jax.distributed` ends the process, without an exception, when one
of them does not come.

Process 0 listens on the coordinator's port until all have said who they are, or the time is up, and tells each of them
what all of them said. Then the port is JAX's.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from lensjax._errors import ProcessError


def meet(address: str, count: int, rank: int, facts: Mapping[str, Any], timeout: float) -> dict[int, Any]:
    """What every process said, by process. Raises ProcessError on every process that came when one did not come within
    `timeout` seconds."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ProcessError(f"the coordinator {address!r} is no address", hint='"host:port" of process 0')
    if not 0 <= rank < count:
        raise ProcessError(f"process {rank} of {count}: expected 0 to {count - 1}")
    deadline = time.monotonic() + timeout
    said = _host(int(port), count, facts, deadline) if rank == 0 else _guest(host, int(port), rank, facts, deadline)
    if "missing" in said:
        gone = ", ".join(map(str, said["missing"]))
        raise ProcessError(
            f"process {gone} of {count} did not come within {timeout:.0f} s",
            hint=f"this is process {rank}; the others' own output says why they did not start",
        )
    return {int(k): v for k, v in said.items()}


def _host(port: int, count: int, facts: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    said: dict[str, Any] = {"0": dict(facts)}
    guests: list[socket.socket] = []
    try:
        with socket.create_server(("", port), backlog=count) as server:
            while len(said) < count and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    guest, _ = server.accept()
                    guest.settimeout(max(left, 0.1))
                    told = json.loads(_line(guest))
                except (TimeoutError, OSError, ValueError):
                    continue
                guests.append(guest)
                said[str(told.pop("process"))] = told
        missing = [p for p in range(count) if str(p) not in said]
        answer = {"missing": missing} if missing else said
        for guest in guests:
            try:
                guest.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                pass  # it died while it waited: what comes next finds out
        return answer
    except OSError as e:
        raise ProcessError(
            f"process 0 cannot listen on port {port}: {e.strerror}", hint="choose another coordinator port"
        ) from e
    finally:
        for guest in guests:
            guest.close()


def _guest(host: str, port: int, rank: int, facts: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    said_so = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as s:
                s.sendall(json.dumps({"process": rank, **facts}).encode() + b"\n")
                said_so = True
                # Process 0 answers at its own deadline, which may be later than ours by as much as it started later.
                s.settimeout(left + 5)
                return json.loads(_line(s))
        except (OSError, ValueError):
            if said_so:
                raise ProcessError("process 0 ended while the processes met", hint="its own output says why") from None
            time.sleep(0.1)
    return {"missing": [0]}


def _line(s: socket.socket) -> bytes:
    with s.makefile("rb") as f:
        line = f.readline()
    if not line.endswith(b"\n"):
        raise ValueError("closed")
    return line
