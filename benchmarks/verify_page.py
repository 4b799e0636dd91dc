"""The page docs/verify.md, written from what `verify.py` measured."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter


def page(data: dict) -> str:
    rows = data.get("compare", {})
    parts = [
        _HEAD,
        _scale(data.get("scale", {})),
        _compare(rows),
        _CAUSES if rows else "",
        _families(data.get("families", {})),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


_HEAD = """# Proof on a machine without accelerators

Made by `python benchmarks/verify.py`. XLA's own compilers for GPUs and TPUs run here for clusters that do not exist
here; memory is the compiler's buffer assignment, bytes are those of the compiled collectives, both per device. What
this does not prove: the time of a step (kernels are not tuned without a device; step times are estimates from the
compiled schedule)."""


_CAUSES = """## What still differs, and why

Read in the compiled programs of the rows above, buffer by buffer at the peak. The planner does not know of these:

- `fsdp` of the 8B decoder (-8%): over 256 H100 XLA makes the zeros into which the embedding's gradient is summed, 1
  GiB, before the loop of the backward, under other plans after it; over 32 A100 the logits' gradient, 1 GiB, waits for
  the output layer's matmul behind that loop, under other plans it does not.
- the mixture of experts under `tp`: the router's scores lie split over the experts where `top_k` wants them whole, and
  XLA gathers them for the whole batch (16 MiB in each layer and direction) where the router is split.
- the U-Net under `tp`: XLA exchanges pieces of concatenated skips by collective-permute. In this unrolled program it
  puts gradients of weights off to the end of the step on H100, with the activations that they read.
- two devices along `fsdp` beside `dp`: XLA reduces some gradients over both axes at once (0.6% more bytes).
- TPU: XLA:TPU all-reduces and slices some gradients (`reduce_then_slice`), and packs memory in tiles.

Not looked into: the peak of `tp_sp` of the decoder and of the mixture of experts (5 to 12 % above the plan), bytes of
the ViT under `tp` over A100 (8 %), the U-Net on TPUs (its peak is up to 2.1 times the planned one)."""


def _scale(rows: dict) -> str:
    if not rows:
        return ""
    out = ["## Scale", "", "Trace, plan, compile, audit and timeline of one step, on two cores, nothing cached.", ""]
    out.append("| step | devices | seconds | of which compile | bar | peak memory | step (estimated) |")
    out.append("|---|--:|--:|--:|--:|--:|--:|")
    for key, r in rows.items():
        if "error" in r:
            out.append(f"| {_cell(key)} | | {_line(r['error'])} | | | | |")
            continue
        out.append(
            f"| {_cell(key)} | {r['devices']} | {r['seconds']:.0f} | {r['compile_s']:.0f} | {r.get('bar', '')} "
            f"| {gib(r['compiled_peak'])} | {r['step_s'] * 1e3:.0f} ms |"
        )
    return "\n".join(out)


def _compare(rows: dict) -> str:
    done = {k: r for k, r in rows.items() if "compiled_peak" in r}
    if not done:
        return ""
    out = ["## Planned against compiled", "", "The planned figures were written down before each compile.", ""]
    if again := sum(bool(r.get("replanned")) for r in done.values()):
        out[2] = (
            f"Of {len(done)} plans {again} were planned anew after their compile, by a planner that learned "
            "from it (`replan`); the planned figures of the others were written down before their compile."
        )
    out += [_summary(done), *_before(done), ""]
    out += ["| target, plan, cluster | planned peak | compiled peak | | sent, planned | sent, compiled | | findings |",
            "|---|--:|--:|--:|--:|--:|--:|---|"]  # fmt: skip
    for key, r in sorted(rows.items()):
        if key not in done:
            out.append(f"| {_cell(key)} | | | | | | | {_line(r.get('error', 'not finished'))} |")
            continue
        p, c = sum(r["planned_tiers"].values()), sum(r["compiled_tiers"].values())
        out.append(
            f"| {_cell(key)} | {gib(r['planned_peak'])} | {gib(r['compiled_peak'])} "
            f"| {change(r['planned_peak'], r['compiled_peak'])} | {gib(p)} | {gib(c)} | {change(p, c)} "
            f"| {', '.join(f.split()[1] for f in r['findings'] if not f.startswith('note')) or '-'} |"
        )
    return "\n".join(out)


UNROLLED = ("unet",)  # layers written out; the other targets scan over them


def _summary(rows: dict) -> str:
    lines = []
    for backend in sorted({r["backend"] for r in rows.values()}):
        mine = {k: r for k, r in rows.items() if r["backend"] == backend}
        for word, chosen in (("scanned", False), ("unrolled", True)):
            some = [r for k, r in mine.items() if k.startswith(UNROLLED) == chosen]
            if some:
                memory = [memory_error(r) for r in some]
                sent = [tier_error(r) for r in some]
                unknown = sum(bool(r["unknown"]) for r in some)
                lines.append(
                    f"- {backend}, {word}, {len(some)} plans: peak memory differs by {statistics.median(memory):.1%} "
                    f"in the median, {max(memory):.1%} at worst; bytes on a tier by {statistics.median(sent):.1%} and "
                    f"{max(sent):.1%}; {unknown} with an operation that was not understood."
                )
        right, pairs = order(mine)
        if pairs:
            lines.append(f"- {backend}: {right} of {pairs} pairs of plans of one target hold more and less as planned.")
    return "\n".join(lines)


def _before(rows: dict) -> list[str]:
    """What was planned before a cell's first compile: the planner had not learned from these."""
    known = [r | r["before"] for r in rows.values() if r.get("before")]
    lines = []
    for backend in sorted({r["backend"] for r in known}):
        mine = [r for r in known if r["backend"] == backend]
        memory, sent = [memory_error(r) for r in mine], [tier_error(r) for r in mine]
        lines.append(
            f"- {backend}, {len(mine)} plans that the planner had not learned from, as written down before their first "
            f"compile: peak {statistics.median(memory):.1%} in the median, {max(memory):.1%} at worst; bytes on a "
            f"tier {statistics.median(sent):.1%} and {max(sent):.1%}."
        )
    return lines


