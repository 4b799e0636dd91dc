"""Why this plan: the table of everything it was compared with, and what each argument was taken for."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lensjax.passes.shardings import batch_axes, resolve
from lensjax.plan.plan import Plan
from lensjax.program.program import Program
from lensjax.report.alike import alike
from lensjax.report.chunks import Chunked, proposal
from lensjax.report.flow import Flow
from lensjax.report.units import duration, size, spec, typed
from lensjax.search.candidates import TIE, Candidate
from lensjax.search.choose import Choice, largest_leaves
from lensjax.search.judged import disagreement


def render(*items: Any, width: int = 120) -> str:
    """Rich renderables as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, color_system=None)
    for item in items:
        console.print(item)
    return out.getvalue().rstrip()


def explain(program: Program, choice: Choice, notices: Sequence[str] = ()) -> str:
    """What was chosen, against every candidate, and why, and what is not split, as text."""
    parts = explanation(program, choice, notices, proposal(program, choice))
    return render(*parts, *map(Flow, map(str, alike(program, choice.plan))))


def explanation(
    program: Program, choice: Choice, notices: Sequence[str] = (), head: Chunked | None = None
) -> tuple[Any, ...]:
    """The same as rich renderables. `head`: what computing it in chunks would save, which is priced by then."""
    parts = [
        headline(program, choice), table(choice), refused(choice), reasons(choice), piped(program, choice),
        held(choice), Flow(str(head)) if head is not None else None, leaves(program, choice.plan),
    ]  # fmt: skip
    return (*[p for p in parts if p is not None], *map(Flow, notices))


def headline(program: Program, choice: Choice) -> Any:
    plan, p = choice.plan, choice.plan.predicted
    axes = " x ".join(f"{a.name} {a.size}" + (f" ({a.tier})" if a.tier else "") for a in plan.mesh.axes)
    where = f" on {plan.provenance.cluster}" if plan.provenance.cluster else ""
    lines = [
        f"plan {plan.name}{where}: mesh {axes}; "
        f"the batch of {program.batch.size} over {'+'.join(batch_axes(plan)) or 'nothing'}{in_shares(plan)}"
    ]
    if p is not None:
        lines.append(
            f"predicted: {duration(p.step_s)} per step, peak {size(p.peak_bytes)} of {size(choice.memory)} per device; "
            "sent per device and step: " + (", ".join(f"{t} {size(b)}" for t, b in p.tiers.items()) or "nothing")
        )
        lines += [f"note: {f}" for f in p.findings]
    return Flow("\n".join(lines))


def in_shares(plan: Plan) -> str:
    """The plan's micro-batches in words, after what is said of the batch."""
    m = plan.micro
    if m.any_number:
        return f" in micro-batches of {m.share}, any number of them"
    return f" in {m.count} micro-batches" if m.count > 1 else ""


def table(choice: Choice) -> Table:
    tiers = list(choice.plan.predicted.tiers) if choice.plan.predicted else []
    out = Table(
        "plan",
        "",
        "step",
        "compute",
        "exposed",
        "peak",
        "fits",
        *[f"sent on\n{t}" for t in tiers],
        box=None,
        pad_edge=False,
    )
    _names_first(out, choice)
    for c in sorted(choice.candidates, key=lambda c: (not c.fits(choice.memory), c.step_s)):
        p = c.plan.predicted if c.plan is not None else None
        if p is None:
            continue  # said below the table, where there is room for the reason
        out.add_row(
            c.name,
            _mark(c, choice),
            duration(p.step_s),
            duration(p.detail.get("compute", 0.0)),
            duration(p.detail.get("exposed", 0.0)),
            size(p.peak_bytes),
            "yes" if c.fits(choice.memory) else "no",
            *[size(p.tiers.get(t, 0.0)) for t in tiers],
        )
    return out


# What holds memory, in the order of the table; what the scorer calls otherwise is summed up as "other".
_KINDS = ("parameter", "optimizer", "gradients", "results", "activations", "communication", "temporaries")


