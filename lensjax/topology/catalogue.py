"""The catalogue: real machines as data files, and the specs that name them ("dgx-h100:32", "tpu-v5p:4x4x8",
"cpu:2x4").

A machine file is a cluster file whose outermost tiers may have `size: all`, with `unit` (what the number after the
colon counts) or, for a torus, `torus` (dimensions, largest slice, which lengths wrap). `make` fills in the sizes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lensjax._errors import ClusterError
from lensjax.topology import schema
from lensjax.topology.check import MOST_SLOTS
from lensjax.topology.cluster import Cluster, Device

_GRAMMAR = "e.g. dgx-h100:32, tpu-v5p:4x4x8, cpu:2x4"
_COUNTS = re.compile(r"[1-9][0-9]{0,9}(x[1-9][0-9]{0,9})*")
_EXTRA = ("about", "unit", "torus", "aliases")


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine of the catalogue, before it is told how many: `data` is its file, `about` one line for people."""

    name: str
    about: str
    data: Mapping[str, Any] = dataclasses.field(hash=False, repr=False)

    @property
    def unit(self) -> str:
        """What the number in "NAME:NUMBER" counts."""
        return "chip" if "torus" in self.data else str(self.data["unit"]["name"])


@functools.cache
def _files() -> dict[str, str]:
    folder = resources.files("lensjax.topology") / "machines"
    return {f.name[:-5]: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".yaml")}


@functools.cache
def _devices() -> dict[str, Device]:
    table = schema.read_yaml(_files()["_devices"], "the catalogue's devices")
    return {name: schema.device_from({"name": name, **data}, name) for name, data in table.items()}


def device(name: str) -> Device:
    """A device of the catalogue by name. Raises ClusterError with close names."""
    if name not in _devices():
        raise ClusterError(f"no device {name!r} in the catalogue", hint=_close(name, list(_devices())))
    return _devices()[name]


def device_of_kind(kind: str) -> Device | None:
    """The catalogue's device for a JAX `device_kind` ("NVIDIA H100 80GB HBM3"), or None."""
    return next((d for d in _devices().values() if kind in d.kinds), None)


def machine_of(found: Device) -> Machine:
    """The machine that best stands for a device where only that is known: the vendor's own (dgx-...) before a
    cloud's.

    Raises ClusterError when the catalogue has none.
    """
    named = [m for m in machines().values() if m.data["device"] == found.name]
    if not named:
        raise ClusterError(f"no machine with {found.name} in the catalogue", hint="write a cluster file")
    return min(named, key=lambda m: not m.name.startswith("dgx"))


@functools.cache
def machines() -> dict[str, Machine]:
    """All machines by name, sorted."""
    result = {}
    for name in sorted(_files()):
        if not name.startswith("_"):
            data = schema.read_yaml(_files()[name], f"machine {name!r}")
            result[name] = Machine(name, str(data["about"]), data)
    return result


def find_machine(name: str) -> Machine | None:
    """A machine by name or alias, or None."""
    return next((m for m in machines().values() if name == m.name or name in m.data.get("aliases", ())), None)


def machine(name: str) -> Machine:
    """A machine by name or alias. Raises ClusterError with close names."""
    found = find_machine(name)
    if found is None:
        raise ClusterError(f"no machine {name!r} in the catalogue", hint=_close(name, [*machines(), "cpu"]))
    return found


def _close(name: str, names: list[str]) -> str:
    inside = [n for n in names if name and (name.lower() in n.lower() or n.lower() in name.lower())]
    close = inside[:3] or difflib.get_close_matches(name, names, 3)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"


def parse_spec(spec: str | Path) -> Cluster:
    """See Cluster.parse. Raises ClusterError that shows the grammar."""
    if not isinstance(spec, str | Path):
        raise ClusterError(f"cluster {spec!r}: expected a spec or a path", hint=_GRAMMAR)
    text = str(spec).strip()
    path = Path(text)
    if isinstance(spec, Path) or path.suffix.lower() in (".yaml", ".yml", ".json"):
        return _from_path(path)
    if "/" in text or path.is_file():
        raise ClusterError(
            f"cluster {text!r}: no spec and no cluster file", hint=f"a file ends in .yaml or .json; {_GRAMMAR}"
        )
    name, colon, counts = text.partition(":")
    if colon and not _COUNTS.fullmatch(counts):
        raise ClusterError(f"cluster {text!r}: {counts!r} is no number of devices", hint=_GRAMMAR)
    factors = tuple(int(f) for f in counts.split("x")) if colon else None
    if math.prod(factors or ()) > MOST_SLOTS:
        raise ClusterError(f"cluster {text!r} is too large", hint=f"at most {MOST_SLOTS:,} devices")
    name = name.strip().lower()
    return _cpu(factors or (8,)) if name == "cpu" else make(machine(name), factors)


def _from_path(path: Path) -> Cluster:
    if not path.is_file():
        raise ClusterError(f"no cluster file {str(path)!r}", hint="or a machine of the catalogue, e.g. dgx-h100:32")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ClusterError(f"cannot read {str(path)!r}: {e}", hint="a text file in UTF-8") from e
    return schema.load_json(text, path.name) if path.suffix.lower() == ".json" else schema.load_yaml(text, path.name)


