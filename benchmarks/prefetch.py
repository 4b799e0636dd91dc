"""What gathering weights one layer ahead is worth, compiled for H100s that are not here: the table of docs/comm.md.

    python benchmarks/prefetch.py

Each row is a plan, compiled by XLA's own GPU compiler without flags; seconds are of `lensjax verify`'s timeline, a walk
over the compiled schedule at the speeds of datasheets and published measurements. Nothing was run.
"""

from __future__ import annotations

from lensjax.cost.price import price
from lensjax.models import target
from lensjax.program.program import analyze
from lensjax.search.choose import tier_names
from lensjax.search.presets import preset
from lensjax.topology import Cluster
from lensjax.verify.proof import prove

ROWS = (("dgx-h100:1", 8, 4096), ("dgx-h100:2", 16, 4096), ("dgx-h100:2", 16, 1024))


def row(spec: str, batch: int, seq: int, on: bool) -> str:
    cluster = Cluster.parse(spec)
    step, state, example = target("llama3-8b", batch, seq)
    program = analyze(step, (state, example))
    plan = preset("fsdp:again", program, cluster.devices, tier_of=tier_names(cluster)).replace(prefetch=on)
    plan = price(program, plan, cluster)
    proof = prove(program, plan, cluster)
    line, planned = proof.audit.timeline, plan.predicted
    assert line is not None and planned is not None
    exposed, sent = sum(line.exposed.values()), sum(proof.audit.traffic.tiers.values())
    cells = [
        f"{spec}, {batch} x {seq}",
        "ahead" if on else "in its layer",
        *(f"{1e3 * s:.0f}" for s in (line.step, line.compute, exposed, planned.step_s)),
        *(f"{b / 2**30:.2f}" for b in (sent, proof.audit.peak.bytes, planned.peak_bytes)),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    print("| llama3-8b, fsdp, batch | gathered | step ms | compute | exposed | predicted | GiB sent | peak | planned |")
    print("|---|---|---|---|---|---|---|---|---|")
    for spec, batch, seq in ROWS:
        for on in (False, True):
            print(row(spec, batch, seq, on), flush=True)


if __name__ == "__main__":
    main()