def memory_error(r: dict) -> float:
    return abs(r["planned_peak"] / r["compiled_peak"] - 1)


def order(rows: dict) -> tuple[int, int]:
    """(pairs of plans whose peaks are ordered as planned, pairs whose compiled peaks differ by more than 5 %)."""
    right = pairs = 0
    for (k, a), (other, b) in itertools.combinations(sorted(rows.items()), 2):
        same = (k.split(" | ")[0], k.split(" | ")[2]) == (other.split(" | ")[0], other.split(" | ")[2])
        if same and not 0.95 < a["compiled_peak"] / b["compiled_peak"] < 1.05:
            pairs += 1
            planned, compiled = (a[x] < b[x] for x in ("planned_peak", "compiled_peak"))
            right += planned == compiled
    return right, pairs


def tier_error(r: dict) -> float:
    """The largest relative difference of bytes on a tier that carries at least a percent of the traffic."""
    total = sum(r["compiled_tiers"].values()) or 1.0
    names = [n for n in {*r["planned_tiers"], *r["compiled_tiers"]}
             if max(r["planned_tiers"].get(n, 0), r["compiled_tiers"].get(n, 0)) > 0.01 * total]  # fmt: skip
    return max(
        (abs(r["planned_tiers"].get(n, 0) / max(r["compiled_tiers"].get(n, 0), 1.0) - 1) for n in names), default=0.0
    )


def _families(rows: dict) -> str:
    if not rows:
        return ""
    done = {k: r for k, r in rows.items() if "findings" in r}
    flagged = {k: [f for f in r["findings"] if not f.startswith("note")] for k, r in done.items()}
    flagged = {k: v for k, v in flagged.items() if v}
    out = ["## The model zoo", ""]
    out += [
        f"{len(done)} of {len(rows)} pairs of family and preset compiled for 8 H100, {len(flagged)} with a finding.",
        "",
    ]
    if flagged:
        out += ["Which of these are faults of a plan, which are inherent to the step, is not sorted out.", ""]
    out += [f"- {_cell(k)}: {'; '.join(v)[:300]}" for k, v in sorted(flagged.items())]
    reasons = Counter(_line(r["error"]) for r in rows.values() if "error" in r)
    out += [f"- not applicable, {n}: {why}" for why, n in reasons.most_common(8)]
    return "\n".join(out)


def _line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _cell(text: str) -> str:
    return text.replace(" | ", ", ")


def gib(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.1f} MiB"


def change(planned: float, compiled: float) -> str:
    return f"{compiled / planned - 1:+.1%}" if planned else "new"
