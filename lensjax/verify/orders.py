"""Other orders of the devices for the same compiled step: which mesh axis should have the fast links."""

from __future__ import annotations

import itertools

import numpy as np

from lensjax.verify.finding import Case
from lensjax.verify.prices import Priced

_LIMIT = 24  # orders tried: all of four axes


def best_order(case: Case) -> tuple[float, float, tuple[str, ...]]:
    """(seconds of all collectives now, with the best nesting of mesh axes, that nesting, outermost first).

    A compiled step names positions in the mesh; which device sits at a position is free.
    """
    sizes = case.mesh
    axes = [a for a, n in sizes.items() if n > 1]
    now = _seconds(case, case.priced)
    best, order = now, tuple(axes)
    for nesting in itertools.islice(itertools.permutations(axes), _LIMIT):
        ids = _ids(sizes, nesting)
        took = _seconds(case, Priced(case.cluster, len(ids), ids))
        if took < best * 0.999:
            best, order = took, nesting
    return now, best, order


def _ids(sizes: dict[str, int], nesting: tuple[str, ...]) -> list[int]:
    """Device id of each mesh position when the axes are nested as told, the last one innermost."""
    names = list(sizes)
    outer = [*(a for a in names if a not in nesting), *nesting]
    ids = np.arange(int(np.prod([sizes[a] for a in outer]))).reshape([sizes[a] for a in outer])
    return ids.transpose([outer.index(a) for a in names]).ravel().tolist()


def _seconds(case: Case, priced: Priced) -> float:
    return sum(c.trips * priced.seconds(c) for c in case.found.collectives)
