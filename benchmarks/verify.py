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
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

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
    """The results file: written after every step, so that a stop loses one row."""

    def __init__(self, fresh: bool):
        self.data = {} if fresh or not RESULTS.exists() else json.loads(RESULTS.read_text())

    def run(self, part: str, key: str, work) -> None:
        rows = self.data.setdefault(part, {})
        if key in rows and "seconds" in rows[key]:
            return

        def note(planned):
            rows[key] = planned
            self.save()

        print(f"{part}: {key}", file=sys.stderr, flush=True)
        try:
            rows[key] = work(note)
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


def compare(results: Results, targets: list[str], clusters: list[str]) -> None:
    from lensjax.topology.cluster import Cluster

    for cluster in clusters:
        if not runs(cluster):
            continue
        devices = Cluster.parse(cluster).devices
        for target in targets:
            for preset in plans(devices, CLUSTERS[cluster]):
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


def families(results: Results) -> None:
    """The model zoo under presets on 8 H100: what is flagged there is a false alarm until shown otherwise."""
    sys.path.insert(0, str(ROOT))
    import jax

    from tests.zoo import FAMILIES

    for name, family in FAMILIES.items():
        for preset in ("dp", "zero1", "fsdp", "dp=2,fsdp=4", "tp=2,dp=4", "dp=2,fsdp=2,tp=2"):

            def work(note, family=family, preset=preset):
                return family_row(jax, family, preset, note)

            results.run("families", f"{name} | {preset}", work)


def family_row(jax, family, preset: str, note) -> dict:
    from lensjax.execute.planning import Options, make_plan
    from lensjax.program.program import analyze
    from lensjax.topology.cluster import Cluster
    from lensjax.verify.proof import prove

    start = time.perf_counter()
    case = family.make()
    state = jax.eval_shape(case.init, jax.random.key(0)) if family.form == "state" else case.init(jax.random.key(0))
    args = (*(state if isinstance(state, tuple) and family.form != "state" else (state,)),)
    args = (*args, jax.eval_shape(case.batch, jax.random.key(1)))
    cluster = Cluster.parse("dgx-h100:1")
    program = analyze(case.step, args, **family.options)
    plan = make_plan(program, cluster, Options(plan=preset)).plan
    note({})
    proof = prove(program, plan, cluster)
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


# ---- the page -----------------------------------------------------------------------------------------------------


