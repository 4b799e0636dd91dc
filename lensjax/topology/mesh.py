"""Cluster -> device order -> `jax.sharding.Mesh`: the heaviest traffic on the fastest links.

`place` needs no devices: it searches the regular boxes of the cluster (levels.py) and the ways to split their levels
among the axes (factor.py), fills the devices in the order of the tiers as well (63 devices as 9x7 have no box), and
takes the cheapest order (choice.py). Damage is worked around: whole subgroups are left idle so that what is used is
regular, and the placement says which devices those are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology import loads
from lensjax.topology.choice import cheapest
from lensjax.topology.cluster import Cluster
from lensjax.topology.factor import Split, arrange, best_splits
from lensjax.topology.levels import Level, frames, levels, select, variants

if TYPE_CHECKING:
    import jax

_HEAVIEST, _RATIO = (
    1e9,
    1000.0,
)  # where no traffic is told: bytes per step on the last axis, and over those on the one before
_MAX_NESTED = 4  # axes of which every nesting is tried
_MAX_FRAMES = 24  # boxes tried, those that fill the inner tiers first


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a mesh sits. `order`: device ids, int [axis sizes]; `axes`: name -> size; `seconds`: predicted per step
    for the traffic (choice.predicted_seconds); `idle`: device ids that are not used; `tiers`: axis -> names of the
    tiers it runs on; `regular`: False when the devices are filled in order, on no regular box of the cluster.
    """

    order: np.ndarray = dataclasses.field(repr=False)
    axes: Mapping[str, int]
    seconds: float
    idle: tuple[int, ...]
    tiers: Mapping[str, tuple[str, ...]]
    regular: bool


def place(cluster: Cluster, axes: Mapping[str, int], traffic: Mapping[str, float] | None = None) -> np.ndarray:
    """Device ids in mesh order, int array of the axes' sizes. See `placement`."""
    return placement(cluster, axes, traffic).order


def placement(cluster: Cluster, axes: Mapping[str, int], traffic: Mapping[str, float] | None = None) -> Placement:
    """The cheapest placement found of a mesh with these axes.

    `axes`: name -> size; one size may be -1, which takes as many devices as can be used regularly. `traffic`: name ->
    bytes that each device sends along the axis per step; None takes 1 GB on the last axis and on each before it a
    thousandth of the next, as in hand-written meshes, whose last axis is the model's. Raises ClusterError when there
    are too few devices.
    """
    axes = _complete(cluster, axes)
    nbytes = _traffic(axes, traffic)
    boxes, filled = _on_boxes(cluster, axes, nbytes), _filled(cluster, axes, nbytes)
    seconds, ids, regular = cheapest(cluster, boxes, filled, nbytes, axes)
    idle = np.setdiff1d(np.arange(cluster.devices), ids)
    tiers = {a: _tiers_of(cluster, ids, i) for i, a in enumerate(axes)}
    return Placement(ids, dict(axes), seconds, tuple(int(i) for i in idle), tiers, regular)


def make_mesh(
    cluster: Cluster,
    axes: Mapping[str, int],
    traffic: Mapping[str, float] | None = None,
    devices: Sequence[Any] | None = None,
) -> jax.sharding.Mesh:
    """A mesh of `devices` (default: `jax.devices()`), device i of the list being device i of the cluster.

    Every axis is `AxisType.Auto`: `jax.make_mesh` makes Explicit ones, which reject ordinary programs. Raises
    ClusterError when the number of devices is not the cluster's.
    """
    import jax

    devices = jax.devices() if devices is None else list(devices)
    if len(devices) != cluster.devices:
        raise ClusterError(
            f"cluster {cluster.name!r} has {cluster.devices} devices; {len(devices)} were given",
            hint="describe the machine at hand (lensjax.topology.discover.live), or pass its devices",
        )
    order = place(cluster, axes, traffic)
    array = np.empty(len(devices), object)
    array[:] = devices
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(array[order], tuple(axes), axis_types=types)


def _complete(cluster: Cluster, axes: Mapping[str, int]) -> dict[str, int]:
    """The axes with -1 replaced; raises ClusterError when they do not fit."""
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in axes.values()):
        raise ClusterError(f"mesh axes {dict(axes)}", hint="sizes are whole numbers")
    axes = {a: int(n) for a, n in axes.items()}
    bad = {a: n for a, n in axes.items() if n < 1 and n != -1}
    free = [a for a, n in axes.items() if n == -1]
    if not axes or bad or len(free) > 1:
        raise ClusterError(f"mesh axes {dict(axes)}", hint="sizes are at least 1; one of them may be -1")
    fixed = math.prod(n for n in axes.values() if n > 0)
    result = dict(axes)
    if free and fixed <= cluster.devices:
        most = cluster.devices // fixed
        result[free[0]] = next((n for n in range(most, 0, -1) if _has_box(cluster, n * fixed, fixed)), most)
    elif free or fixed > cluster.devices:
        raise ClusterError(
            f"a mesh {_text(axes)} needs {fixed} devices; {cluster.name} has {cluster.devices}",
            hint=f"sizes that multiply to at most {cluster.devices}, or -1 for one of them",
        )
    return result


