"""The lattice of batch statuses.

Let V be a value of the full step and v_i the same value where only share i of the batch is computed.

    Z           V and every v_i are zero everywhere
    R           v_i = V in every share
    B(d, k)     V is the v_i put together: dimension d is outer x BATCH x inner with `inner` = k, and share i holds its
                part of the BATCH factor (inner None: the value is constant along d)
    P           V is the sum of the v_i
    M(op)       V is the maximum (minimum, or, and) of the v_i
    I(d, k)     an index along the batch that counts inside the share: the full one is v_i + offset * k
    C(parts)    an index vector, one status for each component

A status carries `deps`, the bit set of the cuts (totals) it was computed from, and `scale`, total scalars that were
left out of it: V = product of scalar ** power * the value as computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# ((number of a total scalar, power), ...), ordered by number.
Scale = tuple[tuple[int, int], ...]


class Status(NamedTuple):
    kind: str
    dim: int = -1
    inner: int | None = None
    deps: int = 0
    op: str = ""
    parts: tuple[Any, ...] = ()
    scale: Scale = ()

    def on(self, deps: int) -> Status:
        """The same with other dependencies."""
        return self if deps == self.deps else self._replace(deps=deps)

    def __str__(self) -> str:
        if self.kind in "BI":
            return f"{self.kind}({self.dim}, {self.inner})"
        return f"M({self.op})" if self.kind == "M" else self.kind


ZERO = Status("Z")
SAME = Status("R")


class Refused(Exception):
    """A step that cannot be split exactly: `reason`, and the user's line that makes it so."""

    def __init__(self, reason: str, line: str = ""):
        super().__init__(f"{reason} ({line})" if line else reason)
        self.reason, self.line = reason, line


class Again(Exception):
    """A scalar cannot be left out after all (it joins values that were scaled otherwise): analyse once more."""


def same(deps: int = 0) -> Status:
    return Status("R", deps=deps) if deps else SAME


def partial(deps: int = 0) -> Status:
    return Status("P", deps=deps)


def part(dim: int, inner: int | None, deps: int = 0) -> Status:
    return Status("B", dim, inner, deps)


def union(statuses: Any) -> int:
    deps = 0
    for s in statuses:
        deps |= s.deps
    return deps


def within(a: int, b: int) -> bool:
    """Whether the bit set a is part of b."""
    return not a & ~b


def times(a: Scale, b: Scale, power: int = 1) -> Scale:
    """a * b ** power."""
    if not b:
        return a
    found = dict(a)
    for v, p in b:
        found[v] = found.get(v, 0) + power * p
    return tuple(sorted((v, p) for v, p in found.items() if p))
