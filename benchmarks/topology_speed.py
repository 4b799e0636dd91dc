"""Processor time of what planning for a large cluster asks of the topology.

    python benchmarks/topology_speed.py [--json]

Bars (one core): a mesh of 16,384 devices placed in under 2 s; a million prices of one collective in about a second.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives import collective_time
from lensjax.topology.mesh import placement

AXES = {"data": 64, "fsdp": 32, "model": 8}


def rows() -> list[dict[str, Any]]:
    sizes = np.random.default_rng(0).uniform(1e3, 1e9, 1_000_000)
    nodes = Cluster.parse("dgx-h100:4")
    tpu = {"data": 256, "fsdp": 16, "model": 4}
    work: dict[str, Callable[[], Any]] = {
        "place 16,384 on dgx-h100:2048": lambda: placement(Cluster.parse("dgx-h100:2048"), AXES),
        "place 16,384 on tpu-v5e:64x16x16": lambda: placement(Cluster.parse("tpu-v5e:64x16x16"), tpu),
        "a million prices": lambda: collective_time(nodes, "all_reduce", np.arange(32), sizes),
    }
    out = []
    for name, run in work.items():
        start = time.process_time()
        run()
        out.append({"what": name, "seconds": time.process_time() - start})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    found = rows()
    if parser.parse_args().json:
        print(json.dumps({"schema": 1, "rows": found}))
        return
    for row in found:
        print(f"{row['what']:34} {row['seconds']:6.2f} s")


if __name__ == "__main__":
    main()
