"""Writes docs/compatibility.md: every family of the zoo under every preset on every mesh, compared with one device.

    python -m tests.compatibility [--families mlp,vit] [--plans dp,fsdp] [--again]

Results go to a file beside the page as they come, so that a run can be stopped and taken up again. Each family runs in
a process of its own: if the process dies, that is a result ("abort"), and the rest of the family goes on in another.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "compatibility.jsonl"
PAGE = ROOT / "docs" / "compatibility.md"

PLANS = {
    "8": ["dp", "zero1", "fsdp:again", "fsdp:once", "tp=8", "tp_sp=8", "ep=8"],
    "2x4": [
        *("dp=2,fsdp=4", "zero1=2,fsdp=4", "dp=2,zero1=4", "hsdp=4"),
        *("dp=2,tp=4", "fsdp=2,tp=4", "fsdp=2,tp_sp=4", "dp=2,ep=4"),
    ],
    "4x2": ["dp=4,fsdp=2", "fsdp=4,tp=2", "fsdp=4,tp_sp=2", "dp=4,ep=2"],
    "2x2x2": ["dp=2,zero1=2,fsdp=2", "dp=2,fsdp=2,tp=2", "fsdp=2,ep=2,tp=2"],
}


def one(family: str, plan: str) -> dict:
    """Runs one cell: {result: "equal" | "refused" | "differs" | "error", ...}."""
    from lensjax import LensjaxError
    from tests.same_numbers import TOLERANCE, compare
    from tests.zoo import FAMILIES

    dtype = FAMILIES[family].dtype
    try:
        (d,) = compare(family, plan, steps=1, dtype=dtype)
        return {"result": "equal", "gradients": d.gradients, "loss": d.loss, "tolerance": TOLERANCE[dtype]}
    except LensjaxError as e:
        return {"result": "refused", "reason": e.message}
    except AssertionError as e:
        return {"result": "differs", "reason": str(e)}
    except Exception as e:
        return {"result": "error", "reason": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}


def child(family: str, plans: list[str]) -> None:
    for plan in plans:
        row = {"family": family, "plan": plan, **one(family, plan)}
        with RESULTS.open("a") as f:
            f.write(json.dumps(row) + "\n")


def done() -> dict[tuple[str, str], dict]:
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {(r["family"], r["plan"]): r for r in rows}


def run_family(family: str, plans: list[str], advance) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    while todo := [p for p in plans if (family, p) not in done()]:
        before = len(done())
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.compatibility", "--child", family, *todo], env=env, cwd=ROOT
        )
        while worker.poll() is None:
            try:
                worker.wait(2)
            except subprocess.TimeoutExpired:
                advance(family, len(done()))
        if worker.returncode:
            left = next(p for p in todo if (family, p) not in done())
            with RESULTS.open("a") as f:
                f.write(json.dumps({"family": family, "plan": left, "result": "abort", "reason": f"{before}"}) + "\n")
        advance(family, len(done()))


def write_page(families: dict, rows: dict[tuple[str, str], dict]) -> None:
    signs = {"equal": "=", "refused": "-", "differs": "**differs**", "error": "**error**", "abort": "**abort**"}
    lines = [
        "# Compatibility",
        "",
        "Made by `python -m tests.compatibility`. Each cell is one step of a family under a preset on eight emulated",
        "devices, compared with the undecorated step on one device from the same state: `=` equal (gradients within",
        "1e-5 of the largest in float32, 2e-2 in bfloat16 and float16), `-` refused with a reason (below).",
        "",
    ]
    for mesh, plans in PLANS.items():
        lines += [
            f"## Mesh {mesh}",
            "",
            "| family | " + " | ".join(f"`{p}`" for p in plans) + " |",
            "|---" * (len(plans) + 1) + "|",
        ]
        for family in families:
            cells = [rows.get((family, p)) for p in plans]
            lines.append(f"| {family} | " + " | ".join(signs[c["result"]] if c else "" for c in cells) + " |")
        lines.append("")
    equal = [r for r in rows.values() if r["result"] == "equal"]
    worst = max((r["gradients"] / r["tolerance"], r["family"], r["plan"]) for r in equal)
    counts = collections.Counter(r["result"] for r in rows.values())
    lines += [
        f"{dict(counts)}; the largest difference is {worst[0]:.2f} of its tolerance ({worst[1]} under `{worst[2]}`).",
        "",
    ]
    reasons = collections.defaultdict(list)
    for r in rows.values():
        if r["result"] != "equal":
            reasons[r["reason"]].append(f"{r['family']} under `{r['plan']}`")
    lines += ["## Reasons", ""] + [f"- {reason}: {', '.join(where)}" for reason, where in sorted(reasons.items())]
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", help="comma-separated; default: all")
    parser.add_argument("--plans", help="presets separated by semicolons; default: all")
    parser.add_argument("--again", action="store_true", help="forget what was run before")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], args.child[1:])
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tests.zoo import FAMILIES

    if args.again:
        RESULTS.unlink(missing_ok=True)
    families = args.families.split(",") if args.families else list(FAMILIES)
    plans = args.plans.split(";") if args.plans else [p for group in PLANS.values() for p in group]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(FAMILIES) * len(plans))
        for family in families:
            run_family(family, plans, lambda f, n: bar.update(task, description=f, completed=n))
    write_page(FAMILIES, done())
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
