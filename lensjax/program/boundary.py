"""Where a step turns from forward to backward: JAX writes it into the name of every equation that it differentiates.

An equation of a forward computation stands under `jvp(...)`, one of its backward under `transpose(jvp(...))`. A step
may hold several backward passes (two networks that play against each other), one after the other. A step whose backward
was written by hand names nothing: there the boundary is the place where most bytes of activations are alive.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lensjax import _jax
from lensjax.program.edit import shape_of
from lensjax.program.values import Table

FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """One differentiation in a body: forward equations [start, split), backward equations from `split` on, before
    `stop`."""

    start: int
    split: int
    stop: int


def direction(eqn: Any) -> str:
    """ "forward" or "backward" for an equation that JAX made by differentiating, by its outermost transformation; ""
    for others."""
    name = str(eqn.source_info.name_stack)
    jvp, transpose = name.find("jvp("), name.find("transpose(")
    if transpose >= 0 and (jvp < 0 or transpose < jvp):
        return BACKWARD
    return FORWARD if jvp >= 0 else ""


def backward_passes(jaxpr: Any) -> tuple[BackwardPass, ...]:
    """The differentiations whose forward and backward both stand in this body, in order."""
    eqns = _jax.open_jaxpr(jaxpr).eqns
    directions = [direction(e) for e in eqns]
    found: list[BackwardPass] = []
    start, split = 0, None
    for i, d in enumerate(directions):
        if d == BACKWARD and split is None and i > start:
            split = i
        elif d == FORWARD and split is not None:
            found.append(BackwardPass(start, split, i))
            start, split = i, None
    if split is not None:
        found.append(BackwardPass(start, split, len(eqns)))
    return tuple(p for p in found if any(d == FORWARD for d in directions[p.start : p.split]))


def densest_place(jaxpr: Any, table: Table) -> BackwardPass | None:
    """For a backward written by hand: the boundary is where most bytes are alive that are not shaped like an argument
    (gradients and moments look like parameters, activations rarely do). None where nothing is held."""
    inner = _jax.open_jaxpr(jaxpr)
    like = {tuple(sorted(shape_of(v))) for v in inner.invars}
    alive = np.zeros(len(inner.eqns) + 2)
    for v, i in table.made.items():
        if v in table.last and tuple(sorted(shape_of(v))) not in like:
            alive[i + 1] += table.bytes[v]
            alive[table.last[v] + 1] -= table.bytes[v]
    total = np.cumsum(alive)
    split = int(total.argmax())
    if not split or split >= len(inner.eqns) or not total[split]:
        return None
    return BackwardPass(0, split, len(inner.eqns))
