"""Two network namespaces on this machine, joined by a veth pair whose rate is limited: a real slow network."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ADDRESS = "10.200.77"


def missing() -> str:
    """Why the rig cannot be built here; empty when it can."""
    if os.geteuid() != 0:
        return "not root: network namespaces need it"
    for tool in ("ip", "tc", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"no {tool} (iproute2, util-linux, hostname)"
    made = subprocess.run(["ip", "netns", "add", "ljprobe"], capture_output=True, text=True)
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "ljprobe"], check=True)
    return ""


@contextlib.contextmanager
def slow_link(rate: str, tag: str) -> Iterator[list[str]]:
    """Namespaces `tag`0 and `tag`1 with `rate` (tc notation) each way between them; yields their names, removes them
    after.
    """
    names = [f"{tag}0", f"{tag}1"]
    run = lambda *command: subprocess.run(command, check=True, capture_output=True)
    try:
        for i, name in enumerate(names):
            run("ip", "netns", "add", name)
            hosts = (
                Path("/etc/netns") / name / "hosts"
            )  # `ip netns exec` shows it as /etc/hosts: each resolves its own name
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS}.{i + 1} {name}\n")
        run("ip", "link", "add", f"{tag}a", "type", "veth", "peer", "name", f"{tag}b")
        for i, (name, link) in enumerate(zip(names, (f"{tag}a", f"{tag}b"))):
            run("ip", "link", "set", link, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{ADDRESS}.{i + 1}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("rate", rate, "burst", "256kb", "latency", "100ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def start(name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """Starts a Python command in a namespace, on a host that is called like it."""
    inside = ["sh", "-c", 'hostname "$0" && exec "$@"', name, sys.executable, *command]
    full = ["ip", "netns", "exec", name, "unshare", "--uts", *inside]
    return subprocess.Popen(
        full, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
