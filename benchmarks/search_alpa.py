"""Alpa's published rows without a pipeline, predicted (arXiv:2201.12023 and its artifact, results_e2e_ref.tsv).

    python benchmarks/search_alpa.py [--only WORD] [--json]

Alpa's "intra-only" plans split every operation over all devices of p3.16xlarge nodes (8 V100-16GB, 25 Gb/s between
nodes): what a plan without pipeline stages can do. Its mixed plans have stages, which lensjax neither runs nor prices;
these rows are not here. Alpa accumulates gradients over micro-batches; each row is priced at one micro-batch of the
size of its published plan, so reductions count once for each micro-batch and rows across nodes are predicted too slow.
What is compared is therefore the order of the rows and where splitting across nodes collapses, not TFLOPS.
"""

from __future__ import annotations

import argparse
import json
import os

# (model, GPUs, examples of a micro-batch, published TFLOPS per GPU of the intra-only plan)
GPT = (
    ((1024, 24, 16), 1, 2, 46.20),
    ((1536, 24, 16), 2, 8, 59.54),
    ((2048, 24, 32), 4, 8, 58.36),
    ((2560, 32, 32), 8, 8, 50.82),
    ((4096, 32, 32), 16, 16, 48.42),
    ((5120, 48, 40), 32, 32, 35.07),
    ((8192, 48, 64), 64, 64, 2.11),
)
RESNET = (
    ("250m", 1, 64, 8.37),
    ("500m", 2, 64, 8.48),
    ("1b", 4, 64, 8.15),
    ("2b", 8, 64, 7.71),
    ("4b", 16, 64, 4.72),
    ("6.8b", 32, 64, 1.96),
    ("13b", 64, 64, 0.70),
)


def rows():
    import jax.numpy as jnp

    from lensjax.models.decoder import Config

    for (width, layers, heads), devices, batch, published in GPT:
        config = Config(
            vocab=51_200, width=width, layers=layers, heads=heads, kv_heads=heads, mlp=4 * width, norm="layer",
            gated=False, bias=True, positions="learned", tied=True, max_seq=1024, dtype=jnp.float16,
        )  # fmt: skip
        yield f"gpt {width}x{layers}", config, devices, batch, 1024, published
    for name, devices, batch, published in RESNET:
        yield f"wide-resnet-{name}", f"wide-resnet-{name}", devices, batch, None, published


def cluster_of(devices):
    """A part of a node, or whole nodes."""
    import dataclasses

    from lensjax.topology.cluster import Cluster

    if devices >= 8:
        return Cluster.parse(f"p3.16xlarge:{devices // 8}")
    node = Cluster.parse("p3.16xlarge:1")
    tiers = (dataclasses.replace(node.tiers[0], size=devices),)
    return dataclasses.replace(node, name=f"{devices} of a p3.16xlarge", tiers=tiers)


def predict(target_, devices, batch, seq):
    """Predicted TFLOPS per GPU of the chosen plan (arithmetic of the step as written, recomputation included)."""
    from lensjax.models.targets import target
    from lensjax.program.program import analyze
    from lensjax.search.choose import choose

    step, *arguments = target(target_, batch, seq)
    program = analyze(step, tuple(arguments))
    choice = choose(program, cluster_of(devices))
    whole = choice.pricer.partitioned(choice.problem.preset("dp"))
    flops = sum(o.flops * o.trips for o in whole.operations)
    seconds = choice.plan.predicted.step_s
    return choice.plan.name, seconds, flops / seconds / 1e12


def main():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this word")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from scipy.stats import kendalltau

    from lensjax._errors import LensjaxError

    out = []
    for name, config, devices, batch, seq, published in rows():
        if args.only not in name:
            continue
        try:
            chosen, seconds, tflops = predict(config, devices, batch, seq)
            row = {"row": name, "gpus": devices, "chosen": chosen, "step_s": seconds, "tflops": tflops}
        except LensjaxError as e:
            row = {"row": name, "gpus": devices, "error": e.message.splitlines()[0]}
        row["published_tflops"] = published
        out.append(row)
        if not args.json:
            said = row.get("error") or f"{row['chosen']}: {row['tflops']:.2f} TFLOPS per GPU"
            print(f"{name} on {devices}: {said}; published {published}", flush=True)
    both = [(r["tflops"], r["published_tflops"]) for r in out if "tflops" in r]
    summary = {"rows": len(out), "tau": float(kendalltau(*zip(*both)).statistic) if len(both) > 2 else None}
    print(json.dumps({"schema": 1, "rows": out, "summary": summary}) if args.json else summary)


if __name__ == "__main__":
    main()
