"""An independent judge: the chosen plan and the best preset, both compiled and timed by the compiled schedule.

    nice -n 19 python benchmarks/search_judge.py [--only WORD] [--json]

For each target and machine the search chooses, and the best preset is the fastest that fits by the same scorer. Both
are compiled ahead of time for the machine's devices (extras gpu-aot and tpu-aot; no device is needed) and timed by the
compiled schedule (`lensjax.verify`), which knows nothing of the search. Prints wins, ties (within 1 %) and losses of
the choice, and whether any loss is above 3 %.
"""

from __future__ import annotations

import argparse
import json
import os

TARGETS = (
    ("llama3-8b", 512, 8192, ("dgx-h100:32", "p4d:32", "tpu-v5e:16x16")),
    ("gpt3-tiny", 64, 128, ("dgx-h100:1", "p3.16xlarge:2", "tpu-v5e:4x4")),
    ("mixtral-8x7b", 256, 4096, ("dgx-h100:8", "p4d:16", "tpu-v5e:8x8")),
    ("t5-11b", 256, 512, ("dgx-h100:4", "p4d:8", "tpu-v5e:8x8")),
    ("vit-g", 2048, None, ("dgx-h100:4", "p4d:8", "tpu-v5e:8x8")),
    ("wide-resnet-1b", 1024, None, ("dgx-h100:1", "p3.16xlarge:2", "tpu-v5e:4x4")),
    ("unet-sd", 1024, None, ("dgx-h100:4", "p4d:8", "tpu-v5e:8x8")),
    ("dlrm", 65536, None, ("dgx-h100:2", "p4d:4", "tpu-v5e:4x4")),
)
TIE, LOSS = 0.01, 0.03


def judged(program, plan, cluster) -> float:
    """Seconds of a step by the compiled schedule."""
    from lensjax._errors import CompileError
    from lensjax.verify.proof import prove

    proof = prove(program, plan, cluster)
    if proof.backend != cluster.device.platform or proof.audit.timeline is None:
        raise CompileError(f"no compiler for {cluster.device.platform} is installed: nothing was judged")
    return proof.audit.timeline.step


def row(name, batch, seq, spec):
    from lensjax.models.targets import target
    from lensjax.program.program import analyze
    from lensjax.search.choose import choose
    from lensjax.topology.cluster import Cluster

    cluster = Cluster.parse(spec)
    step, *arguments = target(name, batch, seq)
    program = analyze(step, tuple(arguments))
    choice = choose(program, cluster)
    names = set(choice.problem.preset_names())
    preset = next(c for c in choice.candidates if c.name in names and c.fits(choice.memory))
    mine = judged(program, choice.plan, cluster)
    theirs = mine if choice.plan.name == preset.name else judged(program, preset.plan, cluster)
    return {
        "target": name, "cluster": spec, "chosen": choice.plan.name, "preset": preset.name,
        "predicted_s": choice.plan.predicted.step_s, "predicted_preset_s": preset.step_s,
        "judged_s": mine, "judged_preset_s": theirs, "change": mine / theirs - 1,
    }  # fmt: skip


def main():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this word in target or machine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from lensjax._errors import LensjaxError

    rows = []
    for name, batch, seq, machines in TARGETS:
        for spec in machines:
            if args.only not in f"{name} {spec}":
                continue
            try:
                r = row(name, batch, seq, spec)
            except LensjaxError as e:
                r = {"target": name, "cluster": spec, "error": e.message}
            rows.append(r)
            if not args.json:
                text = r.get("error") or "{chosen} {judged_s:.4f} s, {preset} {judged_preset_s:.4f} s, {change:+.1%}"
                text = text.format(**r)
                print(f"{name} on {spec}: {text}", flush=True)
    changes = [r["change"] for r in rows if "change" in r]
    summary = {
        "wins": sum(c < -TIE for c in changes),
        "ties": sum(abs(c) <= TIE for c in changes),
        "losses": sum(c > TIE for c in changes),
        "above_3_percent": sum(c > LOSS for c in changes),
        "not_judged": len(rows) - len(changes),
    }
    print(json.dumps({"schema": 1, "rows": rows, "summary": summary}) if args.json else summary)


if __name__ == "__main__":
    main()
