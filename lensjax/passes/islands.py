"""What a share's program needs to stand under `jax.vmap` over mesh axes without anything else crossing them.

totals    a total needed inside the share is taken over the mapped dimension, where it stands
islands   a few operations have batching rules that mix the mapped dimension with others (a convolution's weight
          gradient becomes a grouped convolution whose operands XLA gathers; `top_k` gathers on CPU; `ragged_dot` has
          no rule): each of them runs in a `shard_map` of its own, manual over the mapped axes
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend import core as jcore
from jax.sharding import NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax.passes.reduce import over, wide
from lensjax.passes.regions import on_mesh
from lensjax.plan.plan import Plan
from lensjax.program.edit import Builder, Constrain, all_equations, is_var, map_bodies
from lensjax.program.program import Program

ISLANDS = frozenset({"conv_general_dilated", "ragged_dot", "ragged_dot_general", "top_k", "sort"})


@dataclasses.dataclass(frozen=True)
class Total:
    """A share's partial value -> the total over all shares (itself where there is one share)."""

    op: str

    def __call__(self, x):
        @jax.custom_batching.custom_vmap
        def total(x):
            return x

        @total.def_vmap
        def _(size, batched, x):
            if not batched[0]:  # the same in every share, and partial: only a sum of constants is
                return (x * size if self.op == "sum" else x), False
            return over(self.op, wide(self.op, x)).astype(x.dtype), False

        return total(x)


def islands(program: Program, mesh: Any, axes: tuple[str, ...]) -> Program:
    """The share's program with islands for what has the batch in it; as it is where there is one share."""
    if not axes or not any(e.primitive.name in ISLANDS for e in all_equations(program.jaxpr)):
        return program
    return dataclasses.replace(program, jaxpr=_with_islands(program.jaxpr, mesh, axes))


def _with_islands(jaxpr: Any, mesh: Any, axes: tuple[str, ...]) -> Any:
    inner = _jax.open_jaxpr(jaxpr)
    b = Builder()
    for eqn in inner.eqns:
        if eqn.primitive.name in ISLANDS and any(is_var(a) for a in eqn.invars):
            results = b.apply(Island(eqn, mesh, axes), *b.read_all(eqn.invars), like=eqn, name="lensjax.island")
            b.env.update((v, r) for v, r in zip(eqn.outvars, results) if not isinstance(v, jcore.DropVar))
        else:
            b.copy(map_bodies(eqn, lambda body, _: _with_islands(body, mesh, axes)))
    return _jax.rebuild(jaxpr, eqns=b.eqns, outvars=b.read_all(inner.outvars))


class Island:
    """One equation as a function that is not batched but run in each share's own devices. Compares by identity."""

    def __init__(self, eqn: Any, mesh: Any, axes: tuple[str, ...]):
        self.eqn, self.mesh, self.axes = eqn, mesh, axes

    def __call__(self, *operands):
        def plain(*values):
            out = self.eqn.primitive.bind(*values, **self.eqn.params)
            return list(out) if self.eqn.primitive.multiple_results else [out]

        island = jax.custom_batching.custom_vmap(plain)
        place = PartitionSpec(self.axes)

        @island.def_vmap
        def _(size, batched, *values):
            def body(*values):
                return [x[None] for x in plain(*(v[0] if b else v for v, b in zip(values, batched)))]

            region = jax.shard_map(
                body,
                mesh=self.mesh,
                in_specs=tuple(place if b else PartitionSpec() for b in batched),
                out_specs=[place] * len(self.eqn.outvars),
                axis_names=set(self.axes),
                check_vma=False,
            )
            return region(*values), [True] * len(self.eqn.outvars)

        return island(*operands)


def inside(program: Program, plan: Plan, mesh: Any, axes: tuple[str, ...]) -> Program:
    """The user's own constraints and regions on the plan's mesh; a share's values are not split over the axes that
    tell shares apart. Raises PlanError for another mesh."""
    program = on_mesh(program, plan, mesh)
    if not axes or not any(e.primitive.name == "sharding_constraint" for e in all_equations(program.jaxpr)):
        return program
    return dataclasses.replace(program, jaxpr=_without(program.jaxpr, axes))


def _without(jaxpr: Any, axes: tuple[str, ...]) -> Any:
    inner = _jax.open_jaxpr(jaxpr)
    b = Builder()
    for eqn in inner.eqns:
        if eqn.primitive.name == "sharding_constraint":
            sharding = eqn.params["sharding"]
            entries = [_strip(e, axes) for e in sharding.spec]
            moved = NamedSharding(sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)
            (b.env[eqn.outvars[0]],) = b.apply(Constrain(moved), b.read(eqn.invars[0]), like=eqn)
        else:
            b.copy(map_bodies(eqn, lambda body, _: _without(body, axes)))
    return _jax.rebuild(jaxpr, eqns=b.eqns, outvars=b.read_all(inner.outvars))


def _strip(entry: Any, axes: tuple[str, ...]) -> Any:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names = (entry,) if isinstance(entry, str) else tuple(entry)
    return tuple(a for a in names if a not in axes) or None
