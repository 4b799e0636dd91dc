"""The price of a collective: seconds and bytes on each tier, as pure functions of (cluster, groups, bytes).

One convention for bytes everywhere, that of nccl-tests: `nbytes` is the full payload S of one group, per device:
all_reduce: the array that each device holds; all_gather: the gathered array; reduce_scatter: the array before it is
scattered; all_to_all: what each device holds before (and after); permute: what each device sends; broadcast: the array.

`groups` (int [groups, members]) are device ids and run at the same time; the price is that of the slowest group. Bytes
may be an array: the groups are analysed once and a million sizes are priced in about a second. For many calls on the
same groups keep `span(cluster, groups)` and pass it in their place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives_formulas import (
    ALGORITHMS,
    CHUNKS,
    MENU,
    OPS,
    Terms,
    hierarchical,
    line,
    protocols_of,
    shift,
)
from lensjax.topology.collectives_profile import Profile, profile_of
from lensjax.topology.collectives_span import Span, hop_rates, span

__all__ = [
    "ALGORITHMS",
    "OPS",
    "Span",
    "collective_choice",
    "collective_lines",
    "collective_time",
    "span",
    "wire_bytes",
]


def collective_time(
    cluster: Cluster, op: str, groups: Any, nbytes: Any, *, algorithm: str = "auto", profile: Profile | None = None
) -> Any:
    """Seconds that a collective takes.

    `op`: one of OPS. `groups`: int [groups, members] of device ids, or a Span (not for permute, whose order matters).
    `nbytes`: a number or an array of payload bytes (see the module). `algorithm`: "auto" is the library's own choice
    among MENU[op]; or one of ALGORITHMS, where "hierarchical" is one call per tier. `profile`: the library, default the
    one fitted for this kind of machine. Returns float, or a float array like `nbytes`. A group of one costs nothing.
    Formulas: collectives_formulas. Raises ClusterError for unknown names, ids or a negative size.
    """
    sizes, profile = _sizes(nbytes), profile or profile_of(cluster)
    seconds = np.zeros(sizes.shape)
    for lines in collective_lines(cluster, op, groups, algorithm=algorithm, profile=profile):
        envelope = np.full(sizes.shape, np.inf)
        for alpha, beta in lines:
            envelope = np.minimum(envelope, alpha + beta * sizes)
        seconds = np.maximum(seconds, envelope)
    return float(seconds) if np.ndim(nbytes) == 0 else seconds


def collective_lines(
    cluster: Cluster, op: str, groups: Any, *, algorithm: str = "auto", profile: Profile | None = None
) -> np.ndarray:
    """The price as data, for many calls on the same groups: float [k, lines, 2] of (seconds, seconds per byte).

    collective_time(S) is the largest, over the k ways in which groups lie, of the smallest seconds + S * slope.
    """
    profile = profile or profile_of(cluster)
    options = _options(cluster, op, groups, algorithm, profile)
    lines = [np.stack(line(terms, profile, p), axis=1) for _, terms in options for p in protocols_of(terms, profile)]
    return np.stack(lines, axis=1)


def collective_choice(
    cluster: Cluster, op: str, groups: Any, nbytes: float, *, profile: Profile | None = None
) -> tuple[str, str]:
    """(algorithm, protocol) that "auto" takes for this size: where its answer changes is the library's switch point."""
    profile, size = profile or profile_of(cluster), float(_sizes(nbytes))
    best = []
    for name, terms in _options(cluster, op, groups, "auto", profile):
        for protocol in protocols_of(terms, profile):
            alpha, beta = line(terms, profile, protocol)
            best.append((float((alpha + beta * size).max()), name, protocol.name))
    return min(best)[1:]


def wire_bytes(cluster: Cluster, op: str, groups: Any, nbytes: float, *, algorithm: str = "ring") -> dict[str, float]:
    """Bytes that a device sends on each tier, ring factor included: {tier name: bytes}, the maximum over groups.

    On an outer tier it is what leaves a unit over the group's members in it: the library gives each NIC its part of the
    rings. Only tiers that the group uses are named. `algorithm`: "ring" (what a flat call moves), "hierarchical" or
    "tree"; all_to_all, permute and broadcast have one way each. Proportional to `nbytes`, so bytes of calls add up.
    """
    size = float(_sizes(nbytes))
    if _known(op) == "permute":
        uses, _ = hop_rates(cluster, groups)
        return {t.name: size for t, used in zip(cluster.tiers, uses.T) if used.any()}
    lies = groups if isinstance(groups, Span) else span(cluster, groups)
    name = algorithm if algorithm in (*MENU[op], "hierarchical") else MENU[op][0]
    terms = ALGORITHMS[name](cluster, op, lies, profile_of(cluster).aware_trees)
    if terms is None:
        raise ClusterError(f"{name} does not apply to these groups on {cluster.name}", hint="use algorithm='ring'")
    per_device = terms.wire * lies.units[:, :-1] / lies.members[:, None]
    if name in ("ring", "tree", "pipeline"):
        # Of a ring's q members in a node one sends to the next node, q - 1 inside.
        leave = np.where(lies.crosses[:, 1:].any(axis=1), lies.units[:, 1] / lies.members, 0.0)
        per_device[:, 0] *= 1.0 - leave
    return {t.name: size * float(b) for t, b in zip(cluster.tiers, per_device.max(axis=0)) if b > 0}


def _sizes(nbytes: Any) -> np.ndarray:
    sizes = np.asarray(nbytes, float)
    if not ((sizes >= 0) & (sizes < np.inf)).all():
        raise ClusterError(f"bytes must be at least 0 and finite; found {sizes[~((sizes >= 0) & (sizes < np.inf))][0]}")
    return sizes


def _known(op: str) -> str:
    if op not in OPS:
        raise ClusterError(f"no collective {op!r}", hint=f"one of {', '.join(OPS)}")
    return op


def _options(cluster: Cluster, op: str, groups: Any, algorithm: str, profile: Profile) -> list[tuple[str, Terms]]:
    """The algorithms to choose from, each with its terms."""
    names = MENU[_known(op)] if algorithm == "auto" else (algorithm,)
    if set(names) - set(ALGORITHMS):
        raise ClusterError(f"no algorithm {algorithm!r}", hint=f"auto, {', '.join(ALGORITHMS)}")
    if op == "permute":
        return [("direct", shift(cluster, groups))]
    lies = groups if isinstance(groups, Span) else span(cluster, groups)
    found = [
        (name, ALGORITHMS[name](cluster, op, lies, profile.aware_trees)) for name in names if name != "hierarchical"
    ]
    if "hierarchical" in names:
        ways = ((m, trees) for m in CHUNKS for trees in (False, True))
        found += [("hierarchical", hierarchical(cluster, op, lies, profile.aware_trees, *way)) for way in ways]
    options = [(name, terms) for name, terms in found if terms is not None]
    if not options:
        raise ClusterError(f"{algorithm} does not apply to {op} here on {cluster.name}", hint="use algorithm='auto'")
    return options
