"""From a cluster of the catalogue to what the compilers call it: a Target and a Layout."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lensjax._errors import ClusterError, LensjaxError
from lensjax.verify.devices import TPU_CHIPS, Layout, Target, compile_only, gpu_names, missing, target

if TYPE_CHECKING:
    from lensjax.topology.cluster import Cluster, Device

CHIPS_PER_HOST = 4  # of a TPU pod slice, all generations in TPU_CHIPS; only process indices depend on it


def target_of(device: Device) -> Target:
    """The compiler target of a catalogue device: by the chip in its name, then by the nearest memory size."""
    if device.platform == "cpu":
        return target("cpu")
    words = {w for text in (device.name, *device.kinds) for w in re.split(r"[^a-z0-9]+", text.lower())}
    if device.platform == "tpu":
        names = [chip for chip in TPU_CHIPS if chip in words]
    else:
        names = [g for g in gpu_names() if g.split("-")[0] in words]
    if not names:
        known = ", ".join((*gpu_names(), *TPU_CHIPS))
        raise ClusterError(
            f"no compiler target for device {device.name!r}; there are {known}",
            hint='compile with backend="cpu" (emulated devices), which proves less',
            code="no_target",
        )
    gib = device.memory / 2**30
    return target(min(names, key=lambda n: abs(_gib(n) - gib)))


def platform_for(cluster: Cluster, backend: str | None = None) -> str:
    """Where to compile: `backend` where named, the cluster's own compiler where it is installed, else the CPU's."""
    if backend is not None:
        return backend
    try:
        own = target_of(cluster.device).platform
    except LensjaxError:
        return "cpu"
    return "cpu" if missing(own) else own


def _gib(name: str) -> float:
    found = re.search(r"-(\d+)gb$", name)
    return float(found.group(1)) if found else 0.0


def layout_of(cluster: Cluster, chip: Target, count: int) -> Layout:
    """How `count` devices of a cluster sit, in whole innermost groups: the node, or the rack that NVLink spans."""
    if count > cluster.devices:
        raise ClusterError(f"the step is for {count} devices, {cluster.name} has {cluster.devices}")
    if chip.platform == "cpu":
        return Layout(1, count)
    if chip.platform == "tpu":
        return _torus(cluster, count)
    group = min(cluster.tiers[0].size, count)
    return Layout(hosts=math.ceil(count / group), per_host=group)


def _torus(cluster: Cluster, count: int) -> Layout:
    inner = cluster.tiers[0]
    if count % inner.size:
        raise ClusterError(f"a TPU step takes whole slices of {inner.size} chips, not {count} chips")
    shape = "x".join(str(n) for n in inner.shape or (inner.size, 1))
    per_host = math.gcd(CHIPS_PER_HOST, inner.size)
    return Layout(inner.size // per_host, per_host, slices=count // inner.size, shape=shape)


def target_devices(cluster: Cluster, backend: str | None = None) -> list[Any]:
    """Compile-only devices of a whole cluster, one per device id: build meshes on them, and lower for their platform.

    `backend="cpu"` gives emulated devices instead. Raises CompileError where the compiler is not installed.
    """
    chip = target("cpu") if backend == "cpu" else target_of(cluster.device)
    return compile_only(chip.name, layout_of(cluster, chip, cluster.devices))[: cluster.devices]


def in_order(devices: Sequence[Any], order: Sequence[int] | None) -> list[Any]:
    """Devices by position in a mesh: the device with id `order[i]` at position i."""
    return list(devices) if order is None else [devices[i] for i in order]
