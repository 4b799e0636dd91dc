"""Writes docs/compatibility.md: every family of the zoo under every preset on every mesh, compared with one device.

    python -m tests.compatibility [--families mlp,vit] [--plans "dp;fsdp=2,tp=4"] [--again] [--minutes 30]

Results go to a file beside the page as they come, so that a run can be stopped and taken up again; family by family,
since what one device computes is worked out once for each. Cells run in another process: if it dies, that is a result
("abort"), and the rest goes on in a new one. `--again` forgets the cells it is given.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

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


# Nothing here is timed, and level 1 compiles twice as fast as the default. (Level 0 of XLA:CPU gives NaN gradients for
# programs that are finite at every other level, on one device too.)
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"


@functools.lru_cache(maxsize=1)
def alone(family: str) -> tuple[Any, str]:
    """The program of a family and its HLO on one device."""
    import jax

    import lensjax
    from tests.lost_batch import on_one_device
    from tests.zoo import FAMILIES

    made = FAMILIES[family].make(with_grads=True)
    state, batch = made.init(jax.random.key(0)), made.batch(jax.random.key(1))
    step = lensjax.parallelize(made.step, plan="dp", cluster="cpu:8", **FAMILIES[family].options)
    step.plan_for(*((state,) if FAMILIES[family].form == "state" else state), batch)
    return step.program, on_one_device(step.program)


def one(family: str, plan: str) -> dict:
    """Runs one cell: {result: "equal" | "refused" | "differs" | "lost" | "error", ...}."""
    from lensjax import LensjaxError
    from tests.lost_batch import collectives, lost
    from tests.same_numbers import TOLERANCE, compare
    from tests.zoo import FAMILIES

    dtype = FAMILIES[family].dtype
    steps: list[Any] = []
    try:
        (d,) = compare(family, plan, steps=1, dtype=dtype, keep=steps.append, sharded_init=False)
    except LensjaxError as e:
        return {"result": "refused", "reason": e.message}
    except AssertionError as e:
        return {"result": "differs", "reason": str(e)}
    except Exception as e:
        return {"result": "error", "reason": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
    text = steps[0].compiled.as_text()
    facts = {"gradients": d.gradients, "loss": d.loss, "tolerance": TOLERANCE[dtype], "collectives": collectives(text)}
    program, whole = alone(family)
    if wrong := lost(program, steps[0].plan, whole, text):
        return {"result": "lost", "reason": f"the batch is lost at {'; '.join(wrong)}", **facts}
    return {"result": "equal", **facts}


def child(cells: Sequence[str]) -> None:
    import jax

    last = None
    for cell in cells:
        family, plan = cell.split(":", 1)
        if family != last:
            jax.clear_caches()
        last = family
        add({"family": family, "plan": plan, **one(family, plan)})


def add(row: dict) -> None:
    with RESULTS.open("a") as f:
        f.write(json.dumps(row) + "\n")


def done() -> dict[tuple[str, str], dict]:
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {(r["family"], r["plan"]): r for r in rows}


def run(cells: Sequence[tuple[str, str]], deadline: float, advance: Callable[[], None]) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    while todo := [c for c in cells if c not in done()]:
        names = [f"{family}:{plan}" for family, plan in todo]
        worker = subprocess.Popen([sys.executable, "-m", "tests.compatibility", "--child", *names], env=env, cwd=ROOT)
        while worker.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(2)
            advance()
        if worker.returncode is None:
            worker.kill()
            worker.wait()
            return
        left = [c for c in todo if c not in done()]
        if worker.returncode and left:
            add({"family": left[0][0], "plan": left[0][1], "result": "abort", "reason": f"exit {worker.returncode}"})


SIGNS = {"equal": "=", "refused": "-"}


def write_page(families: Sequence[str], rows: dict[tuple[str, str], dict]) -> None:
    known = [p for plans in PLANS.values() for p in plans]
    rows = {key: r for key, r in rows.items() if key[0] in families and key[1] in known}
    counts = collections.Counter(r["result"] for r in rows.values())
    equal = [r for r in rows.values() if r["result"] == "equal"]
    worst = max(equal, key=lambda r: r["gradients"] / r["tolerance"], default=None)
    largest = (
        f" The largest difference is {worst['gradients'] / worst['tolerance']:.2f} of its tolerance ({worst['family']} "
        f"under `{worst['plan']}`)."
        if worst
        else ""
    )
    lines = [
        "# Compatibility",
        "",
        "Made by `python -m tests.compatibility`. A cell is one step of a family of `tests/zoo` under a preset on",
        "eight emulated devices, compared with the undecorated step on one device from the same state, and its",
        "compiled HLO searched for a matmul that does more than its share of the batch.",
        "",
        "`=` equal: every gradient within 1e-5 of the largest in float32 (2e-2 in bfloat16 and float16), the loss",
        "within the same, no batch lost. `-` refused, with a reason (below). An empty cell was not run.",
        "",
        f"Run: {len(rows)} of {len(families) * len(known)} cells. "
        + ", ".join(f"{n} {result}" for result, n in counts.most_common())
        + f".{largest}",
        "",
    ]
    for mesh, plans in PLANS.items():
        lines += [f"## Mesh {mesh}", "", "| family | " + " | ".join(f"`{p}`" for p in plans) + " |"]
        lines.append("|---" * (len(plans) + 1) + "|")
        for family in families:
            cells = [rows.get((family, p)) for p in plans]
            shown = [SIGNS.get(c["result"], f"**{c['result']}**") if c else "" for c in cells]
            lines.append(f"| {family} | " + " | ".join(shown) + " |")
        lines.append("")
    reasons = collections.defaultdict(list)
    for r in rows.values():
        if r["result"] != "equal":
            reasons[r["reason"]].append(f"{r['family']} under `{r['plan']}`")
    lines += ["## Reasons", ""] + [f"- {reason}: {', '.join(where)}" for reason, where in sorted(reasons.items())]
    lines += ["", "## Differences and collectives", "", "Largest difference of a gradient over the largest gradient;"]
    lines += ["collectives that stand in the HLO compiled for CPU (which has no reduce-scatter).", ""]
    lines += ["| family | preset | gradients | loss | collectives |", "|---|---|---|---|---|"]
    for (family, plan), r in sorted(rows.items()):
        if "gradients" in r:
            ops = ", ".join(f"{n} {op}" for op, n in sorted(r["collectives"].items())) or "none"
            lines.append(f"| {family} | `{plan}` | {r['gradients']:.1e} | {r['loss']:.1e} | {ops} |")
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", help="comma-separated; default: all")
    parser.add_argument("--plans", help="presets separated by semicolons; default: all")
    parser.add_argument("--again", action="store_true", help="forget what was run of these before")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tests.zoo import FAMILIES

    families = args.families.split(",") if args.families else list(FAMILIES)
    plans = args.plans.split(";") if args.plans else [p for group in PLANS.values() for p in group]
    if args.again:
        kept = [r for (f, p), r in done().items() if f not in families or p not in plans]
        RESULTS.write_text("".join(json.dumps(r) + "\n" for r in kept))
    deadline = time.monotonic() + 60 * args.minutes
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("cells", total=len(families) * len(plans))
        wanted = {(f, p) for f in families for p in plans}
        for family in families:
            cells = [(family, p) for p in plans]
            run(cells, deadline, lambda: bar.update(task, completed=len(wanted & set(done()))))
    write_page(list(FAMILIES), done())
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
