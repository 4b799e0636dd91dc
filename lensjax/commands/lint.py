"""`lensjax lint`: what is wrong with the sharding of any jitted step, compiled for a cluster that is not here."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from lensjax.commands import Result
from lensjax.commands.target import PICTURES, check_writable, load_file, user_code

if TYPE_CHECKING:
    from lensjax.verify.audit import Audit

HELP = "compile a hand-sharded step for a cluster and say what its sharding wastes, by line"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="FILE.py:NAME", help="NAME returns (step, arguments); shapes suffice")
    parser.add_argument("--cluster", metavar="SPEC", help="default: as many nodes of 8 H100 as the step's mesh fills")
    parser.add_argument("--backend", choices=("cuda", "tpu", "cpu"), help="compiler to use, default the cluster's own")
    parser.add_argument(
        "--devices", type=int, help="emulated devices for the file's mesh (default: the cluster's, or 8)"
    )
    parser.add_argument("--flags", default="", help='XLA flags, as in XLA_FLAGS: "--xla_gpu_...=..."')
    parser.add_argument("--trace", metavar="FILE.json", help="write the step's timeline for ui.perfetto.dev")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the step's timeline")
    parser.add_argument("--notes", action="store_true", help="show notes too, not only warnings and errors")


def run(args: argparse.Namespace) -> Result:
    """Exit status 1 when there is a warning or an error."""
    check_writable(args.picture, PICTURES)
    check_writable(args.trace)
    _emulate(args)
    from lensjax.report.progress import steps
    from lensjax.verify.lint import lint

    with steps("lint", quiet=args.json) as say:
        say("loading")
        step, arguments = load_file(args.target)
        say("compiling")
        with user_code(f"the step of {args.target} cannot be traced"):
            made = lint(step, arguments, cluster=args.cluster, backend=args.backend, flags=args.flags or None)
        _write(made, args)
    serious = [f for f in made.findings if f.severity != "note"]
    return Result(_data(made), _show(made, made.findings if args.notes else serious), 1 if serious else 0)


def _emulate(args: argparse.Namespace) -> None:
    """The file may build its mesh on emulated devices: as many as the cluster has, before jax starts."""
    count = args.devices
    if count is None and args.cluster:
        from lensjax.topology.cluster import Cluster

        count = Cluster.parse(args.cluster).devices
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={count or 8}".strip()


def _write(made: Audit, args: argparse.Namespace) -> None:
    from lensjax.verify.picture import draw
    from lensjax.verify.trace import write_trace

    if made.timeline is not None and args.trace:
        write_trace(made.timeline, args.trace, args.target)
    if made.timeline is not None and args.picture:
        draw(made.timeline, args.picture)


def _data(made: Audit) -> dict[str, Any]:
    line = made.timeline
    return {
        "findings": [f.to_json() for f in made.findings if f.severity != "note"],
        "advice": [f.to_json() for f in made.findings if f.severity == "note"],
        "backend": made.artifact.backend,
        "target": made.artifact.target,
        "memory": {"peak": made.peak.bytes, "host": made.peak.host_bytes},
        "tiers": dict(made.traffic.tiers),
        "axes": {"+".join(a) or "none": b for a, b in made.traffic.axes.items()},
        "step_s": line.step if line else None,
        "exposed_s": dict(line.exposed) if line else None,
        "unknown": list(made.unknown),
        "notes": list(made.notes),
    }


def _show(made: Audit, findings: Any) -> tuple[Any, ...]:
    from lensjax.verify.show import finding_lines, memory_table, summary

    return (summary(made), memory_table(made), *finding_lines(findings, made.notes))
