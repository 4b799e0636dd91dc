"""Fit of the library's constants to measured collectives: one curve for all, deviations only where the data asks for
them.

Every constant of a Profile is exp(base + family + system): a base that all measurements share, a deviation per kind of
machine (accelerator generation; network) and one per measured system, each held near zero by a ridge penalty (partial
pooling: a system with many rows speaks for itself, one with few or none takes its family's word). The base is held near
NCCL's own constants. Residuals are log(predicted / measured), made robust by a pseudo-Huber loss, so one bad row bends
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from lensjax.topology.calibrate_model import Design, design
from lensjax.topology.collectives_profile import NCCL_PROTOCOLS, PLAIN, Profile
from lensjax.topology.collectives_table import Row


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A constant to fit. `start`: its value before any data; `level`: which families it varies with; `base`, `family`,
    `system`: spreads of its logarithm (0.7: about 2x).
    """

    name: str
    start: float
    level: str
    base: float
    family: float
    system: float


# Starts: NCCL src/graph/tuning.cc (protocols, baseLat NVLS 23 us, busBw fractions); efficiencies as nccl-tests usually
# shows them.
PARAMETERS = (
    Parameter("launch", 15e-6, "inner", 1.0, 0.7, 0.5),
    Parameter("launch_outer", 20e-6, "outer", 1.0, 0.7, 0.5),
    Parameter("hop", 1.0, "inner", 0.5, 0.5, 0.4),
    Parameter("hop_outer", 1.5, "outer", 0.7, 0.5, 0.4),
    Parameter("ring", 0.78, "inner", 0.1, 0.15, 0.15),
    Parameter("ring_outer", 0.88, "outer", 0.1, 0.15, 0.3),
    Parameter("direct", 0.7, "inner", 0.2, 0.15, 0.15),
    Parameter("direct_outer", 0.75, "outer", 0.2, 0.15, 0.3),
    Parameter("direct_base", 15e-6, "inner", 1.0, 0.7, 0.7),
    Parameter("multicast", 0.58, "inner", 0.1, 0.2, 0.1),
    Parameter("multicast_base", 20e-6, "inner", 0.7, 0.4, 0.4),
    Parameter("peer", 5e-6, "inner", 0.7, 0.7, 0.7),
    Parameter("thin", 0.25, "inner", 0.5, 0.3, 0.2),  # LL: busBw / 4 to / 2
    Parameter("middle", 0.92, "inner", 0.05, 0.1, 0.1),  # LL128: 120 of 128 bytes
    Parameter("shard_launch", 100e-6, "inner", 1.0, 0.1, 0.5),
    Parameter("shard_peer", 30e-6, "inner", 1.0, 0.1, 0.5),
    Parameter("shard_copy", 200e9, "inner", 0.5, 0.1, 0.3),
)
NOISE = 0.06  # typical scatter of repeated nccl-tests rows, in log time
KNEE = 2.0  # residuals beyond this many NOISE count linearly
# How far a subset's bandwidth may be from what its links give: far where the wiring is unknown.
SUBSET_WIRED, SUBSET_UNKNOWN = 0.03, 0.5
_STARTS = {p.name: float(np.log(p.start)) for p in PARAMETERS}
_SUBSETS = ("subset_ring", "subset_direct")


