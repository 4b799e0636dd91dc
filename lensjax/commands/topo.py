"""`lensjax topo`: what a machine is made of: its tiers of links, its devices, and where a mesh would sit on it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from lensjax._errors import UsageError
from lensjax.commands import Result
from lensjax.commands.target import CLUSTERS, PICTURES, check_writable, write_cluster

HELP = "Show the links of a machine (catalogue, file, or the one at hand) and where a mesh would sit."

READERS = ("nvidia-smi", "nccl-xml", "ibnetdiscover", "kubernetes", "slurm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec", nargs="?", help="dgx-h100:32, tpu-v5p:4x4x8, cpu:2x4, a YAML or JSON file; default: jax.devices()"
    )
    parser.add_argument("--list", action="store_true", help="list the catalogue")
    parser.add_argument(
        "--mesh", metavar="AXES", help='axes to place, outermost first, e.g. "data=32,model=8"; one may be -1'
    )
    parser.add_argument(
        "--traffic", metavar="BYTES", help='bytes each device sends on an axis per step, e.g. "data=2e9,model=9e9"'
    )
    parser.add_argument(
        "--read", nargs=2, metavar=("KIND", "FILE"), help=f"read a tool's output; KIND: {', '.join(READERS)}"
    )
    parser.add_argument("--machine", help="catalogue machine (ibnetdiscover, slurm, kubernetes) or device for --read")
    parser.add_argument("--nodes", type=int, default=1, help="number of such nodes, for --read nvidia-smi and nccl-xml")
    parser.add_argument("--png", metavar="FILE", help="write the tree and the bandwidth matrix as a picture")
    parser.add_argument("--save", metavar="FILE", help="write the cluster as a file (.yaml or .json) to edit and reuse")


def run(args: argparse.Namespace) -> Result:
    if args.list:
        return _catalogue()
    _check(args)
    cluster, breaking = _cluster(args)
    from lensjax.topology import mesh, show

    axes = _numbers(args.mesh, "--mesh", int) if args.mesh else show.suggested_axes(cluster)
    traffic = _numbers(args.traffic, "--traffic", float) if args.traffic else None
    placed = mesh.placement(cluster, axes, traffic)
    files = _write(args, cluster)
    data = {
        "name": cluster.name,
        "devices": cluster.devices,
        "device": cluster.device.name,
        "tiers": show.tier_rows(cluster),
        "missing": list(cluster.missing),
        "notes": list(cluster.notes),
        "breaking": [list(pair) for pair in breaking],
        "mesh": show.mesh_data(cluster, placed, traffic),
        "cluster": cluster.to_dict(),
        "files": files,
    }
    return Result(data, show.renderables(cluster, placed, breaking, traffic, files))


def _check(args: argparse.Namespace) -> None:
    """What can be said to be wrong before any work."""
    if args.nodes < 1:
        raise UsageError(f"--nodes {args.nodes}", hint="at least 1")
    kind = args.read[0] if args.read else None
    if args.nodes > 1 and kind not in ("nvidia-smi", "nccl-xml"):
        raise UsageError("--nodes is for --read nvidia-smi and nccl-xml", hint="elsewhere the spec or the text tells")
    if args.machine and kind is None:
        raise UsageError("--machine is for --read", hint=f"lensjax topo {args.machine} shows the machine itself")
    check_writable(args.png, PICTURES)
    check_writable(args.save, CLUSTERS, "cluster")


def _cluster(args: argparse.Namespace) -> tuple[Any, tuple]:
    """(cluster, pairs that break its tree)."""
    from lensjax.topology.cluster import Cluster

    if args.read and args.spec:
        raise UsageError(f"both a spec ({args.spec}) and --read", hint="give one of them")
    if args.read:
        return _read(args)
    if args.spec:
        return Cluster.parse(args.spec), ()
    from lensjax.topology.discover.live import live

    return live(), ()


def _read(args: argparse.Namespace) -> tuple[Any, tuple]:
    from lensjax.topology.discover import ibnet, kubernetes, nccl_xml, nvidia_smi, slurm

    kind, name = args.read
    if kind not in READERS:
        raise UsageError(f"--read {kind}", hint=f"KIND is one of {', '.join(READERS)}")
    try:
        text = Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise UsageError(f"--read {kind} {name}: {e.strerror}") from e
    if kind in ("ibnetdiscover", "slurm") and not args.machine:
        raise UsageError(f"--read {kind} needs --machine", hint="what a node is, e.g. --machine dgx-h100")
    if kind == "nvidia-smi":
        found = nvidia_smi.discover(text, _device(args.machine), args.nodes)
    elif kind == "nccl-xml":
        found = nccl_xml.discover(text, _device(args.machine), args.nodes)
    elif kind == "ibnetdiscover":
        found = ibnet.discover(text, args.machine)
    elif kind == "kubernetes":
        return kubernetes.discover(text, args.machine), ()
    else:
        return slurm.discover(os.environ, args.machine, text), ()
    return found.cluster, found.breaking


def _device(name: str | None) -> str | None:
    """The catalogue's device by its own name, or as that of a machine."""
    from lensjax.topology import catalogue

    named = None if name is None else catalogue.find_machine(name)
    return name if named is None else str(named.data["device"])


def _numbers(text: str, option: str, kind: type) -> dict[str, Any]:
    """{"data": 32, "model": 8} from "data=32,model=8"."""
    result, example = {}, "data=32,model=8" if kind is int else "data=1e9,model=9e9"
    for part in text.split(","):
        name, equal, value = part.strip().partition("=")
        if name in result:
            raise UsageError(f"{option} {text!r}: {name!r} stands twice", hint="each axis once")
        try:
            result[name] = kind(value)
        except ValueError:
            equal = ""
        if not (name and equal):
            raise UsageError(f"{option} {text!r}: {part!r}", hint=f'e.g. {option} "{example}"')
    return result


def _write(args: argparse.Namespace, cluster: Any) -> list[str]:
    files = []
    if args.png:
        from lensjax.topology.picture import draw

        draw(cluster, args.png)
        files.append(args.png)
    if args.save:
        write_cluster(cluster, args.save)
        files.append(args.save)
    return files


def _catalogue() -> Result:
    from rich.table import Table

    from lensjax.topology.catalogue import machines

    table = Table(
        "spec", "what it is", title="machines of the catalogue", title_justify="left", box=None, pad_edge=False
    )
    rows = []
    for name, machine in machines().items():
        names = ", ".join([f"[bold]{name}[/]:N", *machine.data.get("aliases", ())])
        table.add_row(names, f"{machine.about}; N counts {machine.unit}s")
        rows.append(
            {
                "name": name,
                "aliases": list(machine.data.get("aliases", ())),
                "about": machine.about,
                "unit": machine.unit,
            }
        )
    table.add_row("[bold]cpu[/]:N, cpu:HxN", "emulated CPU devices: N in one process, or H processes of N")
    return Result({"machines": rows}, (table,))
