"""What a compiled reduction puts on the wire, read from its HLO and sorted by the mesh axes that it crosses."""

from __future__ import annotations

import dataclasses

from lensjax.verify.collectives import collectives
from lensjax.verify.hlo import parse_hlo
from lensjax.verify.traffic import mesh_axes, step_bytes


@dataclasses.dataclass(frozen=True)
class Sent:
    kind: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    bytes: float


def sent(hlo: str, mesh) -> list[Sent]:
    """Every collective of a module: its kind, the axes of the mesh that it crosses, types, bytes a device sends."""
    found = collectives(parse_hlo(hlo))
    assert not found.unknown, found.unknown
    return [Sent(c.kind, mesh_axes(c.groups, dict(mesh.shape)), c.dtypes, step_bytes(c)) for c in found.collectives]


def along(found: list[Sent], *axes: str) -> list[Sent]:
    """Those that cross any of these axes."""
    return [s for s in found if set(s.axes) & set(axes)]
