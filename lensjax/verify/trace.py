"""A timeline as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format). Times in
microseconds, one "thread" for each stream.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lensjax.verify.timeline import COMPUTE, Timeline

LIMIT = 200_000  # events; Perfetto opens a few hundred thousand with ease


def trace_events(line: Timeline, name: str = "step") -> dict[str, Any]:
    """The trace as an object for `json.dump`: complete events ("X") and names of streams ("M")."""
    streams = [COMPUTE, *sorted(s for s in line.busy if s != COMPUTE)]
    number = {s: i + 1 for i, s in enumerate(streams)}
    events: list[dict[str, Any]] = [_meta("process_name", 0, name)]
    events += [_meta("thread_name", n, s if s == COMPUTE else f"links: {s}") for s, n in number.items()]
    for start, event in sorted(line.block.flat(limit=LIMIT), key=lambda p: p[0]):
        facts = {
            "from": event.what,
            "line": event.line,
            "flops": event.flops,
            "bytes": event.bytes,
            "waited_us": event.waited * 1e6,
        }
        events.append(
            {
                "ph": "X", "pid": 0, "tid": number[event.stream], "name": event.name, "cat": event.stream,
                "ts": start * 1e6, "dur": event.seconds * 1e6, "args": {k: v for k, v in facts.items() if v},
            }
        )  # fmt: skip
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": {"step_s": line.step}}


def _meta(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}


def write_trace(line: Timeline, path: str | Path, name: str = "step") -> None:
    """Writes the trace of a timeline as JSON."""
    Path(path).write_text(json.dumps(trace_events(line, name), allow_nan=False), encoding="utf-8")
