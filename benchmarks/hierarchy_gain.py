"""By how much algorithms that know the tiers beat a flat ring: predicted all-reduces by machine, nodes and payload.

python benchmarks/hierarchy_gain.py
"""

import numpy as np
from rich.console import Console
from rich.table import Table

from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives import collective_time

MACHINES = ("p3", "p4de", "dgx-a100", "dgx-h100", "hbm2e")
SIZES = (1e6, 1e8, 1e9)


def main() -> None:
    table = Table(
        title="All-reduce: time of a flat ring over that of calls per tier, and over the library's own choice"
    )
    table.add_column("machine")
    table.add_column("nodes", justify="right")
    for size in SIZES:
        table.add_column(f"{size / 1e6:g} MB per tier", justify="right")
        table.add_column("library", justify="right")
    for machine in MACHINES:
        for nodes in (2, 4, 8, 32, 128):
            cluster = Cluster.parse(f"{machine}:{nodes}")
            flat, tiers, auto = (
                collective_time(cluster, "all_reduce", np.arange(cluster.devices), np.array(SIZES), algorithm=a)
                for a in ("ring", "hierarchical", "auto")
            )
            cells = [f"{x:.2f}" for pair in zip(flat / tiers, flat / auto) for x in pair]
            table.add_row(machine, str(nodes), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
