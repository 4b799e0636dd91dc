"""Compiled artefacts on disk, by content: one program for the same devices, flags and versions is compiled once."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT = 1  # of the stored file; a change makes old entries unreachable, and `trim` removes them in time
LIMIT_BYTES = 2 * 2**30  # oldest entries go first beyond this; an artefact of a 7B step is about 1 MB, compressed

_COMPILERS = ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda12-pjrt", "libtpu", "nvidia-cuda-nvcc", "lensjax")


def folder() -> Path:
    """$LENSJAX_CACHE, else $XDG_CACHE_HOME/lensjax, else ~/.cache/lensjax."""
    if named := os.environ.get("LENSJAX_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lensjax"


def versions() -> dict[str, str]:
    """Version of everything that takes part in a compile and is installed."""
    found = {}
    for name in _COMPILERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def key(module: bytes, request: dict[str, Any], parts: Sequence[str] = ()) -> str:
    """Content hash of a compile: the module (program and plan are in it), the request, more text, all versions."""
    digest = hashlib.sha256(module)
    for text in (json.dumps(request, sort_keys=True), json.dumps(versions(), sort_keys=True), str(FORMAT), *parts):
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()[:40]


def load(name: str) -> dict[str, Any] | None:
    """The stored object, or None; an unreadable entry counts as absent."""
    path = _path(name)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as f:
            found = json.load(f)
        os.utime(path)  # last use, for trim
        return found
    except (OSError, EOFError, ValueError):
        return None


def store(name: str, data: dict[str, Any]) -> None:
    """Writes an entry; a folder that cannot be written is no error (the next compile is then not saved)."""
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        with gzip.open(part, "wt", encoding="utf-8", compresslevel=3) as f:
            json.dump(data, f)
        part.replace(path)  # in one step, so that a reader never sees half a file
        trim()
    except OSError:
        return


def trim(limit: int = LIMIT_BYTES) -> None:
    """Removes the entries used longest ago until all of them together take at most `limit` bytes."""
    entries = sorted(
        ((p.stat().st_mtime, p.stat().st_size, p) for p in _path("x").parent.glob("*.json.gz")), reverse=True
    )
    total = 0
    for _, size, path in entries:
        total += size
        if total > limit:
            path.unlink(missing_ok=True)


def _path(name: str) -> Path:
    return folder() / "compiled" / f"{name}.json.gz"