@dataclasses.dataclass(frozen=True)
class Fit:
    """Constants as logarithms: `base`: parameter -> log; `families`: "inner/ampere" or "outer/efa" -> parameter ->
    deviation; `systems`: system text -> parameter -> deviation; `subsets`: system text ->
    "ring/8" or "direct/8" -> deviation of the bandwidth of 8 of its devices.
    """

    base: Mapping[str, float]
    families: Mapping[str, Mapping[str, float]]
    systems: Mapping[str, Mapping[str, float]]
    subsets: Mapping[str, Mapping[str, float]]

    def log(self, parameter: Parameter, inner: str, outer: str, system: str = "") -> float:
        family = f"{parameter.level}/{inner if parameter.level == 'inner' else outer}"
        deviation = self.families.get(family, {}).get(parameter.name, 0.0)
        return self.base[parameter.name] + deviation + self.systems.get(system, {}).get(parameter.name, 0.0)

    def profile(self, inner: str, outer: str, system: str = "") -> Profile:
        """The profile of a kind of machine, or of one measured system of that kind."""
        if inner == "cpu":
            return Profile(
                "gloo", PLAIN, rendezvous=True, source="tiers as lensjax probe measures them: nothing on top"
            )
        v = {p.name: float(np.exp(self.log(p, inner, outer, system))) for p in PARAMETERS}
        if inner == "tpu":
            keep = ("launch", "launch_outer", "ring", "ring_outer", "direct", "direct_outer")
            plain = Profile("ici", PLAIN, source="fitted, family values")
            return dataclasses.replace(plain, **{name: v[name] for name in keep})
        thin, middle = v.pop("thin"), min(v.pop("middle"), 1.0)
        fractions = (min(thin, middle), middle, 1.0)
        protocols = tuple(dataclasses.replace(p, fraction=f) for p, f in zip(NCCL_PROTOCOLS, fractions))
        v = {name: value for name, value in v.items() if not name.startswith("shard_")}
        name = "rccl" if inner == "cdna" else "nccl"
        return dataclasses.replace(Profile(name, protocols, aware_trees=outer == "efa", source="fitted"), **v)


@functools.cache
def shipped() -> Fit:
    """The fit that comes with lensjax (benchmarks/fit_collectives.py makes it from published measurements)."""
    from lensjax.topology.collectives_fitted import BASE, FAMILIES, SUBSETS, SYSTEMS

    return Fit(BASE, FAMILIES, SYSTEMS, SUBSETS)


def fit(rows: Sequence[Row]) -> Fit:
    """The constants that explain the rows best. Rows that state neither a time nor a rate, or one that no link can
    reach (another definition of bandwidth), are left out.
    """
    problem = Problem(rows)
    return problem.unpack(problem.solve())


