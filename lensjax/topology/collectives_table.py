"""Published tables of collectives: read a row, and find the machine that its `system` text describes.

Columns: system, intra/inter, op, n_gpus, bytes, algbw_GBps, busbw_GBps, notes. Sizes are nccl-tests' (full payload);
the measured time is bytes / algbw, and where only the bus bandwidth is given, algbw = busbw / (ring factor), as
nccl-tests defines it (doc/PERFORMANCE.md). Cells may be empty: what is not published is None here, never a guess.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path

import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives import collective_time
from lensjax.topology.collectives_systems import describe

COLUMNS = ("system", "intra/inter", "op", "n_gpus", "bytes", "algbw_GBps", "busbw_GBps", "notes")
RATE_SIZE = 2.0**30  # a row without a size states a large-message rate: taken at 1 GiB
_MIDDLE = 2.0**26  # Galvatron's profile: its own timed rows reach the stated rates at 32 to 64 MiB
_QUOTE = 'as many cells as columns; a cell with a comma stands in "quotes"'
_OPS = {"p2p": "permute", "sendrecv": "permute", "alltoall": "all_to_all"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table. `line`: 1-based, the header is 1. `seconds`, `bytes`: None where not published; `rate`:
    bytes/s of payload (algbw), which some rows give without a size. `nodes`: where the notes say it.
    """

    line: int
    system: str
    scope: str
    op: str
    devices: int
    bytes: float | None
    rate: float | None
    seconds: float | None
    notes: str = ""

    @property
    def priced_bytes(self) -> float:
        """The size, or the one at which a rate without a size is taken."""
        return self.bytes if self.bytes is not None else _MIDDLE if "Galvatron" in self.system else RATE_SIZE

    @property
    def series(self) -> tuple[str, str, str, int]:
        """Rows of one series differ in size alone: (system, intra or inter, op, devices)."""
        return self.system, self.scope, self.op, self.devices


def bus_factor(op: str, devices: int) -> float:
    """busbw / algbw of nccl-tests."""
    if op == "all_reduce":
        return 2 * (devices - 1) / devices
    return (devices - 1) / devices if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def read_table(path: str | Path) -> list[Row]:
    """All rows of a CSV file. Raises ClusterError with the line of a row that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        said = e.strerror if isinstance(e, OSError) else "not text in UTF-8"
        raise ClusterError(f"cannot read {str(path)!r}: {said}", hint="a CSV file with a header") from e
    reader = csv.DictReader(text.splitlines())
    missing = [c for c in COLUMNS if c not in (reader.fieldnames or ()) and c != "notes"]
    if missing:
        raise ClusterError(f"{path}: no column {', '.join(missing)}", hint=f"the columns are {', '.join(COLUMNS)}")
    rows = []
    try:
        for raw in reader:
            # A row with cells too many has them under None, one with cells too few has None in them.
            if None in raw or any(raw[c] is None for c in COLUMNS if c != "notes"):
                raise ClusterError(f"line {reader.line_num}: cells for other columns than the header's", hint=_QUOTE)
            rows.append(_row(reader.line_num, {k: v or "" for k, v in raw.items()}))
    except csv.Error as e:
        raise ClusterError(f"line {reader.line_num}: {e}", hint=_QUOTE) from e
    if not rows:
        raise ClusterError(f"{path}: no rows below the header", hint="one line for each measurement")
    return rows


def _row(line: int, raw: dict[str, str]) -> Row:
    try:
        devices = int(raw["n_gpus"])
        size, rate, bus = (float(raw[c]) if raw[c] else None for c in ("bytes", "algbw_GBps", "busbw_GBps"))
    except ValueError as e:
        raise ClusterError(f"line {line}: {e}", hint="n_gpus, bytes and the bandwidths are plain numbers") from e
    numbers = {"n_gpus": devices - 1, "bytes": size or 0, "algbw_GBps": rate or 0, "busbw_GBps": bus or 0}
    wrong = next((c for c, v in numbers.items() if not 0 <= v < 1e18), None)
    if wrong is not None:
        raise ClusterError(f"line {line}: {wrong} {raw[wrong]}", hint="at least one device; sizes and rates from 0 up")
    if raw["intra/inter"].strip() not in ("intra", "inter"):
        raise ClusterError(f"line {line}: intra/inter is {raw['intra/inter']!r}", hint="intra (one node) or inter")
    op = _OPS.get(raw["op"].strip().lower(), raw["op"].strip().lower())
    if rate is None and bus is not None and devices > 1:
        rate = bus / bus_factor(op, devices)
    if "tpu-recipes" in raw.get("notes", "") and rate is not None:
        # That tool prints 2 (n-1)/n bytes / time for a psum (accelerator-microbenchmarks, benchmark_collectives.py):
        # bus bandwidth.
        rate /= bus_factor(op, devices)
    rate = None if rate is None else rate * 1e9
    seconds = size / rate if size and rate else _noted_latency(raw.get("notes", ""))
    return Row(line, raw["system"], raw["intra/inter"].strip(), op, devices, size, rate, seconds, raw.get("notes", ""))


def _noted_latency(notes: str) -> float | None:
    found = re.search(r"latency ([\d.]+) us", notes)
    return float(found[1]) * 1e-6 if found else None


def place(row: Row) -> tuple[Cluster, np.ndarray]:
    """The cluster and the device groups (int [groups, members]) that a row was measured on. Raises ClusterError if
    unknown.

    A group inside a node is the node's first devices; across nodes it has as many in each node as fit, contiguously. A
    row that is strided (its notes say so) runs beside the other strided groups of the same nodes.
    """
    cluster = describe(row.system, row.scope, row.devices, row.notes)
    inner, n = cluster.tiers[0].size, row.devices
    if n > cluster.devices:
        raise ClusterError(f"line {row.line}: {n} devices on {cluster.name}, which has {cluster.devices}")
    strided, pipeline = "strided" in row.notes, row.op == "permute"
    if strided or (pipeline and row.scope == "inter"):
        # n members spread evenly over all devices, every other device in a like group.
        return cluster, np.arange(cluster.devices).reshape(n, -1).T
    if "A4X" in row.system and row.scope == "inter" and n == 16:
        # Four servers of 4 in two NVLink domains. Two and two would have 8 NICs (400 GB/s) between them, but
        # all-gather, reduce-scatter and all-reduce all show 4 (194, 194 and 175 of 200 GB/s): three servers and one.
        return cluster, np.array([[*range(12), *range(inner, inner + 4)]])
    if row.scope == "inter" and len(cluster.tiers) > 1 and n < cluster.devices:
        units = cluster.devices // inner
        return cluster, (np.arange(units)[:, None] * inner + np.arange(n // units)).reshape(1, -1)
    return cluster, np.arange(n)[None, :]


def price_on(cluster: Cluster, row: Row) -> float:
    """Seconds of a row's collective on a machine of one's own: on its first devices (inter: as many in each node)."""
    inner, n = cluster.tiers[0].size, row.devices
    if n > cluster.devices or (row.scope == "inter" and cluster.devices <= inner):
        raise ClusterError(f"line {row.line}: {n} devices ({row.scope}) do not fit {cluster.name}")
    units = min(cluster.devices // inner, n) if row.scope == "inter" and n <= inner else 1
    groups = (np.arange(units)[:, None] * inner + np.arange(n // units)).ravel() if units > 1 else np.arange(n)
    return collective_time(cluster, row.op, groups, row.priced_bytes)
