"""The pricing formulas over many measured rows at once, each with constants of its own: what the fit evaluates.

The geometry of a row (hops, wire time per byte at the links' rate) does not depend on the constants, so it is computed
once; an evaluation is then a dozen array operations over all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from lensjax._errors import ClusterError
from lensjax.topology.cluster import Cluster
from lensjax.topology.collectives_formulas import ALGORITHMS, MENU, OPS, Terms, line, shift
from lensjax.topology.collectives_profile import NCCL_PROTOCOLS, PLAIN, family_of, outer_family_of
from lensjax.topology.collectives_span import span
from lensjax.topology.collectives_table import Row, place

_OPTIONS = ("ring", "tree", "multicast", "direct", "pipeline")


@dataclasses.dataclass(frozen=True, eq=False)
class Design:
    """Rows as arrays. `terms`: algorithm -> (Terms over all rows, bool [rows] where it applies). `sized`: the row
    states its size. `packs`: the row was taken through an interface that packs lists of shards. `plain`: rows without
    protocols (TPU). `wired`: how the links join the devices is known.
    """

    system: tuple[str, ...]
    inner: tuple[str, ...]
    outer: tuple[str, ...]
    devices: np.ndarray
    wired: np.ndarray
    ops: tuple[str, ...]
    sizes: np.ndarray
    sized: np.ndarray
    measured: np.ndarray
    packs: np.ndarray
    plain: np.ndarray
    terms: Mapping[str, tuple[Terms, np.ndarray]]

    def touches(self, parameter: str) -> np.ndarray:
        """bool [rows]: rows whose prediction can depend on a parameter; the others say nothing about it."""
        applies = {name: mask for name, (_, mask) in self.terms.items()}
        nowhere = np.zeros(len(self.system), bool)
        direct, outside = applies.get("direct", nowhere), np.array([bool(o) for o in self.outer])
        if parameter.startswith("shard_"):
            return self.packs
        if parameter.startswith("multicast"):
            return applies.get("multicast", nowhere)
        if parameter in ("thin", "middle", "hop_outer"):
            return ~self.plain & (outside | (parameter != "hop_outer"))
        if parameter in ("direct_base", "peer", "direct", "direct_outer"):
            return direct & (outside | (parameter != "direct_outer"))
        if parameter in ("ring", "ring_outer"):
            return ~direct & (outside | (parameter != "ring_outer"))
        return outside if parameter == "launch_outer" else ~nowhere

    def subset_keys(self) -> list[tuple[str, int, bool, str]]:
        """(system, devices, wired, ring or direct) of each row."""
        ways = ("direct" if op in ("all_to_all", "permute") else "ring" for op in self.ops)
        return list(zip(self.system, self.devices.tolist(), self.wired.tolist(), ways))

    @property
    def impossible(self) -> np.ndarray:
        """bool [rows]: faster than the links at line rate, so the row's bandwidth means something else."""
        bound = np.full(len(self.sizes), np.inf)
        for terms, applies in self.terms.values():
            bound = np.where(applies, np.minimum(bound, np.maximum(terms.inner, terms.outer) * self.sizes), bound)
        return (self.measured < 0.95 * bound) & self.wired

    def seconds(self, logs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Predicted seconds, float [rows]; `logs`: parameter -> log value of each row."""
        v = SimpleNamespace(**{name: np.exp(value) for name, value in logs.items()})
        v.rendezvous = False
        v.ring, v.direct = v.ring * v.subset_ring, v.direct * v.subset_direct
        v.ring_outer, v.direct_outer = v.ring_outer * v.subset_ring, v.direct_outer * v.subset_direct
        middle = np.minimum(v.middle, 1.0)
        fractions = (np.minimum(v.thin, middle), middle, 1.0)
        best = np.full(len(self.sizes), np.inf)
        for terms, applies in self.terms.values():
            fitted = [dataclasses.replace(p, fraction=f) for p, f in zip(NCCL_PROTOCOLS, fractions)]
            for protocol in fitted[2:] if terms.kind == "multicast" else fitted:
                best = self._cheaper(best, terms, applies & ~self.plain, v, protocol)
            best = self._cheaper(best, terms, applies & self.plain, v, PLAIN[0])
        packing = v.shard_launch + v.shard_peer * self.devices + self.sizes / v.shard_copy
        return best + np.where(self.packs, packing, 0.0)

    def _cheaper(
        self, best: np.ndarray, terms: Terms, applies: np.ndarray, constants: Any, protocol: Any
    ) -> np.ndarray:
        alpha, beta = line(terms, constants, protocol)
        return np.where(applies, np.minimum(best, alpha + beta * self.sizes), best)


def design(rows: Sequence[Row]) -> Design:
    """The geometry of all rows. Raises ClusterError for a row whose machine or collective is not known."""
    cases = {}
    for row in rows:
        if _key(row) not in cases:
            cases[_key(row)] = _case(row)
    each = [cases[_key(r)] for r in rows]
    sizes = np.array([r.priced_bytes for r in rows], float)
    measured = np.array([r.seconds or (s / r.rate if r.rate else np.nan) for r, s in zip(rows, sizes)])
    clusters = [c for c, _ in each]
    terms = {name: _stack([options.get(name) for _, options in each]) for name in _OPTIONS}
    return Design(
        system=tuple(r.system for r in rows),
        inner=tuple(family_of(c) for c in clusters),
        outer=tuple(outer_family_of(c) if len(c.tiers) > 1 else "" for c in clusters),
        devices=np.array([r.devices for r in rows]),
        wired=np.array([not any("wiring unknown" in note for note in c.notes) for c in clusters]),
        ops=tuple(r.op for r in rows),
        sizes=sizes,
        sized=np.array([r.bytes is not None for r in rows]),
        measured=measured,
        packs=np.array(["concat" in r.notes and r.op in ("all_gather", "reduce_scatter") for r in rows]),
        plain=np.array([c.device.platform in ("tpu", "cpu") for c in clusters]),
        terms={name: found for name, found in terms.items() if found[1].any()},
    )


def _key(row: Row) -> tuple[Any, ...]:
    return (*row.series, row.notes if "strided" in row.notes or "node" in row.notes else "")


def _case(row: Row) -> tuple[Cluster, dict[str, Terms]]:
    cluster, groups = place(row)
    if row.op not in OPS:
        raise ClusterError(f"line {row.line}: no collective {row.op!r}", hint=f"one of {', '.join(OPS)}")
    if row.op == "permute":
        return cluster, {"direct": shift(cluster, groups)}
    aware, lies = outer_family_of(cluster) == "efa", span(cluster, groups)
    options = {name: ALGORITHMS[name](cluster, row.op, lies, aware) for name in MENU[row.op]}
    return cluster, {name: terms for name, terms in options.items() if terms is not None}


def _stack(found: list[Terms | None]) -> tuple[Terms, np.ndarray]:
    """One Terms over all rows (a row's slowest way of lying), and where there is one."""
    applies = np.array([t is not None for t in found])
    first = next((t for t in found if t is not None), None)
    values = [
        np.array([0.0 if t is None else getattr(t, name).max() for t in found])
        for name in ("wait_inner", "once", "wait_outer", "inner", "outer")
    ]
    peers = np.array([0.0 if t is None else t.peers.max() for t in found])
    return Terms(*values, wire=np.zeros((len(found), 0)), peers=peers, kind=first.kind if first else "ring"), applies
