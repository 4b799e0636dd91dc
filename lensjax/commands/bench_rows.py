"""What `lensjax bench` recorded, as rows, a summary and a table; a picture; and rows for calibration."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def rows(events: Sequence[dict[str, Any]], plans: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each plan. Seconds, bytes; `result`: measured, out of memory, refused, crashed or unfinished."""
    return [_row([e for e in events if e["plan"] == name], name) for name in plans]


def _row(mine: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    last = {e["event"]: e for e in mine}
    seconds = [s for e in mine if e["event"] == "visit" for s in e["seconds"]]
    failed, plan, compiled = last.get("failed"), last.get("plan", {}), last.get("compiled", {})
    told = [e["peak_bytes"] for e in mine if e["event"] == "visit" and e["peak_bytes"] is not None]
    result = "measured" if seconds else "unfinished"
    if failed is not None:
        crashed = failed.get("crashed", False)
        result = "out of memory" if failed.get("out_of_memory") else "crashed" if crashed else "refused"
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [None] * 3
    return {
        "plan": name,
        "chosen": plan.get("chosen"),
        "mesh": plan.get("mesh"),
        "batch": plan.get("batch"),
        "result": result,
        "reason": failed["reason"] if failed is not None else None,
        "steps": len(seconds),
        "measured_s": statistics.median(seconds) if seconds else None,
        "quartiles_s": [quartiles[0], quartiles[2]],
        "predicted_s": plan.get("predicted_s"),
        "lower_s": compiled.get("lower_s"),
        "compile_s": compiled.get("compile_s"),
        "peak_bytes": max(told) if told else None,
        "compiled_peak_bytes": compiled.get("compiled_peak_bytes"),
        "predicted_peak_bytes": plan.get("predicted_peak_bytes"),
        "tiers": compiled.get("tiers"),
        "predicted_tiers": plan.get("predicted_tiers"),
    }


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`order`: the part of all pairs of different plans that the prediction orders as the measurement does (pairs that
    are equal in either are left out); `regret`: how much slower the plan predicted fastest is than the fastest
    measured, as a fraction; `best`: the fastest measured."""
    both = {r["chosen"]: r for r in found if r["result"] == "measured" and r["predicted_s"] is not None}
    pairs = [
        (a["measured_s"] - b["measured_s"]) * (a["predicted_s"] - b["predicted_s"])
        for a, b in itertools.combinations(both.values(), 2)
    ]
    pairs = [p for p in pairs if p]
    best = min(both.values(), key=lambda r: r["measured_s"], default=None)
    first = min(both.values(), key=lambda r: r["predicted_s"], default=None)
    return {
        "order": sum(p > 0 for p in pairs) / len(pairs) if pairs else None,
        "pairs": len(pairs),
        "best": best["plan"] if best else None,
        "predicted_best": first["plan"] if first else None,
        "regret": first["measured_s"] / best["measured_s"] - 1 if first and best else None,
        "out_of_memory": [r["plan"] for r in found if r["result"] == "out of memory"],
    }


def table(found: Sequence[dict[str, Any]], cluster: str) -> Any:
    from rich.table import Table

    from lensjax._units import duration, size

    tiers = list(dict.fromkeys(t for r in found for t in (r["tiers"] or {})))
    names = ("plan", "measured", "predicted", "compile", "peak", "planned\npeak")
    out = Table(
        *names, *[f"sent on\n{t}" for t in tiers], box=None, pad_edge=False, padding=(0, 1, 0, 0),
        title=cluster, title_justify="left",
    )  # fmt: skip
    # In 80 columns a long name takes several lines; it never gives way to the numbers.
    out.columns[0].overflow, out.columns[0].min_width = "fold", min(9, max((len(r["plan"]) for r in found), default=0))
    for column in out.columns[1:]:
        column.justify, column.no_wrap = "right", True
    say = lambda f, x: f(x) if x is not None else "-"
    for r in sorted(found, key=lambda r: (r["measured_s"] is None, r["measured_s"] or 0)):
        name = r["plan"] if r["chosen"] in (None, r["plan"]) else f"{r['plan']} ({r['chosen']})"
        low, high = r["quartiles_s"]
        spread = f" ±{(high - low) / 2 / r['measured_s']:.0%}" if low is not None and r["measured_s"] else ""
        peak = r["peak_bytes"] if r["peak_bytes"] is not None else r["compiled_peak_bytes"]
        measured = say(duration, r["measured_s"]) + spread if r["result"] == "measured" else r["result"]
        out.add_row(
            name, measured, say(duration, r["predicted_s"]), say(duration, r["compile_s"]), say(size, peak),
            say(size, r["predicted_peak_bytes"]), *[say(size, (r["tiers"] or {}).get(t)) for t in tiers],
        )  # fmt: skip
    return out


def sentences(found: Sequence[dict[str, Any]], total: dict[str, Any]) -> list[str]:
    lines = []
    if any(r["quartiles_s"][0] is not None for r in found):
        steps = max(r["steps"] for r in found)
        lines.append(f"measured: the median of {steps} steps, ± half of what lies between the quartiles")
    if total["best"] is not None:
        lines.append(
            f"fastest: {total['best']}; predicted fastest: {total['predicted_best']}, regret {total['regret']:.1%}"
        )
    if total["order"] is not None:
        lines.append(f"{total['order']:.0%} of {total['pairs']} pairs of plans in the predicted order")
    if all(r["peak_bytes"] is None for r in found):
        lines.append("peak: as the compiler planned it; these devices do not tell what they used")
    return lines + [f"{r['plan']}: {r['result']}: {r['reason']}" for r in found if r["reason"]]


def picture(found: Sequence[dict[str, Any]], title: str, path: str) -> None:
    """Measured medians with their quartiles, and what was predicted, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = sorted((r for r in found if r["measured_s"] is not None), key=lambda r: -r["measured_s"])
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.5 * max(1, len(shown))), layout="constrained")
    for i, r in enumerate(shown):
        low, high = (q if q is not None else r["measured_s"] for q in r["quartiles_s"])
        spread = [[max(r["measured_s"] - low, 0) * 1e3], [max(high - r["measured_s"], 0) * 1e3]]
        axes.barh(i, r["measured_s"] * 1e3, xerr=spread, color="tab:blue", alpha=0.8, ecolor="0.2", capsize=3)
        axes.plot(r["predicted_s"] * 1e3, i, marker="D", color="tab:orange", markersize=7, linestyle="none")
    axes.plot([], [], marker="D", color="tab:orange", linestyle="none", label="predicted")
    axes.barh(0, 0, color="tab:blue", alpha=0.8, label="measured: median and quartiles")
    names = [r["plan"] if r["chosen"] in (None, r["plan"]) else f"{r['plan']} ({r['chosen']})" for r in shown]
    axes.set(xlabel="ms per step", title=title, yticks=range(len(shown)), yticklabels=names)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# As data/training.csv has them: what a measured step is, for `lensjax predict` and calibration. Empty: not known.
