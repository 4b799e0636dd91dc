"""A cluster and a placement for people (rich) and for machines (plain data)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from lensjax.topology import loads
from lensjax.topology.choice import predicted_seconds
from lensjax.topology.cluster import Cluster, Device, Tier
from lensjax.topology.mesh import Placement
from lensjax.topology.picture import pair_bandwidth, torus_text
from lensjax.topology.units import pretty

_NAMES = ("data", "fsdp", "model")
_MATRIX = 16  # devices up to which the terminal shows every pair


def suggested_axes(cluster: Cluster) -> dict[str, int]:
    """Axes for a first look: one per tier (data outermost, model inside), at most three."""
    inner, *outer = cluster.tiers
    if inner.kind == "torus" or not outer:
        model = max(n for n in (1, 2, 4, 8) if cluster.devices % n == 0 and (n == 1 or 2 * n <= cluster.devices))
        return {"data": -1, "model": model}
    if cluster.missing:
        return {"data": -1, "model": inner.size}  # fewer axes leave fewer whole nodes idle
    sizes = [inner.size, *(t.size // inner.size for t in outer[:-1])][:2]
    names = _NAMES if len(sizes) == 2 else (_NAMES[0], _NAMES[2])
    return dict(zip(names, [-1, *reversed(sizes)]))


def tier_rows(cluster: Cluster) -> list[dict[str, Any]]:
    """Per tier: name, size, bandwidth (usable bytes/s per device and direction), latency (seconds), and the rest."""
    return [
        {
            "name": t.name,
            "size": t.size,
            "bandwidth": t.usable,
            "latency": t.latency,
            "kind": t.kind,
            "shape": list(t.shape),
            "nic_sharing": t.nic_sharing,
            "oversubscription": t.oversubscription,
            "full_duplex": t.full_duplex,
            "multicast": t.multicast,
            "takes_cores": t.takes_cores,
            "sources": dict(t.sources),
        }
        for t in cluster.tiers
    ]


def mesh_data(cluster: Cluster, placed: Placement, traffic: Mapping[str, float] | None) -> dict[str, Any]:
    """The placement as plain data; seconds and bytes are null without traffic. Order is listed up to 4,096 devices."""
    return {
        "axes": dict(placed.axes),
        "tiers": {a: list(t) for a, t in placed.tiers.items()},
        "seconds": placed.seconds if traffic is not None else None,
        "tier_bytes": loads.tier_bytes(cluster, placed.order, traffic, placed.axes) if traffic is not None else None,
        "idle": list(placed.idle),
        "regular": placed.regular,
        "order": placed.order.tolist() if placed.order.size <= 4096 else None,
    }


def renderables(
    cluster: Cluster,
    placed: Placement,
    breaking: Sequence[tuple[int, int, str]],
    traffic: Mapping[str, float] | None,
    files: Sequence[str] = (),
) -> tuple[Any, ...]:
    """What `lensjax topo` prints."""
    parts: list[Any] = [_headline(cluster), "", _tiers(cluster), "", _tree(cluster)]
    if 1 < cluster.devices <= _MATRIX:
        parts += ["", _matrix(cluster)]
    parts += ["", *_mesh(cluster, placed, traffic)]
    if breaking:
        parts += ["", f"[yellow]{len(breaking)} pairs do not fit a tree of tiers[/] (placed by graph embedding), e.g."]
        parts += [escape(f"  {a} - {b}: {why}") for a, b, why in breaking[:3]]
    parts += [f"[dim]note: {escape(note)}[/]" for note in cluster.notes]
    parts += [f"wrote {escape(f)}" for f in files]
    return tuple(Text.from_markup(p) if isinstance(p, str) else p for p in parts)


def _headline(cluster: Cluster) -> str:
    kinds = [cluster.device, *dict.fromkeys(o.device for o in cluster.others)]
    if len(kinds) == 1:
        return f"[bold]{escape(cluster.name)}[/]: {cluster.devices:,} x {_device(kinds[0])}"
    others = {
        d.name: sum(_present(cluster, o.start, o.stop) for o in cluster.others if o.device == d) for d in kinds[1:]
    }
    counts = {cluster.device.name: cluster.devices - sum(others.values()), **others}
    lines = [f"  {counts[d.name]:,} x {_device(d)}" for d in kinds]
    return "\n".join([f"[bold]{escape(cluster.name)}[/]: {cluster.devices:,} devices", *lines])


def _present(cluster: Cluster, start: int, stop: int) -> int:
    return stop - start - sum(start <= s < stop for s in cluster.missing)


def _device(d: Device) -> str:
    peak = d.peak.get("bfloat16", d.peak.get("float16", d.peak["float32"]))
    dtype = next(k for k, v in d.peak.items() if v == peak)
    text = f"{escape(d.name)} ({pretty(d.memory, 'B')} at {pretty(d.memory_bandwidth, 'B/s')}, "
    return text + f"{pretty(peak, 'FLOP/s')} {dtype} dense)"


def _tiers(cluster: Cluster) -> Table:
    table = Table(title="tiers of links, innermost first", title_justify="left")
    table.add_column("tier")
    for name in ("devices", "groups", "per device, each way", "latency"):
        table.add_column(name, justify="right")
    table.add_column("remarks")
    for tier in cluster.tiers:
        groups = -(-cluster.capacity // tier.size)
        cells = [f"{tier.size:,}", f"{groups:,}", pretty(tier.usable, "B/s"), pretty(tier.latency, "s")]
        table.add_row(tier.name, *cells, ", ".join(_remarks(cluster, tier)))
    return table


def _remarks(cluster: Cluster, tier: Tier) -> list[str]:
    result = []
    if tier.kind == "torus":
        result.append(torus_text(tier))
    elif tier.kind != "switch":
        result.append(tier.kind)
    result += [f"{tier.nic_sharing} share a NIC or link"] if tier.nic_sharing > 1 else []
    result += [f"oversubscribed {tier.oversubscription:.3g}:1"] if tier.oversubscription > 1 else []
    result += ["reduces in the switch"] if tier.multicast else []
    result += ["half duplex"] if not tier.full_duplex else []
    result += [f"[yellow]{len(s.slots)} slow x{s.factor:.3g}[/]" for s in cluster.slow if s.tier == tier.name]
    return result


def _tree(cluster: Cluster) -> Tree:
    """Nested counts: every level once, with how many of it there are, and the groups that are damaged."""
    root = Tree(f"{cluster.devices:,} device{'s' * (cluster.devices != 1)}")
    branch, outer = root, cluster.capacity
    for tier in reversed(cluster.tiers):
        count = -(-outer // tier.size)
        if count > 1 or tier is cluster.tiers[-1]:
            branch = branch.add(f"{count:,} x {tier.name} of {tier.size:,}")
        else:
            branch = branch.add(f"{tier.name} of {tier.size:,}")
        outer = tier.size
    branch.add(f"{outer} x {cluster.device.name}")
    damaged = sorted({s // cluster.tiers[0].size for s in cluster.missing})
    for group in damaged[:8]:
        size = cluster.tiers[0].size
        left = size - sum(s // size == group for s in cluster.missing)
        root.add(f"[yellow]{cluster.tiers[0].name} group {group}: {left} of {size} devices[/]")
    if len(damaged) > 8:
        root.add(f"[yellow]... {len(damaged)} groups with empty slots in all[/]")
    for other in cluster.others:
        root.add(f"slots {other.start}..{other.stop - 1}: {other.device.name}")
    return root


def _matrix(cluster: Cluster) -> Table:
    matrix = pair_bandwidth(cluster)
    finite = matrix[np.isfinite(matrix)]
    unit, scale = ("GB/s", 1e9) if finite.max() >= 1e9 else ("MB/s", 1e6)
    title = f"{unit} between devices when all send, one direction"
    title += "; direct links taken as equal" if cluster.tiers[0].kind == "mesh" else ""
    table = Table("", *map(str, range(cluster.devices)), title=title, title_justify="left", box=None, pad_edge=False)
    low, high = math.log(finite.min()), math.log(finite.max())
    for i, row in enumerate(matrix):
        cells = []
        for value in row:
            warm = 0.0 if high == low else (high - math.log(value)) / (high - low) if math.isfinite(value) else 0.0
            colour = "green" if warm < 0.34 else "yellow" if warm < 0.67 else "red"
            cells.append(f"[{colour}]{value / scale:.3g}[/]" if math.isfinite(value) else "[dim]-[/]")
        table.add_row(f"[bold]{i}[/]", *cells)
    return table


def _mesh(cluster: Cluster, placed: Placement, traffic: Mapping[str, float] | None) -> list[Any]:
    shape = " x ".join(f"{a}={n}" for a, n in placed.axes.items())
    table = Table(title=f"a mesh {shape} on it", title_justify="left")
    for name in ("axis", "size", "runs on", "first group (device ids)"):
        table.add_column(
            name, justify="right" if name == "size" else "left", overflow="ellipsis", no_wrap=name != "runs on"
        )
    for i, (axis, size) in enumerate(placed.axes.items()):
        first = loads.axis_groups(placed.order, i)[0]
        listed = ", ".join(map(str, first[:6])) + (", ..." if size > 6 else "")
        table.add_row(axis, str(size), " + ".join(placed.tiers[axis]) or "-", listed)
    parts: list[Any] = [table]
    if traffic is not None:
        rank = np.arange(placed.order.size).reshape(placed.order.shape)
        ordered = np.argsort(cluster.slots, kind="stable")[rank] if cluster.order is None else rank
        plain = predicted_seconds(cluster, ordered, traffic, placed.axes)
        parts.append(
            f"predicted: {pretty(placed.seconds, 's')} a step for this traffic; in rank order {pretty(plain, 's')}"
        )
    if not placed.regular:
        parts.append("placed unevenly: devices in order, which is cheaper here than a regular box, or the only way")
    if placed.idle:
        listed = ", ".join(map(str, placed.idle[:12])) + (", ..." if len(placed.idle) > 12 else "")
        parts.append(f"[yellow]{len(placed.idle)} devices stay idle[/]: {listed}")
    return parts
