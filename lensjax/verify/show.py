"""An audit for people: rich tables and lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lensjax.verify.audit import Audit
from lensjax.verify.finding import Finding, size
from lensjax.verify.fragments import STEPS, advice

if TYPE_CHECKING:
    from lensjax.verify.proof import Proof

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
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, width in (("at the peak", 11), ("bytes", 11), ("shape", 14), ("from", 10), ("line", 14)):
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=width)
    alike: dict[tuple, int] = {}
    for b in made.peak.buffers:
        key = (b.kind, b.bytes, b.shape, b.what, b.line)
        alike[key] = alike.get(key, 0) + 1
    for (kind, each, shape, what, line), count in alike.items():
        many = f"{count} x " if count > 1 else ""
        table.add_row(kind, many + size(each), shape, _tail(what, 28), _short(line))
    return table


def allocator_lines(made: Audit) -> list[str]:
    """What an allocator needs for the step, over what is ever in use; and what to set for it."""
    f = made.fragmentation
    if f is None:
        return []
    block = f"{size(f.block)} ({f.block / f.live - 1:+.1%} over what is in use at once)" if f.live else "nothing"
    lines = [
        f"allocator: {STEPS} steps ask for {size(f.steps.peak)} at most and need {size(f.steps.need)} "
        f"({f.steps.ratio - 1:+.1%}); the compiler's one block of temporaries takes {block}; "
        f"a runtime that plans no block would need {size(f.buffers.need)} for them ({f.buffers.ratio - 1:+.1%})"
    ]
    return [*lines, f"    {advice(f, made.device_memory)}"] if made.device_memory else lines


def finding_lines(findings: Iterable[Finding], notes: Iterable[str] = ()) -> list[Any]:
    """Findings as coloured text, or one line that says there are none; then notes."""
    from rich.text import Text

    lines = []
    for f in findings:
        place = f"{f.line}: " if f.line else ""
        lines.append(
            f"[{_COLOURS[f.severity]}]{f.severity}[/] {_plain(place)}[bold]{f.kind}[/] {_plain(f.message)}\n"
            f"    do: {_plain(f.hint)}"
        )
    lines = [*(lines or ["[green]nothing found[/]"]), *(f"[dim]{_plain(n)}[/]" for n in notes)]
    return [Text.from_markup(line) for line in lines]


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _short(line: str) -> str:
    """ "decoder.py:100 in Attention" from a whole path."""
    return line.rpartition("/")[2]


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[-length + 1 :]


def everything(proof: Proof) -> tuple[Any, ...]:
    """A proof as the command shows it."""
    serious = [f for f in proof.findings if f.severity != "note"]
    return (summary(proof.audit), *comparison(proof), memory_table(proof.audit), *allocator_lines(proof.audit),
            *finding_lines(serious, proof.audit.notes))  # fmt: skip


def text(proof: Proof, width: int = 110) -> str:
    """A proof as plain text."""
    from rich.console import Console

    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        for item in everything(proof):
            console.print(item)
    return captured.get()


def comparison(proof: Proof) -> tuple[Any, ...]:
    """Planned against compiled: memory, bytes by tier, by kind of collective, and the two estimates of time."""
    from rich.table import Table

    table = Table("", "planned", "compiled", "difference", box=None, padding=(0, 2, 0, 0))
    made = proof.audit
    table.add_row("peak memory", *_pair(proof.predicted.peak_bytes, made.peak.bytes, size))
    for tier, (planned, compiled) in proof.tiers.items():
        table.add_row(f"sent on {tier}", *_pair(planned, compiled, size))
    for row in proof.traffic:
        label = f"  {row.kind} along {'+'.join(row.axes) or 'no axis'}"
        table.add_row(label, *_pair(row.planned, row.compiled, size))
    if made.timeline is not None:
        table.add_row(
            "step, estimated", *_pair(proof.predicted.step_s, made.timeline.step, lambda s: f"{s * 1e3:.2f} ms")
        )
    return (table,)


def _pair(planned: float, compiled: float, show: Any) -> tuple[str, str, str]:
    if not planned:
        return "none", show(compiled), "new" if compiled else ""
    return show(planned), show(compiled), f"{(compiled - planned) / planned:+.1%}"
