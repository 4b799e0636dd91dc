"""What both sides of `slow_link.py` share: the model's numbers, its batches, and the conversation with the parent.

A byte-level decoder of 2.4 million parameters (9.5 MiB of float32 gradient on each device). Needs numpy alone.
"""

from __future__ import annotations

import glob
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

LAYERS, WIDTH, HEADS, VOCAB, SEQ, BATCH = 3, 256, 4, 256, 16, 16
RATE, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8  # Adam


def parameters() -> dict[str, np.ndarray]:
    """The same start for every method. Matrices of the layers are stacked: [layer, in, out]."""
    r, d, n = np.random.default_rng(0), WIDTH, LAYERS
    normal = lambda *shape, scale: (r.standard_normal(shape) * scale).astype(np.float32)
    return {
        "embed": normal(VOCAB, d, scale=0.02), "positions": normal(SEQ, d, scale=0.02),
        "layers/qkv": normal(n, d, 3 * d, scale=d**-0.5), "layers/out": normal(n, d, d, scale=d**-0.5 / 2),
        "layers/up": normal(n, d, 4 * d, scale=d**-0.5), "layers/down": normal(n, 4 * d, d, scale=(4 * d) ** -0.5 / 2),
        "layers/norm1": np.ones((n, d), np.float32), "layers/norm2": np.ones((n, d), np.float32),
        "norm": np.ones(d, np.float32),
    }  # fmt: skip


def corpus() -> np.ndarray:
    """Bytes of Python's own standard library: a text that is on every machine."""
    files = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))[:60]
    return np.frombuffer(b"\n".join(Path(f).read_bytes() for f in files), np.uint8)


def batch(text: np.ndarray, step: int) -> np.ndarray:
    """int32 [BATCH, SEQ + 1] of step `step`, the same for every method."""
    at = np.random.default_rng(step).integers(0, len(text) - SEQ - 1, BATCH)
    return text[at[:, None] + np.arange(SEQ + 1)].astype(np.int32)


def bytes_sent() -> int:
    """Bytes that this host has put on its links (all but the loopback), as the interfaces count them."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")


def serve(step: Callable[[str, np.ndarray], float], methods: dict[str, int | None]) -> None:
    """Answers the parent: {"method", "steps", "start"} -> {"seconds": [...], "losses": [...], "bytes": sent}.
    `methods`: by name, the bytes that a host is planned to send per step (None: nobody planned)."""
    text = corpus()
    print(json.dumps({"ready": methods}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        seconds, losses, before = [], [], bytes_sent()
        for i in range(order["start"], order["start"] + order["steps"]):
            tokens, begin = batch(text, i), time.perf_counter()
            losses.append(step(order["method"], tokens))
            seconds.append(time.perf_counter() - begin)
        print(json.dumps({"seconds": seconds, "losses": losses, "bytes": bytes_sent() - before}), flush=True)