def _boxes(cluster: Cluster, count: int) -> Iterator[tuple[list[Level], tuple[int, ...]]]:
    """Regular boxes of `count` devices, the plain reading of the cluster first, fullest inside first."""
    for frame in variants(cluster):
        yield from ((frame, used) for used in frames(frame, count)[:_MAX_FRAMES])


def _has_box(cluster: Cluster, count: int, fixed: int) -> bool:
    """Whether `count` devices form a box that keeps the other axes (`fixed` devices together) whole: half a node as a
    subgroup serves axes that fit in it, but must not spread a whole node's axes over two nodes.
    """
    plain = levels(cluster)
    return any(
        select(cluster, frame, used) is not None
        for frame, used in _boxes(cluster, count)
        if frame[0].length == plain[0].length or frame[0].length % fixed == 0
    )


def _traffic(axes: Mapping[str, int], traffic: Mapping[str, float] | None) -> dict[str, float]:
    if traffic is None:
        return {a: _HEAVIEST / _RATIO ** (len(axes) - 1 - i) for i, a in enumerate(axes)}
    unknown = [a for a in traffic if a not in axes]
    numbers = all(isinstance(v, int | float | np.number) for v in traffic.values())
    if unknown or not numbers or any(not 0 <= v < math.inf for v in traffic.values()):
        raise ClusterError(
            f"traffic {dict(traffic)} for axes {list(axes)}", hint="bytes per device, at least 0, of these axes"
        )
    return {a: float(traffic.get(a, 0.0)) for a in axes}


def _on_boxes(cluster: Cluster, axes: Mapping[str, int], nbytes: Mapping[str, float]) -> Iterator[np.ndarray]:
    """Device ids in mesh order on regular boxes: on the box with the least load on its links every split that the
    search kept, best first. Coarser readings of the cluster only where the plain one has no box.
    """
    sizes, weights = tuple(axes.values()), [nbytes[a] for a in axes]
    best: tuple[float, list[Level], np.ndarray, list[list[Split]]] | None = None
    for frame, used in _boxes(cluster, math.prod(sizes)):
        if best is not None and frame is not best[1]:
            break
        found = best_splits(cluster, frame, used, sizes, weights)
        slots = select(cluster, frame, used) if found else None
        if slots is not None:
            load = loads.seconds(cluster, _ids(cluster, arrange(slots, found[0], sizes)), nbytes, axes)
            if best is None or load < best[0]:
                best = load, frame, slots, found
    if best is not None:
        _, _, slots, found = best
        yield from (_ids(cluster, arrange(slots, splits, sizes)) for splits in found)


def _ids(cluster: Cluster, slots: np.ndarray) -> np.ndarray:
    id_of = np.full(cluster.capacity, -1)
    id_of[cluster.slots] = np.arange(cluster.devices)
    return id_of[slots]


def _filled(cluster: Cluster, axes: Mapping[str, int], nbytes: Mapping[str, float]) -> Iterator[np.ndarray]:
    """Device ids in the order of their slots, the axes nested in each of their orders, as listed first. Of more than
    four axes only the lightest outermost besides: their orders are too many.
    """
    sizes = tuple(axes.values())
    ids = np.argsort(cluster.slots, kind="stable")[: math.prod(sizes)]
    listed, ones = (tuple(i for i, n in enumerate(sizes) if (n == 1) == one) for one in (False, True))
    weights = list(nbytes.values())
    few = (listed, tuple(sorted(listed, key=lambda i: weights[i])))
    for nesting in itertools.permutations(listed) if len(listed) <= _MAX_NESTED else few:
        nesting = (*ones, *nesting)
        yield ids.reshape([sizes[a] for a in nesting]).transpose(np.argsort(nesting))


def _tiers_of(cluster: Cluster, order: np.ndarray, axis: int) -> tuple[str, ...]:
    """Names of the tiers that neighbours along an axis are joined by, innermost first."""
    if order.shape[axis] == 1:
        return ()
    groups = loads.axis_groups(order, axis)
    pairs = np.stack([groups[:, :-1], groups[:, 1:]], axis=-1).reshape(-1, 2)
    return tuple(cluster.tiers[i].name for i in np.unique(cluster.tier_of(pairs)))


def _text(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{a}={n}" for a, n in axes.items())
