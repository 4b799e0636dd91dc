"""Text that every machine already has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

# Directories that are not library source: installed packages, the test suite, generated tables.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib2to3"}
LIMIT = 8_000_000  # bytes; more would only make the start slower


def standard_library(limit: int = LIMIT) -> tuple[np.ndarray, np.ndarray]:
    """The text in a fixed order, split into (train, valid): uint8[n], uint8[m]; every tenth file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    total = 0
    files = [p for p in sorted(root.rglob("*.py")) if not SKIPPED & set(p.relative_to(root).parts[:-1])]
    for i, path in enumerate(files):
        data = path.read_bytes()
        parts[i % 10 == 9].append(data)
        total += len(data)
        if total >= limit:
            break
    train, valid = (np.frombuffer(b"".join(parts[held_out]), np.uint8) for held_out in (False, True))
    if len(valid) < 10_000:
        raise FileNotFoundError(f"no source text of the standard library below {root} (only {total} bytes found)")
    return train, valid


def windows(text: np.ndarray, rows: int, length: int, seed: tuple[int, ...]) -> dict[str, np.ndarray]:
    """`rows` random windows: inputs and targets (shifted by one), int32[rows, length]; the same seed, the same rows."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, rows)
    chunk = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"inputs": chunk[:, :-1], "targets": chunk[:, 1:]}