COLUMNS = (
    *"id,source,year,stack,model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq,gated_mlp,moe_experts".split(","),
    *"moe_topk,accelerator,n_devices,devices_per_node,dp,fsdp,tp,pp,vpp,cp,ep,sp,micro_batch,global_batch".split(","),
    *"grad_accum,recompute,precision,step_time_s,tflops_per_device,mfu,tokens_per_s_per_device".split(","),
    *"peak_mem_gib,notes".split(","),
)


def write_rows(found: Sequence[dict[str, Any]], about: dict[str, Any], path: str) -> None:
    """The measured plans as CSV, one row each."""
    with open(path, "w", newline="", encoding="utf-8") as f:
        out = csv.DictWriter(f, COLUMNS, restval="")
        out.writeheader()
        for i, r in enumerate(x for x in found if x["result"] == "measured"):
            mesh = r["mesh"] or {}
            peak = r["peak_bytes"]
            out.writerow({
                "id": f"bench-{i:04d}", "source": "lensjax bench", "year": about["year"], "stack": about["stack"],
                "model": Path(about["target"]).name, "accelerator": about["accelerator"],
                "n_devices": about["devices"], "devices_per_node": about["devices_per_node"],
                "dp": mesh.get("dp", mesh.get("zero1", "")), "fsdp": mesh.get("fsdp", ""), "tp": mesh.get("tp", ""),
                "ep": mesh.get("ep", ""), "cp": mesh.get("cp", ""), "global_batch": r["batch"],
                "step_time_s": f"{r['measured_s']:.6g}",
                "peak_mem_gib": f"{peak / 2**30:.4g}" if peak else "", "notes": f"plan={r['chosen']}; measured=step",
            })  # fmt: skip