def left_out(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> np.ndarray:
    """Seconds of each row as predicted by a fit that saw no row with the same key: float [rows]."""
    problem = Problem(rows)
    keys = [key(r) for r in rows]
    result = np.empty(len(rows))
    for each in dict.fromkeys(keys):
        mine = np.array([k == each for k in keys])
        result[mine] = problem.seconds(problem.solve(~mine))[mine]  # from scratch: nothing of these rows leaks in
    return result


def predict(found: Fit, rows: Sequence[Row]) -> np.ndarray:
    """Seconds of each row: float [rows]. A system that the fit does not know takes its family's word."""
    data = design(rows)
    where = list(zip(data.inner, data.outer, data.system))
    logs = {p.name: np.array([found.log(p, *place) for place in where]) for p in PARAMETERS}
    keys = data.subset_keys()
    for name in _SUBSETS:
        kind = name.removeprefix("subset_")
        known = [(found.subsets.get(s, {}), f"{way}/{n}", way == kind) for s, n, _, way in keys]
        logs[name] = np.array([mine.get(key, 0.0) if applies else 0.0 for mine, key, applies in known])
    return data.seconds(logs)


@dataclasses.dataclass(frozen=True)
class Unknown:
    """One number to find: how far `parameter` is from its start at a level (base, family, system or subset) for `who`;
    `spread`: how large that usually is.
    """

    level: str
    who: str
    parameter: str
    spread: float


class Problem:
    """The least-squares problem of a table: rows, unknowns, and which unknowns add up to each row's log constants."""

    def __init__(self, rows: Sequence[Row]):
        self.data = design(rows)
        self.unknowns = _unknowns(self.data)
        self.matrices = _matrices(self.data, self.unknowns)
        self.spread = np.array([u.spread for u in self.unknowns])
        known = np.isfinite(self.data.measured)
        trust = np.where(self.data.sized, 1.0, 0.5)  # half of it where the size is not stated
        self.weight = np.where(known & ~self.data.impossible, trust, 0.0) / NOISE
        self.measured = np.log(np.where(known, self.data.measured, 1.0))

    def logs(self, z: np.ndarray) -> dict[str, np.ndarray]:
        return {name: _STARTS.get(name, 0.0) + matrix @ z[mine] for name, (mine, matrix) in self.matrices.items()}

    def seconds(self, z: np.ndarray) -> np.ndarray:
        return self.data.seconds(self.logs(z))

    def solve(self, use: np.ndarray | None = None, steps: int = 60) -> np.ndarray:
        """The unknowns that fit the rows in `use` (bool [rows], default all): damped Gauss-Newton, robust loss."""
        weight = self.weight if use is None else self.weight * use
        z = np.zeros(len(self.unknowns))
        loss, damping = self._loss(z, weight), 1e-3
        for _ in range(steps):
            gradient, hessian = self._quadratic(z, weight)
            damped = hessian + damping * np.diag(np.diag(hessian))
            new = z - cho_solve(cho_factor(damped), gradient)
            value = self._loss(new, weight)
            if value < loss:
                z, gain, loss, damping = new, loss - value, value, damping / 5
                if gain < 1e-5 * loss:
                    break
            else:
                damping *= 10
                if damping > 1e6:
                    break
        return z

    def unpack(self, z: np.ndarray) -> Fit:
        base, families, systems, subsets = dict(_STARTS), {}, {}, {}
        for value, u in zip(z.tolist(), self.unknowns):
            if u.level == "base":
                base[u.parameter] += value
            elif u.level == "subset":
                system, _, key = u.who.rpartition("|")
                subsets.setdefault(system, {})[key] = value
            else:
                (families if u.level == "family" else systems).setdefault(u.who, {})[u.parameter] = value
        return Fit(base, families, systems, subsets)

    def _loss(self, z: np.ndarray, weight: np.ndarray) -> float:
        e = (np.log(self.seconds(z)) - self.measured) * weight
        return float((KNEE**2 * (np.sqrt(1 + (e / KNEE) ** 2) - 1)).sum() + 0.5 * ((z / self.spread) ** 2).sum())

    def _quadratic(self, z: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gradient and Gauss-Newton Hessian. Slopes by a step in a parameter of all rows at once."""
        logs, step = self.logs(z), 1e-4
        now = np.log(self.data.seconds(logs))
        total = np.zeros((len(now), len(z)))
        for name, (mine, matrix) in self.matrices.items():
            slope = (np.log(self.data.seconds({**logs, name: logs[name] + step})) - now) / step
            total[:, mine] = slope[:, None] * matrix
        e = (now - self.measured) * weight
        robust = weight / np.sqrt(1 + (e / KNEE) ** 2)
        gradient = total.T @ (robust * e) + z / self.spread**2
        return gradient, (total * (robust * weight)[:, None]).T @ total + np.diag(1 / self.spread**2)


def _unknowns(data: Design) -> list[Unknown]:
    """The base of every parameter, and deviations of those families and systems that have a row to tell it."""
    found = [Unknown("base", "", p.name, p.base) for p in PARAMETERS]
    for p in PARAMETERS:
        told = np.flatnonzero(data.touches(p.name))
        families = data.inner if p.level == "inner" else data.outer
        found += [
            Unknown("family", f"{p.level}/{f}", p.name, p.family) for f in sorted({families[i] for i in told}) if f
        ]
        found += [Unknown("system", s, p.name, p.system) for s in sorted({data.system[i] for i in told})]
    for system, devices, wired, way in sorted(set(data.subset_keys())):
        spread = SUBSET_WIRED if wired else SUBSET_UNKNOWN
        found.append(Unknown("subset", f"{system}|{way}/{devices}", f"subset_{way}", spread))
    return found


def _matrices(data: Design, unknowns: list[Unknown]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per parameter its unknowns (indices) and the 0/1 matrix [rows, those] that sums up each row's log value over its
    start.
    """
    inner, outer = (
        np.array([f"{level}/{f}" for f in fs]) for level, fs in (("inner", data.inner), ("outer", data.outer))
    )
    system = np.array(data.system)
    subset = np.array([f"{s}|{way}/{n}" for s, n, _, way in data.subset_keys()])
    result = {}
    for name in (*_STARTS, *_SUBSETS):
        mine = np.array([j for j, u in enumerate(unknowns) if u.parameter == name], int)
        matrix = np.zeros((len(system), len(mine)))
        for column, u in enumerate(unknowns[j] for j in mine):
            matrix[:, column] = {
                "base": True,
                "family": (inner == u.who) | (outer == u.who),
                "system": system == u.who,
                "subset": subset == u.who,
            }[u.level]
        result[name] = mine, matrix
    return result
