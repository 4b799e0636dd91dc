"""Bytes on the outermost tier and predicted seconds: our device order against rank order and
`jax.experimental.mesh_utils`.

    python benchmarks/placement.py [--json FILE] [--markdown FILE]

Every machine of the catalogue, three meshes each. Traffic per device and step as in training: the model axis carries
most, data least; in the second mesh the axes are listed the other way round, as a program may need them. mesh_utils
needs devices: it gets objects with the attributes that it reads. `--markdown` replaces the table in FILE between its
markers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from lensjax.topology import loads
from lensjax.topology.catalogue import machines
from lensjax.topology.choice import TIE, predicted_seconds
from lensjax.topology.cluster import Cluster
from lensjax.topology.mesh import placement

TRAFFIC = {"model": 9e9, "fsdp": 3e9, "data": 1e9}  # bytes per device and step
MARKERS = (
    "<!-- placement table: python benchmarks/placement.py --markdown docs/topology.md -->",
    "<!-- end of table -->",
)


@dataclasses.dataclass(frozen=True)
class Described:
    """A device as mesh_utils sees one."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, int, int] | None
    core_on_chip: int = 0


def described(cluster: Cluster) -> list[Described]:
    """The devices of a regular cluster: TPU coordinates from the torus (x runs fastest), GPUs 8 (a node) to a
    process.
    """
    inner, kind = cluster.tiers[0], cluster.device.kinds[0] if cluster.device.kinds else cluster.device.name
    result = []
    for i in range(cluster.devices):
        coords = None
        if inner.kind == "torus":
            at = np.unravel_index(i % inner.size, inner.shape)
            coords = tuple(int(c) for c in (*at, 0, 0)[:3])
        result.append(Described(i, cluster.device.platform, kind, i // inner.size, i // inner.size, coords))
    return result


def by_mesh_utils(cluster: Cluster, axes: dict[str, int]) -> tuple[np.ndarray | None, str]:
    """(device ids or None, how or why not): create_device_mesh for one slice or node, the hybrid one for several.

    The hybrid must be told how much of each axis goes across granules: it gets every possibility, and the best
    counts.
    """
    from jax.experimental import mesh_utils

    devices, sizes = described(cluster), list(axes.values())
    answers, why = [], "no split of the axes fits the granules"
    for across in _splits(cluster.devices // cluster.tiers[0].size, sizes):
        try:
            if len(cluster.tiers) == 1:
                mesh = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
            else:
                inside = [s // a for s, a in zip(sizes, across)]
                mesh = mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
        except Exception as e:  # whatever it raises is its answer
            why = f"{type(e).__name__}: {e}".splitlines()[0][:60]
            continue
        ids = np.vectorize(lambda d: d.id)(mesh)
        answers.append((predicted_seconds(cluster, ids, traffic_of(axes), axes), ids))
    return (min(answers, key=lambda a: a[0])[1], "mesh_utils") if answers else (None, why)


def _splits(total: int, sizes: list[int]) -> list[tuple[int, ...]]:
    """All ways to write `total` as a product of divisors of the sizes."""
    if not sizes:
        return [()] if total == 1 else []
    divisors = [d for d in range(1, min(total, sizes[0]) + 1) if total % d == 0 and sizes[0] % d == 0]
    return [(d, *rest) for d in divisors for rest in _splits(total // d, sizes[1:])]


def meshes(cluster: Cluster) -> list[dict[str, int]]:
    """The usual mesh, the same with its axes reversed, and one with three axes of which none has a tier's size."""
    n = cluster.devices
    model = min(8, n // 2)
    small = max(m for m in (1, 2, 4) if n % (4 * m) == 0)
    return [
        {"data": n // model, "model": model},
        {"model": model, "data": n // model},
        {"fsdp": 4, "model": small, "data": n // 4 // small},
    ]


def specs() -> list[str]:
    """Each machine with at least two groups on its outermost tier."""
    result = []
    for name, machine in machines().items():
        if machine.unit == "chip":
            result += [
                f"{name}:{shape}"
                for shape in (("8x8x8", "2x8x8x8") if machine.data["torus"]["rank"] == 3 else ("16x16", "4x8x8"))
            ]
        else:
            one = len(Cluster.parse(f"{name}:4096").tiers)
            units = {72: 4}.get(int(machine.data["unit"]["size"]), 64 if one > 2 else 8)
            result.append(f"{name}:{units if name != 'dgx-a100-40' and name != 'dgx-a100-80' else 40}")
    return result


def compare() -> list[dict]:
    rows = []
    for spec in specs():
        cluster = Cluster.parse(spec)
        for axes in meshes(cluster):
            ours = placement(cluster, axes, traffic_of(axes))
            rank = np.arange(cluster.devices).reshape(tuple(axes.values()))
            theirs, how = by_mesh_utils(cluster, axes)
            row = {"spec": spec, "axes": axes, "tier": cluster.tiers[-1].name, "mesh_utils": how}
            for name, order in (("ours", ours.order), ("rank", rank), ("utils", theirs)):
                if order is not None:
                    row[f"{name}_bytes"] = loads.tier_bytes(cluster, order, traffic_of(axes), axes)[
                        cluster.tiers[-1].name
                    ]
                    row[f"{name}_seconds"] = loads.seconds(cluster, order, traffic_of(axes), axes)
                    row[f"{name}_priced"] = predicted_seconds(cluster, order, traffic_of(axes), axes)
            rows.append(row)
    return rows


def traffic_of(axes: dict[str, int]) -> dict[str, float]:
    return {a: TRAFFIC[a] for a in axes}


def markdown(rows: list[dict]) -> str:
    lines = [
        "| machine | mesh | outermost tier | GB over it, ours | rank order | mesh_utils "
        "| ms by link load, ours | rank order | mesh_utils | ms predicted, ours | rank order | mesh_utils |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        mesh = " ".join(f"{a}={n}" for a, n in r["axes"].items())
        amounts = [f"{r[k + '_bytes'] / 1e9:.2f}" if k + "_bytes" in r else "raises" for k in ("ours", "rank", "utils")]
        times = [
            f"{r[k + '_seconds'] * 1e3:.1f}" if k + "_seconds" in r else "raises" for k in ("ours", "rank", "utils")
        ]
        times += [
            f"{r[k + '_priced'] * 1e3:.1f}" if k + "_priced" in r else "raises" for k in ("ours", "rank", "utils")
        ]
        lines.append(f"| {r['spec']} | {mesh} | {r['tier']} | {' | '.join([*amounts, *times])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--markdown", help="replace the table in this file")
    args = parser.parse_args()
    rows = compare()
    table = markdown(rows)
    print(table)
    print(f"\n{len(rows)} rows; ours against the better of rank order and mesh_utils:")
    for key, name, near in (("priced", "predicted", TIE), ("seconds", "by link load", 1e-4)):
        best = [min(r[f"rank_{key}"], r.get(f"utils_{key}", math.inf)) for r in rows]
        ratios = [r[f"ours_{key}"] / b for r, b in zip(rows, best)]
        slower = [r for r, ratio in zip(rows, ratios) if ratio > 1 + near]
        print(f"{name}: slower by more than {near:.2%} in {len(slower)} rows, at worst {max(ratios):.3f} times")
        for r in slower:
            print(
                "  ", r["spec"], r["axes"], *(f"{k} {r[f'{k}_{key}'] * 1e3:.1f} ms" for k in ("ours", "rank", "utils"))
            )
    if args.json:
        Path(args.json).write_text(json.dumps({"schema": 1, "rows": rows}, indent=1))
    if args.markdown:
        text = Path(args.markdown).read_text()
        head, rest = text.split(MARKERS[0])
        Path(args.markdown).write_text(f"{head}{MARKERS[0]}\n{table}\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}")


if __name__ == "__main__":
    main()
