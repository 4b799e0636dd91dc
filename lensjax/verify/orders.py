"""Other orders of the devices for the same compiled step: which mesh axis should have the fast links."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from lensjax.verify.finding import Case
from lensjax.verify.prices import Priced
from lensjax.verify.traffic import traffic

_LIMIT = 24  # orders tried: all of four axes


@dataclasses.dataclass(frozen=True)
class Order:
    """Mesh axes from the outermost to the innermost; seconds of a step's collectives; bytes that leave a node."""

    nesting: tuple[str, ...]
    seconds: float
    outside: float


def orders(case: Case) -> tuple[Order, Order]:
    """(the order of devices as it is, the fastest of the nestings of the mesh's axes).

    A compiled step names positions in the mesh; which device sits at a position is free.
    """
    sizes = case.mesh
    axes = [a for a, n in sizes.items() if n > 1]
    now = best = _order(case, tuple(axes), case.priced)
    for nesting in itertools.islice(itertools.permutations(axes), _LIMIT):
        ids = _ids(sizes, nesting)
        other = _order(case, nesting, Priced(case.cluster, len(ids), ids))
        if other.seconds < best.seconds * 0.999:
            best = other
    return now, best


def _ids(sizes: dict[str, int], nesting: tuple[str, ...]) -> list[int]:
    """Device id of each mesh position when the axes are nested as told, the last one innermost."""
    names = list(sizes)
    outer = [*(a for a in names if a not in nesting), *nesting]
    ids = np.arange(int(np.prod([sizes[a] for a in outer]))).reshape([sizes[a] for a in outer])
    return ids.transpose([outer.index(a) for a in names]).ravel().tolist()


def _order(case: Case, nesting: tuple[str, ...], priced: Priced) -> Order:
    took = sum(c.trips * priced.seconds(c) for c in case.found.collectives)
    flow = traffic(case.found.collectives, case.mesh, priced.bytes)
    return Order(nesting, took, flow.outside(case.cluster.tiers[0].name))
