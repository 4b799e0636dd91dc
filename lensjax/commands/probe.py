"""`lensjax probe`: measures the links between the live devices and writes a cluster file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

from lensjax._errors import UsageError
from lensjax.commands import Result
from lensjax.commands.target import CLUSTERS, PICTURES, check_writable, write_cluster

HELP = "measure the links between the devices at hand and write a cluster file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", help="cluster file to write (.yaml or .json)")
    parser.add_argument("--png", help="picture to write: bandwidth by size, measured and fitted")
    parser.add_argument("--emulate", type=int, metavar="N", help="N emulated CPU devices in this process")
    parser.add_argument("--largest", default="16MiB", help="largest payload, e.g. 64MiB (default 16MiB)")
    parser.add_argument(
        "--budget", type=float, default=1.0, help="seconds: a series of sizes ends at a call slower than this"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="several processes: the address of process 0")
    parser.add_argument("--processes", type=int, help="several processes: how many")
    parser.add_argument("--process", type=int, help="several processes: which one this is, from 0")


def run(args: argparse.Namespace) -> Result:
    from lensjax.topology.probe_fit import fit_cluster

    with _own_stdout():
        devices, found, points = _measure(args)
    import jax

    cluster, fits = fit_cluster(_device(devices[0]), found, points, f"probed-{len(devices)}x{devices[0].platform}")
    if jax.process_index() != 0:
        return Result({"process": jax.process_index()}, ())
    written = _write(args, cluster, found, points)
    data = {
        "devices": len(devices),
        "tiers": [dataclasses.asdict(f) for f in fits],
        "points": [_point(cluster, found, p) for p in points],
        "cluster": cluster.to_dict(),
        **written,
    }
    return Result(data, _show(cluster, found, points, fits, written))


def _measure(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    _prepare(args)
    import jax

    from lensjax.topology.probe import levels, sweep

    sizes = _sizes(args.largest)
    devices, found = levels(jax.devices())
    return (
        devices,
        found,
        list(_progress(sweep(devices, found, sizes, budget=args.budget), 5 * len(sizes) * len(found))),
    )


@contextlib.contextmanager
def _own_stdout() -> Iterator[None]:
    """Gloo and other libraries write to the process's standard output: to standard error with it, it is ours
    (--json).
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _prepare(args: argparse.Namespace) -> None:
    """Emulated devices and the other processes: before JAX makes its devices."""
    if args.emulate is not None:
        if args.emulate < 1:
            raise UsageError(f"--emulate {args.emulate}", hint="e.g. --emulate 8")
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={args.emulate}"])
    check_writable(args.out, CLUSTERS, "cluster")
    check_writable(args.png, PICTURES)
    together = (args.coordinator, args.processes, args.process)
    if any(v is not None for v in together):
        if any(v is None for v in together):
            raise UsageError(
                "several processes need --coordinator, --processes and --process",
                hint="--coordinator host0:9731 --processes 2 --process 0",
            )
        import jax

        jax.distributed.initialize(args.coordinator, args.processes, args.process)


def _sizes(largest: str) -> list[int]:
    """Powers of two from 1 KiB; a factor of 4 apart up to 64 KiB, where latency rules."""
    from lensjax.topology.units import parse

    top = int(parse(largest, "bytes", "--largest"))
    sizes = [1 << 10, 1 << 12, 1 << 14, *(1 << k for k in range(16, 40))]
    return [s for s in sizes if s <= max(top, 1 << 12)]


def _device(live: Any) -> Any:
    from lensjax.topology.catalogue import device, device_of_kind
    from lensjax.topology.cluster import Device

    known = device_of_kind(live.device_kind)
    if known is not None or live.platform == "cpu":
        return known or device("cpu")
    stats = live.memory_stats() or {}
    memory = float(stats.get("bytes_limit", 16 * 2**30))
    return Device(
        live.device_kind, "cuda" if live.platform == "gpu" else live.platform, memory, 1e12, {"float32": 1e13}
    )


def _progress(points: Any, total: int) -> Any:
    from rich.console import Console
    from rich.progress import track

    yield from track(points, "measuring", total, console=Console(file=sys.stderr), transient=True)


def _point(cluster: Any, found: Any, point: Any) -> dict[str, Any]:
    from lensjax.topology.probe_fit import predict

    level = next(level for level in found if level.name == point.tier)
    return {**dataclasses.asdict(point), "predicted_s": predict(cluster, level, point)}


def _write(args: argparse.Namespace, cluster: Any, found: Any, points: Any) -> dict[str, Any]:
    from lensjax.topology.probe_plot import plot_png

    if args.out:
        write_cluster(cluster, args.out)
    if args.png:
        plot_png(cluster, found, points, args.png)
    return {"file": args.out, "png": args.png}


def _show(cluster: Any, found: Any, points: Any, fits: Any, written: dict[str, Any]) -> tuple[Any, ...]:
    from rich.table import Table
    from rich.text import Text

    from lensjax.topology.probe_plot import _short, terminal_plot

    table = Table(title=f"{cluster.name}: measured tiers")
    table.add_column("tier")
    for name in (
        "devices",
        "rate per device",
        "latency",
        "on a NIC",
        "fit error",
        "90th",
        "points",
    ):
        table.add_column(name, justify="right")
    for f in fits:
        cells = (str(f.size), f"{_short(f.bandwidth)}B/s", f"{f.latency * 1e6:.3g} us", str(f.nic_sharing))
        table.add_row(f.name, *cells, f"{f.median_error:.0%}", f"{f.p90_error:.0%}", str(f.points))
    notes = [f"wrote {path}" for path in written.values() if path]
    return (table, Text(terminal_plot(cluster, found, points)), *notes)
