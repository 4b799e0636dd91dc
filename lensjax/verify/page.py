"""A proof as one HTML page that needs nothing else: timeline, memory at the peak, bytes by tier, findings with code."""

from __future__ import annotations

import base64
import html
import linecache
import tempfile
from pathlib import Path

from lensjax.verify.finding import Finding, size
from lensjax.verify.picture import draw
from lensjax.verify.proof import Proof
from lensjax.verify.show import allocator_lines

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1d2733}
h1{font-size:1.5rem} h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%} td,th{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #e3e8ee}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.bar{background:#9cc3dd;height:.8rem;display:inline-block;vertical-align:middle;margin-right:.5rem}
.finding{border-left:4px solid #c8553d;padding:.2rem .8rem;margin:.8rem 0;background:#faf6f4}
.note{border-color:#2f6f9f;background:#f4f8fa} pre{background:#f6f8fa;padding:.5rem;overflow-x:auto;margin:.4rem 0}
.mark{background:#ffe9a8;display:block} img{max-width:100%} .good{color:#2c7a3f} small{color:#667}
"""


def write_page(proof: Proof, path: str | Path, title: str = "step") -> None:
    """Writes the page."""
    Path(path).write_text(page(proof, title), encoding="utf-8")


def page(proof: Proof, title: str = "step") -> str:
    """The page's HTML."""
    made = proof.audit
    head = f"{html.escape(title)} under {html.escape(proof.plan.name or 'a plan')}"
    what = f"compiled for {made.artifact.devices} × {html.escape(made.artifact.target)} by XLA:{proof.backend}"
    notes = "".join(f"<p><small>{html.escape(n)}</small></p>" for n in made.notes)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{head}</title><style>{_STYLE}</style>"
        f"<h1>{head}</h1><p>{what}, {made.artifact.seconds:.1f} s.</p>{notes}"
        f"<h2>Findings</h2>{_findings(proof.findings)}"
        f"<h2>Planned against compiled</h2>{_comparison(proof)}"
        f"<h2>The step</h2>{_timeline(proof)}"
        f"<h2>Memory at the peak</h2>{_memory(proof)}</html>"
    )


def _findings(findings: tuple[Finding, ...]) -> str:
    if not findings:
        return "<p class=good>Nothing found.</p>"
    parts = []
    for f in findings:
        kind = "finding note" if f.severity == "note" else "finding"
        parts.append(
            f"<div class='{kind}'><b>{f.severity}: {f.kind}</b> {html.escape(f.message)}<br>"
            f"<i>{html.escape(f.hint)}</i>{_code(f.line)}</div>"
        )
    return "".join(parts)


def _code(line: str, around: int = 2) -> str:
    """A few lines of the user's file, the one found marked, with a link to it."""
    file, _, rest = line.rpartition(":")
    number = rest.split()[0] if rest else ""
    if not file or not number.isdigit():
        return ""
    at, rows = int(number), []
    for n in range(max(1, at - around), at + around + 1):
        text = html.escape(linecache.getline(file, n).rstrip("\n"))
        rows.append(f"<span class=mark>{n:5} {text}</span>" if n == at else f"{n:5} {text}\n")
    link = html.escape(Path(file).absolute().as_uri() + f"#L{at}")
    return f"<br><a href='{link}'>{html.escape(line)}</a><pre>{''.join(rows)}</pre>"


def _comparison(proof: Proof) -> str:
    rows = [("peak memory", proof.predicted.peak_bytes, proof.audit.peak.bytes)]
    rows += [(f"sent on {tier}", p, c) for tier, (p, c) in proof.tiers.items()]
    rows += [(f"&nbsp; {r.kind} along {'+'.join(r.axes) or 'no axis'}", r.planned, r.compiled) for r in proof.traffic]
    body = "".join(
        f"<tr><td>{name}<td class=n>{size(p)}<td class=n>{size(c)}<td class=n>{_change(p, c)}" for name, p, c in rows
    )
    return f"<table><tr><th>per device and step<th class=n>planned<th class=n>compiled<th class=n>{body}</table>"


def _change(planned: float, compiled: float) -> str:
    return f"{(compiled - planned) / planned:+.1%}" if planned else ("new" if compiled else "")


def _timeline(proof: Proof) -> str:
    line = proof.audit.timeline
    if line is None:
        return "<p>No timeline without a cluster.</p>"
    with tempfile.TemporaryDirectory() as folder:
        draw(line, Path(folder) / "step.png")
        data = base64.b64encode((Path(folder) / "step.png").read_bytes()).decode()
    waits = ", ".join(f"{t} {s * 1e3:.2f} ms" for t, s in line.exposed.items()) or "nothing"
    top = "".join(
        f"<tr><td>{html.escape(name)}<td class=n>{took * 1e3:.3f} ms<td>{html.escape(where)}"
        for name, took, where in line.critical[:10]
    )
    return (
        f"<p>{line.step * 1e3:.2f} ms by the compiled schedule, {proof.predicted.step_s * 1e3:.2f} ms by the planner. "
        f"Compute waits for: {waits}.</p><img alt='timeline of one step' src='data:image/png;base64,{data}'>"
        f"<table><tr><th>where the time goes<th class=n>per step<th>line{top}</table>"
    )


def _memory(proof: Proof) -> str:
    buffers = proof.audit.peak.buffers
    if not buffers:
        return "<p>The compiler does not say which buffers are alive at the peak.</p>"
    most = max(b.bytes for b in buffers) or 1
    rows = "".join(
        f"<tr><td><span class=bar style='width:{12 * b.bytes / most:.1f}rem'></span>{size(b.bytes)}<td>{b.kind}"
        f"<td>{html.escape(b.shape)}<td>{html.escape(b.what)}<td>{html.escape(b.line)}"
        for b in buffers
    )
    said = "".join(f"<p>{html.escape(line.strip())}</p>" for line in allocator_lines(proof.audit))
    return f"<table><tr><th>largest buffers<th>kind<th>shape<th>from<th>line{rows}</table>{said}"