def held(choice: Choice) -> Table | Flow | None:
    """What holds memory at the peak, in the chosen plan and in each preset: where they differ. One plan's in a line."""
    rows = [c for c in choice.candidates if c.plan is not None and c.plan.predicted is not None]
    rows = [c for c in rows if not c.searched or c.name == choice.plan.name]
    if len(rows) < 2:
        by = peak_by(choice.plan)
        return Flow("at the peak: " + ", ".join(f"{k} {size(v)}" for k, v in by.items())) if by else None
    memory = [c.plan.predicted.memory for c in rows]  # type: ignore[union-attr]
    # A kind that is little under every plan goes to the rest: eight columns fit no terminal.
    shown = [k for k in _KINDS if any(m.get(k, 0.0) >= 0.05 * sum(m.values()) for m in memory)]
    out = Table("bytes at the peak", "", *shown, "other", box=None, pad_edge=False)
    _names_first(out, choice)
    for c, m in zip(rows, memory):
        rest = sum(v for k, v in m.items() if k not in shown)
        out.add_row(c.name, _mark(c, choice), *[size(m.get(k, 0.0)) for k in shown], size(rest))
    return out


def peak_by(plan: Plan) -> dict[str, float]:
    """Class -> bytes per device at the predicted peak, most first; they sum up to the peak. Empty where the prediction
    does not say."""
    found = plan.predicted.memory if plan.predicted is not None else {}
    held = [(k, v) for k, v in found.items() if v and k != "host"]  # the host's memory is another
    return dict(sorted(held, key=lambda kv: -kv[1]))


def _mark(c: Candidate, choice: Choice) -> str:
    return "<" if c.plan is not None and c.plan.name == choice.plan.name else ""


def _names_first(out: Table, choice: Choice) -> None:
    """In a narrow terminal a long name takes several lines; it is neither cut short (then it names no plan) nor gives
    way to the numbers."""
    longest = max((len(c.name) for c in choice.candidates), default=0)
    out.columns[0].overflow, out.columns[0].min_width = "fold", min(13, longest)
    for column in out.columns[1:]:
        column.justify, column.no_wrap = "right", True


def refused(choice: Choice) -> Flow | None:
    """The candidates that do not apply, and why: each reason once."""
    names: dict[str, list[str]] = {}
    for c in choice.candidates:
        if c.plan is None:
            names.setdefault(c.reason, []).append(c.name)
    lines = [
        f"{', '.join(who)} {'do' if len(who) > 1 else 'does'} not apply: {reason}" for reason, who in names.items()
    ]
    return Flow("\n".join(lines)) if lines else None


def reasons(choice: Choice) -> Flow | None:
    """The chosen plan against the runner-up and against what would be faster but does not fit."""
    priced = [
        c for c in choice.candidates if c.plan is not None and c.plan.name != choice.plan.name and c.plan.predicted
    ]
    if not priced or choice.plan.predicted is None:
        return None
    mine, lines = choice.plan.predicted, []
    fitting = [c for c in priced if c.fits(choice.memory)]
    if fitting:
        first = fitting[0]
        behind = mine.step_s - first.step_s
        if 0 < behind <= TIE * first.step_s and choice.plan.name in [c.name for c in choice.candidates]:
            lines.append(
                f"{first.name} is {duration(behind)} faster: too little to tell the two apart, and a plan that has a "
                "name is taken then"
            )
        else:  # slower: a codec that was named, or a plan that was given
            over, why = ("beside", ", as was asked for") if behind > 0 else ("chosen over", "")
            lines.append(f"{over} {first.name}: {against(mine, first)}{why}")
    for c in priced:
        if c.step_s < mine.step_s and not c.fits(choice.memory):
            over = c.plan.predicted.peak_bytes - choice.memory  # type: ignore[union-attr]
            lines.append(f"{c.name} would be faster ({duration(c.step_s)}) but needs {size(over)} more than there is")
    lines += searched(choice)
    lines += compiled(choice)
    return Flow("\n".join(lines)) if lines else None


def compiled(choice: Choice) -> list[str]:
    """What the compiled schedules of the last candidates say, against what was predicted."""
    lines = []
    for c in choice.candidates:
        apart = disagreement(c)
        if c.judged is not None and apart is not None:
            lines.append(
                f"compiled, {c.name} takes {duration(c.judged.step_s)} (predicted {duration(c.step_s)}: {apart:+.0%}) "
                f"and holds {size(c.judged.peak_bytes)}"
            )
        elif c.plan is not None and c.reason:
            lines.append(f"{c.name}: {c.reason}")
    return lines


def piped(program: Program, choice: Choice) -> Flow | None:
    """What pipeline stages would gain, where they would."""
    if not choice.pipelines or choice.plan.predicted is None:
        return None
    best = choice.pipelines[0]
    meshes = list(dict.fromkeys(s.mesh for s in best.stages))
    text = (
        f"with pipeline stages (not executable yet): {best}, {choice.plan.predicted.step_s / best.step_s - 1:.1%} "
        f"faster; each stage on {' or '.join(meshes)}"
    )
    if not program.split.micro:
        text += f". Its micro-batches would not compute the same numbers: {program.split.micro}"
    return Flow(text)


