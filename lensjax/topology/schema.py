"""Cluster <-> plain data, YAML and JSON. Errors name the place (`tiers[1].bandwidth`), what was found and what fits
there.

A file written by people may use units and name a device of the catalogue; a file written by lensjax holds SI numbers
and the whole device, so that it means the same after the catalogue changed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from lensjax._errors import ClusterError
from lensjax.topology import units
from lensjax.topology.cluster import Cluster, Device, Other, Slow, Tier

SCHEMA = 1
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DTYPES = (
    "bfloat16", "float16", "float32", "float64", "tensorfloat32", "float8", "float4", "int8", "int4", "complex64",
    "complex128",
)  # fmt: skip
_TIER_UNITS = {"bandwidth": "bytes/s", "latency": "seconds"}
_DEVICE_UNITS = {
    "memory": "bytes",
    "memory_bandwidth": "bytes/s",
    "host_bandwidth": "bytes/s",
    "host_memory": "bytes",
}


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Plain data; fields at their default are left out."""
    return {"schema": SCHEMA, **_plain(cluster)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if not _is_default(f, value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _is_default(field: dataclasses.Field, owner: Any) -> bool:
    value = getattr(owner, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return value == field.default_factory()
    return field.default is not dataclasses.MISSING and value == field.default


def cluster_from_dict(data: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """The inverse of cluster_to_dict. Raises ClusterError for unknown keys, wrong types and a newer schema."""
    data = dict(_mapping(data, where))
    found = data.pop("schema", SCHEMA)
    if found != SCHEMA or isinstance(found, bool | float):
        raise ClusterError(f"{where}: schema {found!r}; this lensjax reads {SCHEMA}", hint="upgrade lensjax")
    _known(data, Cluster, where)
    fields: dict[str, Any] = {"name": _text(data, "name", where)}
    fields["device"] = device_from(_need(data, "device", where), f"{where}.device")
    fields["tiers"] = _each(_need(data, "tiers", where), _tier, f"{where}.tiers")
    for key, read in (("slow", _slow), ("others", _other)):
        if key in data:
            fields[key] = _each(data[key], read, f"{where}.{key}")
    for key in ("missing", "order"):
        if data.get(key) is not None:
            fields[key] = _each(data[key], _integer, f"{where}.{key}")
    if "notes" in data:
        fields["notes"] = _each(data["notes"], lambda note, at: str(note), f"{where}.notes")
    return Cluster(**fields)


def device_from(data: Any, where: str) -> Device:
    """A device from a mapping, or by its name in the catalogue."""
    if isinstance(data, str):
        from lensjax.topology.catalogue import device

        return device(data)
    data = dict(_mapping(data, where))
    _known(data, Device, where)
    for key in ("memory", "memory_bandwidth", "peak"):
        _need(data, key, where)
    _text(data, "name", where)
    _text(data, "platform", where)
    for key, unit in _DEVICE_UNITS.items():
        if key in data:
            data[key] = units.parse(data[key], unit, f"{where}.{key}")
    for key, unit in (("peak", "flops"), ("achievable", "flops")):
        table = _mapping(data.get(key, {}), f"{where}.{key}")
        data[key] = {str(k): units.parse(v, unit, f"{where}.{key}.{k}") for k, v in table.items()}
    for key in ("peak", "achievable"):
        _dtypes(data[key], f"{where}.{key}")
    if "float32" not in data["peak"]:
        raise ClusterError(f"{where}.peak has no float32", hint="the rate that a dtype without its own falls back to")
    if data["platform"] not in PLATFORMS:
        raise ClusterError(f"{where}.platform: {data['platform']!r}", hint=f"one of {', '.join(PLATFORMS)}")
    data["kinds"] = _each(data.get("kinds", ()), lambda kind, at: str(kind), f"{where}.kinds")
    data["sources"] = _sources(data, where)
    return Device(**data)


def _dtypes(table: Mapping[str, Any], where: str) -> None:
    """A misspelt dtype would silently run at float32's rate."""
    for name in table:
        if name not in DTYPES:
            close = difflib.get_close_matches(name, DTYPES, 1) or ["bfloat16"] * name.startswith("bf")
            raise ClusterError(
                f"{where}: no dtype {name!r}",
                hint=f"did you mean {close[0]}?" if close else f"one of {', '.join(DTYPES)}",
            )


def _tier(data: Any, where: str) -> Tier:
    data = dict(_mapping(data, where))
    _known(data, Tier, where)
    _text(data, "name", where)
    data["size"] = _integer(_need(data, "size", where), f"{where}.size")
    for key, unit in _TIER_UNITS.items():
        data[key] = units.parse(_need(data, key, where), unit, f"{where}.{key}")
    if "nic_sharing" in data:
        data["nic_sharing"] = _integer(data["nic_sharing"], f"{where}.nic_sharing")
    if "oversubscription" in data:
        data["oversubscription"] = _number(data["oversubscription"], f"{where}.oversubscription")
    for key in ("full_duplex", "multicast", "takes_cores"):
        _boolean(data.get(key, True), f"{where}.{key}")
    if "shape" in data:
        data["shape"] = _each(data["shape"], _integer, f"{where}.shape")
        data["wrap"] = _each(data.get("wrap", [True] * len(data["shape"])), _boolean, f"{where}.wrap")
    data["sources"] = _sources(data, where)
    return Tier(**data)


def _slow(data: Any, where: str) -> Slow:
    data = dict(_mapping(data, where))
    _known(data, Slow, where)
    slots = _each(_need(data, "slots", where), _integer, f"{where}.slots")
    factor = _number(_need(data, "factor", where), f"{where}.factor")
    return Slow(_text(data, "tier", where), slots, factor, str(data.get("source", "")))


def _other(data: Any, where: str) -> Other:
    data = dict(_mapping(data, where))
    _known(data, Other, where)
    start, stop = (_integer(_need(data, k, where), f"{where}.{k}") for k in ("start", "stop"))
    return Other(start, stop, device_from(_need(data, "device", where), f"{where}.device"))


def _sources(data: Mapping[str, Any], where: str) -> dict[str, str]:
    return {str(k): str(v) for k, v in _mapping(data.get("sources", {}), f"{where}.sources").items()}


def _known(data: Mapping[str, Any], kind: type, where: str) -> None:
    names = [f.name for f in dataclasses.fields(kind)]
    for key in data:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"its fields are {', '.join(names)}"
            raise ClusterError(f"{where} has no field {key!r}", hint=hint)


def _mapping(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where}: expected a mapping, found {type(data).__name__} {data!r}")
    return data


def _need(data: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise ClusterError(f"{where} lacks {key!r}", hint=f"it has {', '.join(map(str, data)) or 'nothing'}")
    return data[key]


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = _need(data, key, where)
    if not isinstance(value, str) or not value:
        raise ClusterError(f"{where}.{key}: expected text, found {value!r}")
    return value


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ClusterError(f"{where}: expected a whole number, found {value!r}")
    return value


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ClusterError(f"{where}: {value!r}", hint="true or false")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(f"{where}: expected a number, found {value!r}")
    return float(value)


def _each(data: Any, read: Callable[[Any, str], Any], where: str) -> tuple[Any, ...]:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ClusterError(f"{where}: expected a list, found {data!r}")
    return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(data))


def dump_json(cluster: Cluster) -> str:
    return json.dumps(cluster_to_dict(cluster), indent=1)


def dump_yaml(cluster: Cluster) -> str:
    return yaml.safe_dump(cluster_to_dict(cluster), sort_keys=False, width=120)


def load_json(text: str, where: str = "cluster") -> Cluster:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := _twice([key for key, _ in items]):
            raise ClusterError(f"{where}: the key {twice!r} stands twice in one mapping")
        return dict(items)

    try:
        data = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as e:
        raise ClusterError(f"{where}, line {e.lineno}: not JSON: {e.msg}") from e
    except (ValueError, RecursionError) as e:
        raise ClusterError(f"{where}: not JSON that lensjax reads: {e}") from e
    return cluster_from_dict(data, where)


def _twice(keys: Sequence[Any]) -> Any:
    return next((key for i, key in enumerate(keys) if key in keys[:i]), None)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error: the last would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        scalars = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := _twice([key.value for key in scalars if key.tag != "tag:yaml.org,2002:merge"]):
            line = [key for key in scalars if key.value == twice][1].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice in one mapping", line)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, where: str) -> Any:
    """The data of a YAML text. Raises ClusterError with the line when it is no YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ClusterError(f"{where}{line}: not YAML: {getattr(e, 'problem', None) or e}") from e
    except (ValueError, RecursionError) as e:
        raise ClusterError(f"{where}: not YAML that lensjax reads: {e}") from e


def load_yaml(text: str, where: str = "cluster") -> Cluster:
    return cluster_from_dict(read_yaml(text, where), where)
