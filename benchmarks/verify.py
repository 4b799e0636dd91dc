"""What `lensjax verify` takes and finds: scale, planned against compiled, false alarms. Writes docs/verify.md.

    python benchmarks/verify.py scale compare families      (each part goes on where it stopped; --fresh starts over)
    python benchmarks/verify.py replan                      (plans the measured rows anew and compiles nothing)
    python benchmarks/verify.py                             (only writes the page from what was measured)

Nothing here needs a device. The planned figures of a row are written to the results before its compile starts. Run
`scale` on an idle machine: it is about time. TPU rows need the extra tpu-aot, the others gpu-aot; rows without their
compiler are left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import verify_page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "verify.json"
PAGE = ROOT / "docs" / "verify.md"

# (target, preset, cluster, examples per device, sequence); the bar in seconds.
SCALE = [
    ("llama3-8b", "dp=64,fsdp=8", "dgx-h100:64", 1, 4096, 60),
    ("llama3-8b", "dp=1024,fsdp=8", "dgx-h100:1024", 1, 4096, 180),
    ("llama3-8b", "fsdp", "tpu-v5e:16x16", 1, 4096, 300),
]
CLUSTERS = {"dgx-h100:32": 8, "dgx-a100-80:4": 8, "gb200-nvl72:2": 8, "tpu-v5e:8x8": 8}
TARGETS = {"llama3-8b": 1, "moe": 1, "vit": 8, "unet": 2}  # examples per device


def plans(devices: int, node: int) -> list[str]:
    """Six plans, inside and across nodes."""
    outer, half = devices // node, node // 2
    return [
        "fsdp", "zero1", f"dp={outer},fsdp={node}", f"fsdp={devices // half},tp={half}",
        f"dp={outer},fsdp=2,tp={half}", f"fsdp={devices // half},tp_sp={half}",
    ]  # fmt: skip


def made(target: str, batch: int, seq: int = 4096):
    if target in ("moe", "vit", "unet"):
        import verify_targets

        return getattr(verify_targets, target)(batch)
    from lensjax.models.targets import target as built_in

    step, state, data = built_in(target, batch, seq)
    return step, (state, data)


def row(target: str, preset: str, cluster_name: str, per_device: int, seq: int, note) -> dict:
    """One proof. `note(planned figures)` is called before the compile."""
    from lensjax.execute.planning import Options, make_plan
    from lensjax.program.program import analyze
    from lensjax.topology.cluster import Cluster
    from lensjax.verify.proof import prove, twice_the_batch

    start = time.perf_counter()
    cluster = Cluster.parse(cluster_name)
    step, args = made(target, per_device * cluster.devices, seq)
    program = analyze(step, args)
    plan = make_plan(program, cluster, Options(plan=preset)).plan
    planned = {"planned_peak": plan.predicted.peak_bytes, "planned_tiers": dict(plan.predicted.tiers)}
    planned["planned_step_s"] = plan.predicted.step_s
    note(planned)
    proof = prove(program, plan, cluster, again=twice_the_batch(program, step), time_limit=1200)
    line = proof.audit.timeline
    return planned | {
        "program": program.fingerprint,
        "seconds": time.perf_counter() - start,
        "compile_s": proof.audit.artifact.seconds,
        "backend": proof.backend,
        "devices": cluster.devices,
        "compiled_peak": proof.audit.peak.bytes,
        "compiled_tiers": dict(proof.audit.traffic.tiers),
        "step_s": line.step if line else None,
        "rows": [[r.kind, "+".join(r.axes), r.planned, r.compiled] for r in proof.traffic],
        "findings": [f"{f.severity} {f.kind} {f.line.rpartition('/')[2]}" for f in proof.findings],
        "unknown": list(proof.audit.unknown),
        "notes": list(proof.audit.notes),
    }


class Results:
    """The results file: written after every step, so that a stop loses one row. A row keeps as `before` what was
    planned for it before it was compiled for the first time: later planners may have learned from it.

    `again`: measure what has been measured before once more.
    """

    def __init__(self, fresh: bool, again: bool = False):
        self.again = again
        self.data = {} if fresh or not RESULTS.exists() else json.loads(RESULTS.read_text())

    def run(self, part: str, key: str, work) -> None:
        rows = self.data.setdefault(part, {})
        old = rows.get(key, {})
        if "seconds" in old and "error" not in old and not self.again:
            return
        kept = {"before": old["before"]} if "before" in old else {}

        def note(planned):
            if planned and not old:
                kept["before"] = planned
            rows[key] = planned | kept
            self.save()

        print(f"{part}: {key}", file=sys.stderr, flush=True)
        try:
            rows[key] = work(note) | kept
        except Exception as e:
            rows[key] = {**rows.get(key, {}), "error": f"{type(e).__name__}: {e}"[:300], "seconds": 0.0}
        self.save()

    def save(self) -> None:
        RESULTS.write_text(json.dumps(self.data, indent=1, sort_keys=True))


def scale(results: Results) -> None:
    for target, preset, cluster, per_device, seq, bar in SCALE:
        if runs(cluster):
            key = f"{target} | {preset} | {cluster}"
            results.run("scale", key, lambda note, a=(target, preset, cluster, per_device, seq): row(*a, note))
            results.data["scale"][key]["bar"] = bar
    results.save()


def compare(results: Results, targets: list[str], clusters: list[str], wanted) -> None:
    """`wanted(preset) -> bool` chooses among the six plans."""
    from lensjax.topology.cluster import Cluster

    for cluster in clusters:
        if not runs(cluster):
            continue
        devices = Cluster.parse(cluster).devices
        for target in targets:
            for preset in filter(wanted, plans(devices, CLUSTERS[cluster])):
                key = f"{target} | {preset} | {cluster}"
                args = (target, preset, cluster, TARGETS[target], 4096)
                results.run("compare", key, lambda note, a=args: row(*a, note))


def replan(results: Results, targets: list[str], clusters: list[str]) -> None:
    """The planned figures of measured rows by the planner as it is now; what was compiled stays. Right as long as the
    same plan still gives the same program: a row whose fingerprint differs is left as it was, and named."""
    from lensjax.execute.planning import Options, make_plan
    from lensjax.program.program import analyze
    from lensjax.topology.cluster import Cluster

    rows = results.data.get("compare", {})
    for cluster_name in clusters:
        cluster = Cluster.parse(cluster_name)
        for target in targets:
            mine = [k for k, r in rows.items() if k.startswith(f"{target} | ") and k.endswith(f" | {cluster_name}")]
            mine = [k for k in mine if "compiled_peak" in rows[k]]
            if not mine:
                continue
            step, args = made(target, TARGETS[target] * cluster.devices)
            program = analyze(step, args)
            for key in mine:
                print(f"replan: {key}", file=sys.stderr, flush=True)
                told = rows[key].setdefault("program", program.fingerprint)
                if told != program.fingerprint:
                    print("  another program now: run compare --fresh", file=sys.stderr)
                    continue
                predicted = make_plan(program, cluster, Options(plan=key.split(" | ")[1])).plan.predicted
                rows[key] |= {"planned_peak": predicted.peak_bytes, "planned_tiers": dict(predicted.tiers)}
                rows[key] |= {"planned_step_s": predicted.step_s, "replanned": True}
                results.save()


def families(results: Results, wanted: list[str]) -> None:
    """The model zoo under presets on 8 H100: what is flagged there is a false alarm until shown otherwise."""
    sys.path.insert(0, str(ROOT))
    import jax

    from tests.zoo import FAMILIES

    for name, family in FAMILIES.items():
        if wanted and name not in wanted:
            continue
        for preset in ("dp", "zero1", "fsdp", "dp=2,fsdp=4", "tp=2,dp=4", "dp=2,fsdp=2,tp=2"):

            def work(note, family=family, preset=preset):
                return family_row(jax, family, preset, note)

            results.run("families", f"{name} | {preset}", work)


def family_row(jax, family, preset: str, note) -> dict:
    import lensjax
    from lensjax.topology.cluster import Cluster
    from lensjax.verify.proof import prove

    start = time.perf_counter()
    case = family.make()
    state = jax.eval_shape(case.init, jax.random.key(0)) if family.form == "state" else case.init(jax.random.key(0))
    batch = jax.eval_shape(case.batch, jax.random.key(1))
    step = lensjax.parallelize(case.step, plan=preset, cluster="dgx-h100:1", **family.options)
    plan = step.plan_for(*((state,) if family.form == "state" else state), batch)
    note({})
    proof = prove(step.program, plan, Cluster.parse("dgx-h100:1"))
    return {
        "seconds": time.perf_counter() - start,
        "findings": [f"{f.severity} {f.kind} {f.line.rpartition('/')[2]}: {f.message}" for f in proof.findings],
        "unknown": list(proof.audit.unknown),
    }


def runs(cluster: str) -> bool:
    from lensjax.verify.devices import missing

    why = missing("tpu" if cluster.startswith("tpu") else "cuda")
    if why:
        print(f"{cluster} is left out: {why}", file=sys.stderr)
    return not why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["scale", "compare", "replan", "families", []]
    parser.add_argument("parts", nargs="*", choices=parts, help="what to measure")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--again", action="store_true", help="measure anew what has been measured")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--families", nargs="*", default=[], help="families: only these of the zoo")
    parser.add_argument("--plans", default="", help="compare: only plans with this word, e.g. tp_sp")
    parser.add_argument("--without", default="\n", help="compare: no plans with this word")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    results = Results(args.fresh, args.again)
    if "scale" in args.parts:
        os.environ["LENSJAX_CACHE"] = tempfile.mkdtemp()  # the time of a compile, not of a lookup
        scale(results)
    if "compare" in args.parts:
        compare(results, args.targets, args.clusters, lambda plan: args.plans in plan and args.without not in plan)
    if "replan" in args.parts:
        replan(results, args.targets, args.clusters)
    if "families" in args.parts:
        families(results, args.families)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(verify_page.page(results.data))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