def searched(choice: Choice) -> list[str]:
    """How far the search got, and how good the plan is for certain."""
    if not choice.shapes:
        return []
    opened = f"searched {choice.shapes} meshes with their rules"
    if not choice.complete:
        opened += f", of which time allowed {choice.searched}"
    if choice.gap is None:
        return [opened]
    within = "the best there is" if choice.gap < 5e-4 else f"within {choice.gap:.1%} of the best there is"
    return [f"{opened}: in the search's own model the plan is {within} in that space"]


def against(mine: Any, other: Candidate) -> str:
    """What the chosen prediction has over another candidate's, in words."""
    theirs: Any = other.plan.predicted if other.plan is not None else None
    gain = theirs.step_s / mine.step_s - 1 if mine.step_s else 0.0
    saved = {k: theirs.detail.get(k, 0.0) - mine.detail.get(k, 0.0) for k in ("compute", "exposed")}
    parts = [f"{k} {'+' if d < 0 else '-'}{duration(abs(d))}" for k, d in saved.items() if abs(d) > 5e-8]
    memory = round(theirs.peak_bytes - mine.peak_bytes)
    less = f"{size(abs(memory))} {'less' if memory > 0 else 'more'} memory" if memory else "the same memory"
    if abs(gain) < 5e-4:  # what would read "0.0% faster"
        won = (
            f"and takes {less}"
            if memory > 0
            else f"by {duration(theirs.step_s - mine.step_s)} the faster, with {less}"
            if theirs.step_s - mine.step_s > 5e-8
            else "the two cost the same, and the first that was tried is kept"
        )
        return f"as fast as {other.name}, {won}"
    if memory:
        parts.append(f"memory {'-' if memory > 0 else '+'}{size(abs(memory))}")
    won = f"{gain:.1%} faster" if gain > 0 else f"{mine.step_s / theirs.step_s - 1:.1%} slower"
    return won + (f" ({', '.join(parts)})" if parts else "")


def leaves(program: Program, plan: Plan) -> Table:
    out = Table("largest tensors", "shape", "split", "per device", box=None, pad_edge=False)
    by_path = {a.path: a for a in program.arguments}
    specs = dict(zip(by_path, resolve(program, plan).arguments))
    for path, held in largest_leaves(program, plan):
        a = by_path[path]
        out.add_row(Text(path), Text(typed(a.dtype, a.shape)), Text(spec(specs[path])), size(held))
    whole = [
        a for a in program.arguments if a.role in ("parameter", "optimizer") and a.shape and not any(specs[a.path])
    ]
    if plan.leaves and whole:
        total = sum(a.nbytes for a in whole)
        out.caption = f"whole on every device: {len(whole)} tensors, {size(total)} ({whole[0].path}, ...)"
        out.caption_justify = "left"
    return out


def explain_trace(program: Program) -> str:
    """What each argument was taken for, as text."""
    out = Table("argument", "type", "role", "follows", "comes back as", box=None, pad_edge=False)
    for a in program.arguments:
        follows = program.arguments[a.follows].path if a.follows is not None else ""
        back = (program.result_paths[a.result] or "result") if a.result is not None else ""
        role = f"batch (dimension {a.batch_axis})" if a.batch_axis is not None else a.role
        out.add_row(*map(Text, (a.path, typed(a.dtype, a.shape), role, follows, back)))
    lines = [
        f"batch: {program.batch.size}, found by tracing again at {program.batch.small}"
        if program.batch.small
        else f"batch: {program.batch.size}. {program.batch.reason}",
        *(
            f"layers: {layer.count} x {layer.name} ({len(layer.parameters)} stacked tensors)"
            for layer in program.layers
        ),
        *(f"layers: {u.count} x {u.name} (unrolled)" for u in program.unrolled),
    ]
    if program.captured:
        total = sum(a.nbytes for a in program.arguments if a.role == "constant")
        lines.append(
            f"captured: {len(program.captured)} arrays ({size(total)}) that the step closes over, fixed at their values"
        )
    if program.gradients:
        lines.append(f"the step returns the gradients of {len(program.gradients)} parameters")
    if not program.donate:
        lines.append("donation: off, nothing in the results is known to replace the state")
    return render(Group(*map(Flow, lines), out))
