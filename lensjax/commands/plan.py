"""`lensjax plan`: the plan for a step on a cluster, with no device and nothing run."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from lensjax.commands import Result
from lensjax.commands.target import PICTURES, add_target, check_writable, load_target, user_code

HELP = "plan a training step for a cluster, without any device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--cluster", required=True, metavar="SPEC", help="dgx-h100:32, cpu:2x4, or a YAML/JSON file")
    parser.add_argument("--plan", help="price this preset or plan file instead of choosing")
    parser.add_argument("--memory", type=float, help="bytes per device to stay within (default: the device's)")
    parser.add_argument(
        "--search", metavar="STRATEGY", help="who looks for plans: milp (default), greedy, exhaustive, ..."
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after that long with the best so far")
    parser.add_argument(
        "--compress", metavar="CODEC", default="off", help="gradients cross the slowest tier as codes: int8, auto, ..."
    )
    parser.add_argument(
        "--secondary", metavar="CODEC", help="weights cross the slowest tier once a step, for a copy inside each node"
    )
    parser.add_argument("--judge", action="store_true", help="compile the last few candidates and decide by that")
    parser.add_argument(
        "--explain", metavar="PATH", help="also say why this tensor is split so, and what else would cost"
    )
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan")
    parser.add_argument("--picture", metavar="FILE.png", help="draw what holds the memory, from start to end of a step")


def run(args: argparse.Namespace) -> Result:
    import os

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # planning needs no device, and must not take one
    from lensjax.execute.planning import Options, make_plan
    from lensjax.program.program import analyze
    from lensjax.report.chunks import proposal
    from lensjax.report.explain import explanation
    from lensjax.report.explain_tensor import alternatives, explain_tensor, find
    from lensjax.report.progress import steps
    from lensjax.topology.cluster import Cluster

    check_writable(args.out)
    check_writable(args.picture, PICTURES)
    cluster = Cluster.parse(args.cluster)
    seconds: dict[str, float] = {}
    with steps("planning", quiet=args.json) as progress:
        progress("tracing")
        step, arguments = load_target(args)
        with user_code(f"the step of {args.target} cannot be traced"):
            program = analyze(step, arguments, seconds=seconds)
        if args.explain:
            find(program, args.explain)  # a wrong path is said before the search, not after it
        start = time.perf_counter()
        options = Options(
            plan=args.plan,
            memory=args.memory,
            report=progress,
            search=args.search,
            budget=args.budget,
            judge=args.judge,
            compress=args.compress,
            secondary=args.secondary,
        )
        choice = make_plan(program, cluster, options)
        seconds["search"] = time.perf_counter() - start
        progress("what pipeline stages would gain")
        start = time.perf_counter()
        choice.pipelines  # noqa: B018 (found here, where it is timed)
        seconds["pipelines"] = time.perf_counter() - start
    if args.out:
        choice.plan.save(args.out)
    if args.picture:
        from lensjax.cost.composition import composition_of
        from lensjax.report.memory import draw

        title = f"{args.target} under {choice.plan.name} on {args.cluster}"
        draw(composition_of(program, choice.plan, cluster), args.picture, title, choice.memory)
    head = proposal(program, choice)
    data = _data(choice, seconds) | {"chunks": _chunked(head)}
    shown: tuple[Any, ...] = explanation(program, choice, head=head)
    if args.explain:
        data["tensor"] = [dataclasses.asdict(a) for a in alternatives(choice, args.explain)]
        shown = (*shown, explain_tensor(program, choice, args.explain))
    return Result(data, (*shown, "seconds: " + ", ".join(f"{k} {v:.1f}" for k, v in seconds.items())))


def _data(choice: Any, seconds: dict[str, float]) -> dict[str, Any]:
    from lensjax.report.explain import peak_by

    p = choice.plan.predicted
    return {
        "plan": choice.plan.to_dict(),
        "predicted": {"step_s": p.step_s, "peak_bytes": p.peak_bytes, "tiers": dict(p.tiers)},
        "peak_by": peak_by(choice.plan),
        "presets": [_row(c, choice.memory) for c in choice.candidates if not c.searched],
        "pipelines": [_pipelined(p, choice) for p in choice.pipelines],
        "proposals": [_row(c, choice.memory) for c in choice.candidates if c.searched],
        "gap": choice.gap,
        "bound_s": choice.bound,
        "shapes": {"opened": choice.searched, "all": choice.shapes, "complete": choice.complete},
        "seconds": seconds,
    }


def _chunked(found: Any) -> dict[str, Any] | None:
    """What the head in chunks would do, where logits dominate; `chunks` is null where it cannot be."""
    if found is None:
        return None
    made = {"logits_bytes": found.logits, "saved_bytes": found.saved, "slower_s": found.slower}
    return {"chunks": found.plan.chunks if found.plan else None, "reason": found.reason or None, **made}


def _pipelined(p: Any, choice: Any) -> dict[str, Any]:
    return {
        "stages": p.pipeline.stages,
        "schedule": p.pipeline.schedule,
        "sizes": p.pipeline.sizes,
        "devices": p.devices,
        "micro": p.micro,
        "step_s": p.step_s,
        "gain": choice.plan.predicted.step_s / p.step_s - 1,
        "bubble": p.bubble,
        "peak_bytes": p.peak_bytes,
        "same_numbers": bool(choice.problem.program.split.micro),
        "meshes": [s.mesh for s in p.stages],
    }


def _row(c: Any, memory: float) -> dict[str, Any]:
    p = c.plan.predicted if c.plan is not None else None
    return {
        "name": c.name,
        "step_s": p.step_s if p else None,
        "peak_bytes": p.peak_bytes if p else None,
        "tiers": dict(p.tiers) if p else None,
        "fits": c.fits(memory),
        "reason": c.reason or None,
        "model_s": c.inner_s,
        "compiled_s": c.judged.step_s if c.judged else None,
    }
