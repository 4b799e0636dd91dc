"""An independent judge: the chosen plan and the best preset, both compiled and timed by the compiled schedule.

    nice -n 19 python benchmarks/search_judge.py [--only WORD] [--fresh] [--json]     judges rows, then writes the page
    python benchmarks/search_judge.py --page                                          only writes docs/search_judge.md

For each target and machine the search chooses; the best preset is the fastest that fits by the same scorer, with the
recompute levels and micro-batches that it needs to fit. Both are compiled ahead of time for the machine's devices
(extra gpu-aot, or tpu-aot; no device is needed) and timed by the compiled schedule (`lensjax.verify`), which knows
nothing of the search. Without the machine's compiler a row is not judged, and says so.

Every row is a process of its own and is kept in benchmarks/search_judge.jsonl when it is done: a run goes on where the
last one stopped. --fresh forgets the rows that --only names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "search_judge.jsonl"
PAGE = ROOT / "docs" / "search_judge.md"

# Target -> tokens (None: no sequences), and machine -> examples of the global batch.
TARGETS = {
    "llama3-405b": (8192, {"dgx-h100:2048": 2048, "dgx-h100:256": 512, "dgx-b200:256": 512}),
    "llama3-8b": (8192, {"dgx-h100:32": 512, "p4d:32": 256, "gb200-nvl72:4": 576}),
    "llama3-70b": (8192, {"dgx-h100:64": 512, "p4de:64": 512, "dgx-b200:32": 512}),
    "gpt3-175b": (2048, {"dgx-h100:128": 1536, "p4de:128": 1536, "dgx-b200:64": 1536}),
    "mixtral-8x7b": (4096, {"dgx-h100:16": 256, "p4de:16": 256, "dgx-b200:8": 256}),
    "deepseek-v3": (4096, {"dgx-h100:256": 4096, "p4de:256": 4096, "dgx-b200:128": 4096}),
    "t5-11b": (512, {"dgx-h100:4": 256, "p4d:8": 256, "dgx-b200:4": 256}),
    "vit-g": (None, {"dgx-h100:4": 2048, "p4d:8": 2048, "dgx-b200:4": 2048}),
    "dlrm": (None, {"dgx-h100:2": 65536, "p4d:4": 65536, "dgx-b200:2": 65536}),
    "wide-resnet-1b": (None, {"dgx-h100:1": 1024, "p4d:2": 1024, "dgx-b200:1": 1024}),
    "unet-sd": (None, {"dgx-h100:4": 1024, "p4d:8": 1024, "dgx-b200:4": 1024}),
}
TIE, LOSS = 0.01, 0.03
LIMIT = 1200.0  # seconds of a row


def judged(program, plan, cluster) -> dict:
    """What the compiled step takes by its schedule, and holds."""
    from lensjax._errors import CompileError
    from lensjax.verify.proof import prove

    proof = prove(program, plan, cluster)
    if proof.backend != cluster.device.platform or proof.audit.timeline is None:
        raise CompileError(f"no compiler for {cluster.device.platform} is installed: nothing was judged")
    line = proof.audit.timeline
    return {
        "plan": plan.name, "predicted_s": plan.predicted.step_s, "judged_s": line.step, "compute_s": line.compute,
        "predicted_compute_s": plan.predicted.detail.get("compute"), "planned_peak": plan.predicted.peak_bytes,
        "compiled_peak": proof.audit.peak.bytes, "tiers": proof.tiers, "compile_s": proof.audit.artifact.seconds,
    }  # fmt: skip


def one(name: str, spec: str) -> dict:
    """A row: the choice and the best preset, judged."""
    from lensjax._errors import LensjaxError
    from lensjax.models.targets import target
    from lensjax.program.program import analyze
    from lensjax.search.choose import choose
    from lensjax.topology.cluster import Cluster

    seq, machines = TARGETS[name]
    cluster = Cluster.parse(spec)
    row = {"target": name, "cluster": spec, "devices": cluster.devices, "batch": machines[spec], "seq": seq}
    start = time.perf_counter()
    try:
        step, *arguments = target(name, machines[spec], seq)
        program = analyze(step, tuple(arguments))
        choice = choose(program, cluster)
        row["plan_s"] = time.perf_counter() - start
        preset = next((c.plan for c in choice.candidates if not c.searched and c.fits(choice.memory)), None)
        row["chosen"] = judged(program, choice.plan, cluster)
        if preset is not None:
            row["preset"] = row["chosen"] if preset == choice.plan else judged(program, preset, cluster)
            row["change"] = row["chosen"]["judged_s"] / row["preset"]["judged_s"] - 1
    except LensjaxError as e:
        row["error"] = e.message
    return row


def kept() -> dict[str, dict]:
    """Rows that were judged, by key."""
    lines = ROWS.read_text("utf-8").splitlines() if ROWS.exists() else []
    return {key(r["target"], r["cluster"]): r for r in map(json.loads, lines)}


def key(name: str, spec: str) -> str:
    return f"{name} {spec}"


def write(rows: dict[str, dict]) -> None:
    ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows.values()), "utf-8")


def in_process(name: str, spec: str) -> dict:
    """A row, made by a process of its own with a limit on its time."""
    command = [sys.executable, __file__, "--one", name, spec]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"target": name, "cluster": spec, "error": f"took longer than {LIMIT:.0f} s"}
    if done.returncode:
        return {"target": name, "cluster": spec, "error": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def summary(rows: list[dict]) -> dict:
    """How often the choice is better, as good and worse by the judge."""
    changes = [r["change"] for r in rows if "change" in r]
    alone = sum("error" not in r and "change" not in r for r in rows)
    return {
        "wins": sum(c < -TIE for c in changes) + alone,
        "ties": sum(abs(c) <= TIE for c in changes),
        "losses": sum(c > TIE for c in changes),
        "above_3_percent": sum(c > LOSS for c in changes),
        "only_the_search_fits": alone,
        "not_judged": sum("error" in r for r in rows),
    }


def text(row: dict) -> str:
    """A row for people."""
    if "error" in row:
        return row["error"].splitlines()[0]
    mine = "{plan} {judged_s:.4f} s (planned {predicted_s:.4f} s)".format(**row["chosen"])
    if "preset" not in row:
        return f"{mine}; no preset fits"
    theirs = "{plan} {judged_s:.4f} s (planned {predicted_s:.4f} s)".format(**row["preset"])
    return f"{mine} against {theirs}: {row['change']:+.1%}"


def page(rows: list[dict]) -> str:
    """The page of all rows."""
    s = summary(rows)
    lines = [
        "# The choice against the best preset, judged by the compiled step",
        "",
        "Made by `python benchmarks/search_judge.py` from benchmarks/search_judge.jsonl. For every built-in target on "
        "three machines the plan that the search chooses and the best preset (the fastest that fits by the same "
        "scorer, with the recompute or micro-batches it needs) are compiled ahead of time by XLA's compiler for it, "
        "and the compiled schedule is walked with the machine's links. That walk knows nothing of the search or its "
        "partitioner. Below zero the choice is faster.",
        "",
        f"**{s['wins']} wins, {s['ties']} ties (within {TIE:.0%}), {s['losses']} losses, {s['above_3_percent']} of "
        f"them above {LOSS:.0%}**; {s['only_the_search_fits']} of the wins are rows in which no preset fits; "
        f"{s['not_judged']} rows not judged. {len(rows)} of {sum(len(m) for _, m in TARGETS.values())} rows have been "
        "run; what is not in the table has not.",
        "",
        "| target | machine | devices | batch x tokens | chosen | judged (planned) s | best preset "
        "| judged (planned) s | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        size = f"{r.get('batch', '')}" + (f" x {r['seq']}" if r.get("seq") else "")
        start = f"| {r['target']} | {r['cluster']} | {r.get('devices', '')} | {size} |"
        if "error" in r:
            lines.append(f"{start} not judged: {r['error'].splitlines()[0]} | | | | |")
            continue
        cell = lambda p: f"{p['plan']} | {p['judged_s']:.4g} ({p['predicted_s']:.4g})"
        other = cell(r["preset"]) if "preset" in r else "none fits |"
        lines.append(f"{start} {cell(r['chosen'])} | {other} | {r['change']:+.1%} |" if "change" in r else
                     f"{start} {cell(r['chosen'])} | {other} | |")  # fmt: skip
    return "\n".join(lines) + "\n"


def main():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this word in target or machine")
    parser.add_argument("--fresh", action="store_true", help="judge rows again that were judged before")
    parser.add_argument("--page", action="store_true", help="judge nothing, write the page")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    from lensjax.report.progress import steps

    every = [(name, spec) for name, (_, machines) in TARGETS.items() for spec in machines]
    rows = kept()
    todo = [(n, s) for n, s in every if args.only in key(n, s) and (args.fresh or key(n, s) not in rows)]
    with steps("judging", quiet=args.json) as say:
        for k, (name, spec) in enumerate([] if args.page else todo):
            say(f"{k + 1} of {len(todo)}: {name} on {spec}")
            rows[key(name, spec)] = made = in_process(name, spec)
            write({key(n, s): rows[key(n, s)] for n, s in every if key(n, s) in rows})
            if not args.json:
                print(f"{name} on {spec}: {text(made)}", flush=True)
    found = [rows[key(n, s)] for n, s in every if key(n, s) in rows]
    PAGE.write_text(page(found), "utf-8")
    print(json.dumps({"schema": 1, "rows": found, "summary": summary(found)}) if args.json else summary(found))


if __name__ == "__main__":
    main()
