"""Equations that nobody can look into: kernels and foreign calls. XLA gathers their operands and computes them whole on
every device, unless a rule says how they split."""

from __future__ import annotations

import dataclasses
from typing import Any

from lensjax import _jax
from lensjax.program.edit import all_equations


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A kernel or foreign call: its `kind` ("pallas kernel", "foreign call"), its name, and the user's line."""

    kind: str
    name: str
    line: str

    def __str__(self) -> str:
        return f"the {self.kind} {self.name!r}" + (f" at {self.line}" if self.line else "")


def is_kernel(eqn: Any) -> bool:
    """Whether the equation is a pallas kernel for a device (not interpreted, where it is ordinary operations)."""
    return eqn.primitive.name == "pallas_call" and not eqn.params.get("interpret")


def opaque(jaxpr: Any) -> list[Opaque]:
    """The opaque equations of a program, at every depth, one for each name and line."""
    found = {}
    for eqn in all_equations(jaxpr):
        line = _jax.user_line(eqn) if eqn.primitive.name in ("pallas_call", "ffi_call") else ""
        if is_kernel(eqn):
            found[Opaque("pallas kernel", str(eqn.params.get("name") or "kernel"), line)] = None
        elif eqn.primitive.name == "ffi_call":
            found[Opaque("foreign call", str(eqn.params.get("target_name")), line)] = None
    return list(found)
