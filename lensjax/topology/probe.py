"""Measuring the live devices: sweeps of real collectives over each tier, the same on every process.

The devices are laid out as tiers of processes and hosts; on each tier a collective runs in all its groups at once (so
that what shares a link is measured sharing it), and on the tiers outside a process once more in one group alone, which
shows how far one device can go when its neighbours are silent. Only public JAX: jit, shard_map, lax collectives,
jax.distributed.
"""

from __future__ import annotations

import dataclasses
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax._errors import ClusterError

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
_DTYPE = jnp.float32


@dataclasses.dataclass(frozen=True)
class Level:
    """A tier of the live devices, before it is measured: `size` devices in one group (cumulative), `groups` int
    [groups, members] of positions in the device order, each group with one member per unit of the tier below.
    """

    name: str
    size: int
    groups: np.ndarray


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement. `bytes`: payload as in `collectives`; `alone`: one group with all others silent."""

    tier: str
    op: str
    devices: int
    bytes: float
    seconds: float
    alone: bool = False


def levels(devices: Sequence[Any]) -> tuple[list[Any], list[Level]]:
    """The devices in tier order, and their tiers: process, host (when it has several processes), everything.

    Raises ClusterError when processes hold different numbers of devices.
    """
    hosts = dict(zip(range(jax.process_count()), _everywhere(float(zlib.crc32(socket.gethostname().encode())))))
    ordered = sorted(
        devices, key=lambda d: (getattr(d, "slice_index", 0), hosts[d.process_index], d.process_index, d.id)
    )
    per_process = _even([d.process_index for d in ordered], "process")
    per_host = _even([(getattr(d, "slice_index", 0), hosts[d.process_index]) for d in ordered], "host")
    names = [("process", per_process), ("host", per_host), ("network", len(ordered))]
    found, below = [], 1
    for name, size in names:
        if size > below:
            ids = np.arange(len(ordered)).reshape(-1, size // below, below)
            found.append(Level(name, size, np.moveaxis(ids, 1, 2).reshape(-1, size // below)))
            below = size
    if not found:
        raise ClusterError(
            "one device has no links to measure", hint="lensjax probe --emulate 8, or start one process on each host"
        )
    return ordered, found


def _even(keys: list[Any], what: str) -> int:
    """Members per key, which must be the same number for each."""
    counts = {key: keys.count(key) for key in dict.fromkeys(keys)}
    if len(set(counts.values())) > 1:
        raise ClusterError(
            f"{what}s hold different numbers of devices: {sorted(counts.values())}", hint=f"probe equal {what}s"
        )
    return next(iter(counts.values()))


def sweep(
    devices: Sequence[Any],
    found: Sequence[Level],
    sizes: Sequence[int],
    *,
    ops: Sequence[str] = OPS,
    budget: float = 1.0,
) -> Iterator[Point]:
    """Measures each (tier, operation, size): yields Points. The same on every process, slowest process counts.

    A series of sizes ends when one call takes longer than `budget` seconds.
    """
    for level in found:
        alone = level.name != "process" and len(level.groups) > 1
        for op, single in [(op, False) for op in ops] + ([(ops[0], True)] if alone else []):
            groups = level.groups[:1] if single else level.groups
            for size in sizes:
                seconds = measure(devices, groups, op, size, budget)
                yield Point(level.name, op, groups.shape[1], _payload(size, groups.shape[1]), seconds, single)
                if seconds > budget:
                    break


def _payload(size: int, members: int) -> int:
    """The nearest payload that splits into whole float32 for every member."""
    return max(round(size / (4 * members)), 1) * 4 * members


def measure(devices: Sequence[Any], groups: np.ndarray, op: str, size: int, budget: float) -> float:
    """Seconds of one call: `op` in all `groups` at once with `size` bytes of payload.

    The lower quartile of a few calls, since others use the machine too, on the slowest process.
    """
    chosen = np.array(devices, dtype=object)[groups]
    mesh = Mesh(chosen, ("group", "member"))
    call, array = _prepare(mesh, op, _payload(size, groups.shape[1]) // 4)
    jax.block_until_ready(call(array))
    times = [_timed(call, array)]
    slowest = max(_everywhere(times[0]))
    repeats = int(np.clip(0.3 * budget / max(slowest, 1e-9), 3, 20))
    times += [_timed(call, array) for _ in range(repeats)]
    return max(_everywhere(float(np.quantile(times, 0.25))))


def _timed(call: Callable, array: jax.Array) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call(array))
    return time.perf_counter() - begin


def _prepare(mesh: Mesh, op: str, count: int) -> tuple[Callable, jax.Array]:
    """The jitted collective and its input: `count` float32 of payload per device (all_gather: of the gathered
    array).
    """
    groups, members = mesh.devices.shape
    local = count // members if op == "all_gather" else count
    shift = [(i, (i + 1) % members) for i in range(members)]
    body = {
        "all_reduce": lambda x: lax.psum(x, "member"),
        "all_gather": lambda x: lax.all_gather(x, "member", tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, "member", tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, "member", 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, "member", shift),
    }[op]
    spec = P(("group", "member"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    shape = (groups * members * local,)
    ones = np.ones(local, np.float32)
    array = jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: ones)
    return jax.jit(mapped), array


def _everywhere(value: float) -> list[float]:
    """The value of each process, the same list on all."""
    if jax.process_count() == 1:
        return [value]
    gathered = multihost_utils.process_allgather(np.array([value], np.float32))
    return [float(v) for v in np.asarray(gathered).ravel()]
