"""`lensjax bench`: plans measured on the devices that are there, beside what was predicted."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lensjax._errors import UsageError
from lensjax.commands import Result, bench_rows
from lensjax.commands.target import PICTURES, check_writable

HELP = "measure plans on the devices at hand and compare them with what was predicted"
CRASHES = 20  # in a row, one for each plan: more than anyone names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="FILE.py:NAME", help="NAME returns (step, arguments); shapes suffice")
    parser.add_argument(
        "--plans", action="append", metavar="PLANS",
        help='plans separated by commas (best,fsdp,tp=4), or by ";" where they have commas ("best;dp=2,fsdp=4"); '
        "best is the planner's choice (default: best,dp,fsdp)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each plan (default 20)")
    parser.add_argument("--visits", type=int, default=4, help="turns in which they are made (default 4)")
    parser.add_argument("--cluster", metavar="SPEC", help="what the devices are part of (default: the CPUs of JAX)")
    parser.add_argument("--devices", type=int, metavar="N", help="N emulated CPU devices")
    parser.add_argument("--resume", metavar="FILE", help="keep what is measured in FILE, and go on from it")
    parser.add_argument("--png", metavar="FILE", help="draw measured beside predicted")
    parser.add_argument("--rows", metavar="FILE.csv", help="write measured rows that calibration reads")


def run(args: argparse.Namespace) -> Result:
    """Exit status 1 when no plan could be measured."""
    plans = split_plans(args.plans or ["best,dp,fsdp"])
    if args.steps < 1 or args.visits < 1:
        raise UsageError(f"--steps {args.steps} --visits {args.visits}", hint="1 or more")
    if args.devices is not None and args.devices < 1:
        raise UsageError(f"--devices {args.devices}", hint="1 or more; leave it out for those that JAX sees")
    check_writable(args.png, PICTURES)
    for path in (args.rows, args.resume):
        check_writable(path)
    file = args.target.rpartition(":")[0]
    if not file.endswith(".py") or not Path(file).is_file():
        raise UsageError(f"there is no file {file or args.target}", hint="FILE.py:NAME")
    with tempfile.TemporaryDirectory(prefix="lensjax-bench-") as scratch:
        journal = Path(args.resume) if args.resume else Path(scratch) / "journal"
        request = {
            "target": args.target, "plans": plans, "steps": args.steps, "visits": args.visits,
            "cluster": args.cluster, "file": hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16],
            "devices": args.devices,
        }  # fmt: skip
        about, events = _measure(request, journal, Path(scratch), quiet=args.json)
    found = bench_rows.rows(events, plans)
    total = bench_rows.summary(found)
    if args.png:
        bench_rows.picture(found, f"{args.target} on {about['cluster']}", args.png)
    if args.rows:
        bench_rows.write_rows(found, {**about, "target": args.target}, args.rows)
    show = (bench_rows.table(found, about["cluster"]), *bench_rows.sentences(found, total))
    wrote = tuple(f"wrote {path}" for path in (args.png, args.rows) if path)
    measured = any(r["result"] == "measured" for r in found)
    return Result({**about, "rows": found, "summary": total}, (*show, *wrote), 0 if measured else 1)


def split_plans(given: list[str]) -> list[str]:
    """The plans of the command line, each once."""
    found = [p.strip() for text in given for p in text.split(";" if ";" in text else ",")]
    if not all(found):
        raise UsageError(f"--plans {','.join(given)}: a name is missing between two separators")
    return list(dict.fromkeys(found))


def _measure(request: dict[str, Any], journal: Path, scratch: Path, quiet: bool) -> tuple[dict[str, Any], list[Any]]:
    """(about the machine, events): measured in a process of its own; one that dies is started again without the plan
    that it was at."""
    from lensjax.report.progress import steps

    (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
    same = {k: request[k] for k in ("target", "file", "cluster", "devices", "steps", "visits")}
    if not journal.exists() or not journal.read_bytes().strip():
        _append(journal, {"event": "request", "plan": None, **same})
    else:
        first = next(iter(read(journal)), {})
        if first.get("event") != "request":
            raise UsageError(
                f"{journal} is no journal of lensjax bench: its first line is no request",
                hint="choose another file, or one that does not exist yet",
            )
        if differ := [k for k in same if first.get(k) != same[k]]:
            raise UsageError(
                f"{journal} has measurements of another run: {differ[0]} was {first.get(differ[0])}, "
                f"and is now {same[differ[0]]}",
                hint="choose another file, or delete it",
            )
    env = dict(os.environ)
    if request["devices"]:
        flags = [f for f in env.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
        env["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={request['devices']}"])
        env["JAX_PLATFORMS"] = "cpu"
    total = len(request["plans"]) * min(request["visits"], request["steps"])
    with steps("measuring", quiet=quiet) as say:
        for _ in range(CRASHES):
            log = scratch / "log"
            with open(log, "wb") as out:
                command = [sys.executable, "-m", "lensjax.commands._bench_child", str(scratch), str(journal)]
                child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
                try:
                    while child.poll() is None:
                        try:
                            child.wait(timeout=0.5)
                        except subprocess.TimeoutExpired:
                            now = read(journal)
                            say(f"{sum(e['event'] == 'visit' for e in now)}/{total} {now[-1].get('plan') or ''}")
                finally:
                    child.kill()
                    child.wait()
            events = read(journal)
            about = next((e for e in reversed(events) if e["event"] == "about"), None)
            if child.returncode == 0 and about is not None:
                return {k: v for k, v in about.items() if k not in ("event", "plan")}, events
            said = log.read_text(encoding="utf-8", errors="replace").strip()
            signal = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
            told = scratch / "error.json"  # the user's own code may end the process with any status
            if events[-1]["event"] in ("request", "about") or told.exists():
                if told.exists():
                    raise UsageError(**json.loads(told.read_text(encoding="utf-8")))
                why = f"its process ended with {signal}" + (f": {said[-1500:]}" if said else ", and said nothing")
                raise UsageError(f"the measurement could not start: {why}")
            last = said.splitlines()[-1][:300] if said else ""
            why = f"the process died with {signal}" + (f": {last}" if last else "")
            _append(journal, {
                "event": "failed", "plan": events[-1]["plan"], "reason": why, "crashed": True,
                "out_of_memory": child.returncode == -9,
            })  # fmt: skip
    raise UsageError(f"the measurement crashed {CRASHES} times", hint=f"see {journal}")


def read(journal: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal."""
    out = []
    for line in journal.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # the last line of a process that died while it wrote
            continue
        if isinstance(event, dict) and {"event", "plan"} <= event.keys():
            out.append(event)
    return out


def _append(journal: Path, event: dict[str, Any]) -> None:
    with open(journal, "a", encoding="utf-8") as f:
        f.write(json.dumps(event) + "\n")
