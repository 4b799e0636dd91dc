"""`lensjax verify`: a plan's proof. Compiled for the cluster by its own compiler, on a machine that has none of it."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from lensjax.commands import Result
from lensjax.commands.target import PICTURES, add_target, check_writable, load_target, user_code

if TYPE_CHECKING:
    from lensjax.verify.proof import Proof

HELP = "compile a plan for a cluster that is not here and compare it with what was planned"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help='a plan file, or a preset as in plan="fsdp"')
    add_target(parser)
    parser.add_argument("--cluster", required=True, metavar="SPEC", help="dgx-h100:32, tpu-v5e:8x8, or a file")
    parser.add_argument("--backend", choices=("cuda", "tpu", "cpu"), help="compiler to use, default the cluster's own")
    parser.add_argument("--html", metavar="FILE.html", help="write a page with timeline, memory, bytes and findings")
    parser.add_argument("--trace", metavar="FILE.json", help="write the step's timeline for ui.perfetto.dev")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the step's timeline")
    parser.add_argument("--time-limit", type=float, default=1200.0, help="seconds that the compiler may take")


def run(args: argparse.Namespace) -> Result:
    """Exit status 1 when there is a warning or an error."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs here, and no device must be taken
    from lensjax.execute.planning import Options, make_plan
    from lensjax.program.program import analyze
    from lensjax.report.progress import steps
    from lensjax.topology.cluster import Cluster
    from lensjax.verify.proof import prove, twice_the_batch
    from lensjax.verify.show import everything

    check_writable(args.picture, PICTURES)
    for path in (args.html, args.trace):
        check_writable(path)
    cluster = Cluster.parse(args.cluster)
    with steps("verify", quiet=args.json) as say:
        say("tracing")
        step, arguments = load_target(args)
        with user_code(f"the step of {args.target} cannot be traced"):
            program = analyze(step, arguments)
        say("pricing")
        plan = make_plan(program, cluster, Options(plan=args.plan)).plan
        say(f"compiling for {plan.mesh.size} devices")
        again = twice_the_batch(program, step)
        proof = prove(program, plan, cluster, backend=args.backend, again=again, time_limit=args.time_limit)
        _write(proof, args)
    return Result(to_json(proof), everything(proof), 0 if proof.holds else 1)


def _write(proof: Proof, args: argparse.Namespace) -> None:
    from lensjax.verify.page import write_page
    from lensjax.verify.picture import draw
    from lensjax.verify.trace import write_trace

    line = proof.audit.timeline
    if line is not None and args.trace:
        write_trace(line, args.trace, args.target)
    if line is not None and args.picture:
        draw(line, args.picture)
    if args.html:
        write_page(proof, args.html, args.target)


def to_json(proof: Proof) -> dict[str, Any]:
    """The command's JSON. `step_s` is the compiled schedule's, `planned_step_s` the planner's: two estimates."""
    line = proof.audit.timeline
    peak = proof.audit.peak
    return {
        "backend": proof.backend,
        "target": proof.audit.artifact.target,
        "devices": proof.audit.artifact.devices,
        "memory": {"planned_peak": proof.predicted.peak_bytes, "compiled_peak": peak.bytes, "host": peak.host_bytes},
        "allocator": _allocator(proof),
        "tiers": {n: {"planned_bytes": p, "compiled_bytes": c} for n, (p, c) in proof.tiers.items()},
        "collectives": [
            {"kind": r.kind, "axes": list(r.axes), "planned_bytes": r.planned, "compiled_bytes": r.compiled}
            for r in proof.traffic
        ],
        "step_s": line.step if line else None,
        "planned_step_s": proof.predicted.step_s,
        "exposed_s": dict(line.exposed) if line else None,
        "bubble_s": line.bubble if line else None,
        "compile_s": proof.audit.artifact.seconds,
        "findings": [f.to_json() for f in proof.findings if f.severity != "note"],
        "advice": [f.to_json() for f in proof.findings if f.severity == "note"],
        "unknown": list(proof.audit.unknown),
        "notes": list(proof.audit.notes),
    }


def _allocator(proof: Proof) -> dict[str, Any] | None:
    from lensjax.verify.fragments import advice

    found, room = proof.audit.fragmentation, proof.audit.device_memory
    return None if found is None else {**found.to_json(), "advice": advice(found, room)}
