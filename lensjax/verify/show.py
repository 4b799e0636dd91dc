"""An audit for people: rich tables and lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lensjax.verify.audit import Audit
from lensjax.verify.finding import Finding, size

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def summary(made: Audit) -> Any:
    """One table: what was compiled, memory, bytes by tier and by axis, time."""
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    a = made.artifact
    table.add_row("compiled", f"for {a.devices} x {a.target} by XLA:{a.backend} in {a.seconds:.1f} s")
    host = f", {size(made.peak.host_bytes)} in host memory" if made.peak.host_bytes else ""
    table.add_row("peak memory", f"{size(made.peak.bytes)} per device{host}")
    tiers = ", ".join(f"{t} {size(b)}" for t, b in made.traffic.tiers.items()) or size(made.traffic.total)
    table.add_row("sent per step", f"{tiers} per device")
    axes = sorted(made.traffic.axes.items(), key=lambda kv: -kv[1])
    table.add_row("by mesh axis", ", ".join(f"{'+'.join(k) or '?'} {size(b)}" for k, b in axes) or "nothing")
    if made.timeline is not None:
        waits = ", ".join(f"{t} {s * 1e3:.2f} ms" for t, s in made.timeline.exposed.items()) or "nothing"
        step = f"{made.timeline.step * 1e3:.2f} ms, of which compute waits for: {waits}"
        table.add_row("estimated step", step)
    if made.unknown:
        table.add_row("not understood", f"{len(made.unknown)}: {made.unknown[0]}")
    return table


def memory_table(made: Audit) -> Any:
    """The largest buffers at the peak."""
    from rich.table import Table

    if not made.peak.buffers:
        return "the compiler does not say which buffers are alive at the peak"
    table = Table("at the peak", "bytes", "shape", "from", "line", box=None, padding=(0, 2, 0, 0))
    alike: dict[tuple, int] = {}
    for b in made.peak.buffers:
        key = (b.kind, b.bytes, b.shape, b.what, b.line)
        alike[key] = alike.get(key, 0) + 1
    for (kind, each, shape, what, line), count in alike.items():
        many = f"{count} x " if count > 1 else ""
        table.add_row(kind, many + size(each), shape, _tail(what, 30), _tail(line, 40))
    return table


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Findings as text with markup, or one line that says there are none."""
    lines = []
    for f in findings:
        place = f"{f.line}: " if f.line else ""
        lines.append(
            f"[{_COLOURS[f.severity]}]{f.severity}[/] {_plain(place)}[bold]{f.kind}[/] {_plain(f.message)}\n"
            f"    do: {_plain(f.hint)}"
        )
    return lines or ["[green]nothing found[/green]"]


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[-length + 1 :]