def page(data: dict) -> str:
    rows = data.get("compare", {})
    parts = [
        _HEAD,
        _scale(data.get("scale", {})),
        _compare(rows),
        _CAUSES if rows else "",
        _families(data.get("families", {})),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


_HEAD = """# Proof on a machine without accelerators

Made by `python benchmarks/verify.py`. XLA's own compilers for GPUs and TPUs run here for clusters that do not exist
here; memory is the compiler's buffer assignment, bytes are those of the compiled collectives, both per device. What
this does not prove: the time of a step (kernels are not tuned without a device; step times are estimates from the
compiled schedule)."""


_CAUSES = """## What still differs, and why

Read in the compiled programs of the rows above, buffer by buffer at the peak. The planner does not know of these:

- `fsdp` of the 8B decoder (-8%): over 256 H100 XLA makes the zeros into which the embedding's gradient is summed, 1
  GiB, before the loop of the backward, under other plans after it; over 32 A100 the logits' gradient, 1 GiB, waits for
  the output layer's matmul behind that loop, under other plans it does not.
- `tp_sp` of decoders: the loss picks each target's logit with the sequence split over the axis that also splits the
  vocabulary. The partitioner moves the logits there and back; XLA gathers their gradient and sums both vocabulary
  gradients whole (all-reduce where the plan has a reduce-scatter), 1 GiB of which is held on A100.
- the mixture of experts under `tp`: the router's scores lie split over the experts where `top_k` wants them whole, and
  XLA gathers them for the whole batch (16 MiB in each layer and direction).
- the U-Net under `tp`: XLA exchanges pieces of concatenated skips by collective-permute. In this unrolled program it
  puts gradients of weights off to the end of the step on H100, with the activations that they read.
- two devices along `fsdp` beside `dp`: XLA reduces some gradients over both axes at once (0.6% more bytes).
- TPU: XLA:TPU all-reduces and slices some gradients (`reduce_then_slice`), and packs memory in tiles."""


def _scale(rows: dict) -> str:
    if not rows:
        return ""
    out = ["## Scale", "", "Trace, plan, compile, audit and timeline of one step, on two cores, nothing cached.", ""]
    out.append("| step | devices | seconds | of which compile | bar | peak memory | step (estimated) |")
    out.append("|---|--:|--:|--:|--:|--:|--:|")
    for key, r in rows.items():
        if "error" in r:
            out.append(f"| {_cell(key)} | | {r['error']} | | | | |")
            continue
        out.append(
            f"| {_cell(key)} | {r['devices']} | {r['seconds']:.0f} | {r['compile_s']:.0f} | {r.get('bar', '')} "
            f"| {gib(r['compiled_peak'])} | {r['step_s'] * 1e3:.0f} ms |"
        )
    return "\n".join(out)


def _compare(rows: dict) -> str:
    done = {k: r for k, r in rows.items() if "compiled_peak" in r}
    if not done:
        return ""
    out = ["## Planned against compiled", "", "The planned figures were written down before each compile.", ""]
    if again := sum(bool(r.get("replanned")) for r in done.values()):
        out[2] = (
            f"Of {len(done)} plans {again} were planned anew after their compile, by the planner as it is now "
            "(`replan`); the planned figures of the others were written down before their compile."
        )
    out += [_summary(done), ""]
    out += ["| target, plan, cluster | planned peak | compiled peak | | sent, planned | sent, compiled | | findings |",
            "|---|--:|--:|--:|--:|--:|--:|---|"]  # fmt: skip
    for key, r in sorted(rows.items()):
        if key not in done:
            out.append(f"| {_cell(key)} | | | | | | | {r.get('error', 'not finished')} |")
            continue
        p, c = sum(r["planned_tiers"].values()), sum(r["compiled_tiers"].values())
        out.append(
            f"| {_cell(key)} | {gib(r['planned_peak'])} | {gib(r['compiled_peak'])} "
            f"| {change(r['planned_peak'], r['compiled_peak'])} | {gib(p)} | {gib(c)} | {change(p, c)} "
            f"| {', '.join(f.split()[1] for f in r['findings'] if not f.startswith('note')) or '-'} |"
        )
    return "\n".join(out)


UNROLLED = ("unet",)  # layers written out; the other targets scan over them


def _summary(rows: dict) -> str:
    lines = []
    for backend in sorted({r["backend"] for r in rows.values()}):
        mine = {k: r for k, r in rows.items() if r["backend"] == backend}
        for word, chosen in (("scanned", False), ("unrolled", True)):
            some = [r for k, r in mine.items() if k.startswith(UNROLLED) == chosen]
            if some:
                memory = [abs(r["planned_peak"] / r["compiled_peak"] - 1) for r in some]
                sent = [abs(tier_error(r)) for r in some]
                unknown = sum(bool(r["unknown"]) for r in some)
                lines.append(
                    f"- {backend}, {word}, {len(some)} plans: peak memory differs by {statistics.median(memory):.1%} "
                    f"in the median, {max(memory):.1%} at worst; bytes on a tier by {statistics.median(sent):.1%} and "
                    f"{max(sent):.1%}; {unknown} with an operation that was not understood."
                )
        right, pairs = order(mine)
        if pairs:
            lines.append(f"- {backend}: {right} of {pairs} pairs of plans of one target hold more and less as planned.")
    return "\n".join(lines)


def order(rows: dict) -> tuple[int, int]:
    """(pairs of plans whose peaks are ordered as planned, pairs whose compiled peaks differ by more than 5 %)."""
    right = pairs = 0
    for (k, a), (other, b) in itertools.combinations(sorted(rows.items()), 2):
        same = (k.split(" | ")[0], k.split(" | ")[2]) == (other.split(" | ")[0], other.split(" | ")[2])
        if same and not 0.95 < a["compiled_peak"] / b["compiled_peak"] < 1.05:
            pairs += 1
            planned, compiled = (a[x] < b[x] for x in ("planned_peak", "compiled_peak"))
            right += planned == compiled
    return right, pairs


def tier_error(r: dict) -> float:
    """The largest relative difference of bytes on a tier that carries at least a percent of the traffic."""
    total = sum(r["compiled_tiers"].values()) or 1.0
    names = [n for n in {*r["planned_tiers"], *r["compiled_tiers"]}
             if max(r["planned_tiers"].get(n, 0), r["compiled_tiers"].get(n, 0)) > 0.01 * total]  # fmt: skip
    return max(
        (abs(r["planned_tiers"].get(n, 0) / max(r["compiled_tiers"].get(n, 0), 1.0) - 1) for n in names), default=0.0
    )


def _families(rows: dict) -> str:
    if not rows:
        return ""
    done = {k: r for k, r in rows.items() if "findings" in r}
    flagged = {k: [f for f in r["findings"] if not f.startswith("note")] for k, r in done.items()}
    flagged = {k: v for k, v in flagged.items() if v}
    out = ["## The model zoo", ""]
    out += [
        f"{len(done)} pairs of family and preset (of 24 x 6) compiled for 8 H100, {len(flagged)} with a finding.",
        "",
    ]
    out += [f"- {_cell(k)}: {'; '.join(v)[:300]}" for k, v in sorted(flagged.items())]
    reasons: dict[str, int] = {}
    for r in rows.values():
        if "error" in r:
            reasons[r["error"][:120]] = reasons.get(r["error"][:120], 0) + 1
    out += [f"- not applicable, {n}: {why}" for why, n in sorted(reasons.items(), key=lambda kv: -kv[1])[:8]]
    return "\n".join(out)


def _cell(text: str) -> str:
    return text.replace(" | ", ", ")


def gib(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.1f} MiB"


def change(planned: float, compiled: float) -> str:
    return f"{compiled / planned - 1:+.1%}" if planned else "new"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["scale", "compare", "replan", "families", []]
    parser.add_argument("parts", nargs="*", choices=parts, help="what to measure")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    results = Results(args.fresh)
    if "scale" in args.parts:
        os.environ["LENSJAX_CACHE"] = tempfile.mkdtemp()  # the time of a compile, not of a lookup
        scale(results)
    if "compare" in args.parts:
        compare(results, args.targets, args.clusters)
    if "replan" in args.parts:
        replan(results, args.targets, args.clusters)
    if "families" in args.parts:
        families(results)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(results.data))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
