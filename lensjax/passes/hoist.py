"""What a loop over shares can do once, before it: gather split weights, cast them, lay them out.

XLA does not move a gather out of a loop (the loop would hold more). A plan that gathers a weight once has decided to
hold it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jcore

from lensjax import _jax
from lensjax.plan.plan import Plan
from lensjax.program.edit import is_var
from lensjax.program.program import Program

_ONCE = frozenset({"sharding_constraint", "convert_element_type", "transpose", "copy"})


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A share program in two parts, both functions of values. `first`: arguments that are no batch -> what is made of
    them once; `second`: (arguments, what was made, offset, totals) -> results."""

    positions: tuple[int, ...]
    first: Any
    second: Any

    def before(self, arguments: list[Any]) -> list[Any]:
        return jcore.jaxpr_as_fun(_jax.close(self.first))(*(arguments[i] for i in self.positions))

    def begins_as(self, other: Hoisted) -> bool:
        """Whether `before` makes the same values in both."""
        return self.positions == other.positions and str(self.first) == str(other.first)

    def run(self, arguments: list[Any], made: list[Any], offset: Any, totals: list[Any]) -> list[Any]:
        return jcore.jaxpr_as_fun(_jax.close(self.second))(*arguments, offset, *totals, *made)


def hoist(program: Program, plan: Plan, fixed: Sequence[int]) -> Hoisted:
    """Takes a share's program (see `passes.split.Part`) apart. `fixed`: the arguments without a batch."""
    inner = _jax.open_jaxpr(program.jaxpr)
    again = _again(program, plan)
    positions = tuple(fixed)
    ready = {inner.invars[i] for i in positions if i not in again}
    first, second, made = [], [], []
    for eqn in inner.eqns:
        ins = [a for a in eqn.invars if is_var(a)]
        if eqn.primitive.name in _ONCE and ins and all(a in ready for a in ins):
            first.append(eqn)
            ready.update(eqn.outvars)
            made += eqn.outvars
        else:
            second.append(eqn)
    read = {a for e in second for a in e.invars if is_var(a)} | {a for a in inner.outvars if is_var(a)}
    made = [v for v in made if v in read]
    return Hoisted(
        positions,
        _jax.rebuild(program.jaxpr, invars=[inner.invars[i] for i in positions], eqns=first, outvars=made),
        _jax.rebuild(program.jaxpr, invars=[*inner.invars, *made], eqns=second),
    )


def _again(program: Program, plan: Plan) -> set[int]:
    """Arguments whose weight is gathered again in the backward: their memory is worth more than the time."""
    layer_of = {p: layer.name for layer in program.layers for p in layer.parameters}
    rest = plan.gather.get("*", "once")
    outside = plan.gather.get("", "once") if program.layers else rest
    return {
        i for i, a in enumerate(program.arguments)
        if a.role == "parameter" and (plan.gather.get(layer_of[i], rest) if i in layer_of else outside) == "again"
    }  # fmt: skip