def make(found: Machine, factors: tuple[int, ...] | None = None) -> Cluster:
    """A cluster of that machine.

    `factors`: (units,) or (units, devices of each unit that are used); for a torus (chips,), its shape, or
    (slices, *shape). None is one unit. Raises ClusterError when they do not fit the machine.
    """
    data = {k: v for k, v in found.data.items() if k not in _EXTRA}
    text = found.name if factors is None else f"{found.name}:{'x'.join(map(str, factors))}"
    data["name"] = text
    data["tiers"] = _torus(found, factors) if "torus" in found.data else _nodes(found, factors)
    return schema.cluster_from_dict(data, f"machine {text!r}")


def _nodes(found: Machine, factors: tuple[int, ...] | None) -> list[dict[str, Any]]:
    unit = int(found.data["unit"]["size"])
    units, used = {0: (1, unit), 1: (*(factors or ()), unit)}.get(len(factors or ()), factors)[:2]
    if len(factors or ()) > 2 or used > unit:
        raise ClusterError(
            f"{found.name} has {unit} devices in one {found.unit}; found {'x'.join(map(str, factors or ()))}",
            hint=f"{found.name}:4 is 4 {found.unit}s, {found.name}:4x{unit // 2} uses {unit // 2} devices of each",
        )
    total, tiers = units * used, []
    for tier in found.data["tiers"]:
        size = total if tier["size"] == "all" else int(tier["size"])
        if tier["size"] != "all":  # inside a unit at most the devices used; outside, that many of each unit
            size = min(size, used) if size < unit else size // unit * used
        tiers.append({**tier, "size": min(size, total)})
        if size >= total:
            break
    return tiers


def _torus(found: Machine, factors: tuple[int, ...] | None) -> list[dict[str, Any]]:
    rank = int(found.data["torus"]["rank"])
    slices, shape = _slices(found, factors or (1,), rank)
    ici, dcn = found.data["tiers"]
    wraps = _wraps(shape, found.data["torus"])
    size = math.prod(shape)
    tiers = [{**ici, "size": size, "shape": list(shape), "wrap": wraps}]
    return tiers if slices == 1 else [*tiers, {**dcn, "size": size * slices}]


def _wraps(shape: Sequence[int], torus: Mapping[str, Any]) -> list[bool]:
    """Which sides close: those of a multiple of `wrap_multiple`; with `cubes` only where every side is one, as the
    optical switches join whole cubes.
    """
    closed = [n > 1 and n % int(torus["wrap_multiple"]) == 0 for n in shape]
    return closed if all(closed) or not torus.get("cubes", False) else [False] * len(shape)


def _slices(found: Machine, factors: tuple[int, ...], rank: int) -> tuple[int, tuple[int, ...]]:
    largest = int(found.data["torus"]["largest"])
    if len(factors) == rank + 1:
        slices, shape = factors[0], factors[1:]
    elif len(factors) == rank:
        slices, shape = 1, factors
    elif len(factors) == 1:
        slices = -(-factors[0] // largest)
        if factors[0] % slices:
            raise ClusterError(f"{found.name}: {factors[0]} chips are no whole number of slices of at most {largest}")
        shape = torus_shape(factors[0] // slices, rank)
    else:
        raise ClusterError(f"{found.name} is a {rank}-dimensional torus; found {'x'.join(map(str, factors))}")
    if math.prod(shape) > largest:
        raise ClusterError(f"{found.name}: a slice of {math.prod(shape)} chips; the largest has {largest}")
    return slices, shape


@functools.cache
def torus_shape(chips: int, rank: int) -> tuple[int, ...]:
    """The most cubic shape, shortest side first (v5e-8 is 2x4, v5p-128 is 4x4x8)."""
    if rank == 1:
        return (chips,)
    best = None
    for side in range(1, chips + 1):
        if side**rank > chips:
            break
        if chips % side == 0:
            rest = torus_shape(chips // side, rank - 1)
            best = max(best or (side, *rest), (side, *rest))
    assert best is not None
    return best


def _cpu(factors: Sequence[int]) -> Cluster:
    """Emulated CPU devices: `cpu:N` in one process, `cpu:HxN` in H processes of N."""
    if len(factors) > 2:
        raise ClusterError(
            f"cluster 'cpu:{'x'.join(map(str, factors))}' has {len(factors)} factors; emulated devices have at most 2",
            hint="cpu:8, or cpu:2x4 for 2 processes of 4 devices",
        )
    data = dict(schema.read_yaml(_files()["_cpu"], "the catalogue's cpu"))
    inner, outer = data["tiers"]
    data["name"] = f"cpu:{'x'.join(map(str, factors))}"
    data["tiers"] = [{**inner, "size": factors[-1]}]
    if len(factors) == 2 and factors[0] > 1:
        data["tiers"].append({**outer, "size": math.prod(factors)})
    return schema.cluster_from_dict(data, data["name"])
