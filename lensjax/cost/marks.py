"""What two emitted programs of one step have in common: a skeleton of equations, and sharding constraints in it.

Plans of one step differ in the constraints that their passes insert, seldom in anything else. So a lowered program that
holds all the constraints of another, and more, is the other one once the rest is taken out and the shardings are
written anew: lowered once, it serves both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jcore
from jax.sharding import PartitionSpec

from lensjax import _jax
from lensjax.partition.data import Spec
from lensjax.passes.emit import Emitted
from lensjax.program.edit import is_var, map_bodies, type_text

# Where a constraint stands: the equation after it, the value under it, and everything that reads it. Two programs with
# one skeleton and the same places in the same order are the same program but for their shardings.
Place = tuple[int, int, tuple[tuple[int, int], ...]]


@dataclasses.dataclass(frozen=True)
class Marked:
    """An emitted program whose sharding constraints are numbered.

    emitted:  the program, each constraint under `jax.named_scope("lensjax.mark.<n>")`.
    skeleton: equal for programs that are equal without their constraints.
    places:   where constraint n stands in the skeleton.
    specs:    n -> what it asks for; a dimension's None is left to the partitioner.
    """

    emitted: Emitted
    skeleton: tuple[Any, ...]
    places: tuple[Place, ...]
    specs: Mapping[int, Spec]

    def within(self, other: Sequence[Place]) -> tuple[int, ...] | None:
        """For each constraint, the number of the one in the same place of a program with the same skeleton, whose
        places are given; None where that program lacks one, or has them in another order."""
        found, at = [], 0
        for place in self.places:
            while at < len(other) and other[at] != place:
                at += 1
            if at == len(other):
                return None
            found.append(at)
            at += 1
        return tuple(found)


def marked(emitted: Emitted) -> Marked:
    """An emission with its constraints numbered in program order."""
    assert emitted.pinned is not None
    walk = _Walk()
    walk.facts.append(tuple(i for i, s in enumerate(emitted.results) if s is not None))
    jaxpr = walk.body(emitted.pinned)
    return Marked(
        dataclasses.replace(emitted, run=jcore.jaxpr_as_fun(_jax.close(jaxpr))),
        tuple(walk.facts),
        tuple((at, walk.number[root], tuple(walk.read_by(v))) for at, root, v in walk.marks),
        walk.specs,
    )


def entries(spec: PartitionSpec, rank: int) -> tuple:
    """A PartitionSpec as a partition spec, None where a dimension is left open."""
    found = [*spec, *[None] * (rank - len(spec))]
    return tuple(
        None if e is PartitionSpec.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in found
    )


class _Walk:
    def __init__(self):
        self.facts: list[Any] = []
        self.number: dict[Any, int] = {}
        self.marks: list[tuple[int, Any, Any]] = []  # (number of facts before, value under it, its result)
        self.specs: dict[int, Any] = {}
        self.roots: dict[Any, Any] = {}  # result of a constraint -> the value under it, and under those
        self.readers: dict[Any, list[tuple[int, int]]] = {}  # value -> (fact, operand) that reads it as it is
        self.above: dict[Any, list[Any]] = {}  # value -> the constraints of it

    def body(self, jaxpr: Any) -> Any:
        inner, eqns = _jax.open_jaxpr(jaxpr), []
        for v in (*inner.constvars, *inner.invars):
            self.named(v)
        for eqn in inner.eqns:
            if eqn.primitive.name == "sharding_constraint":
                eqns.append(self.constraint(eqn))
                continue
            results = tuple(type_text(v.aval) for v in eqn.outvars)
            changed = str(eqn.params.get("new_dtype"))
            self.facts.append((eqn.primitive.name, self.atoms(eqn.invars), results, changed, eqn.params.get("length")))
            eqns.append(map_bodies(eqn, lambda body, _: self.body(body)))
            for v in eqn.outvars:
                self.named(v)
        self.facts.append(self.atoms(inner.outvars))
        return _jax.rebuild(jaxpr, eqns=eqns)

    def constraint(self, eqn: Any) -> Any:
        (source,), (result,) = eqn.invars, eqn.outvars
        mark = len(self.specs)
        self.specs[mark] = entries(eqn.params["sharding"].spec, len(result.aval.shape))
        root = self.roots.get(source, source) if is_var(source) else result
        self.roots[result] = root
        self.named(root)
        if is_var(source):
            self.above.setdefault(source, []).append(result)
        self.marks.append((len(self.facts), root, result))
        info = eqn.source_info
        return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(f"lensjax.mark.{mark}")))

    def atoms(self, found: Sequence[Any]) -> tuple[Any, ...]:
        out = []
        for i, a in enumerate(found):
            if not is_var(a):
                out.append(str(a))
                continue
            self.readers.setdefault(a, []).append((len(self.facts), i))
            out.append(self.named(self.roots.get(a, a)))
        return tuple(out)

    def named(self, v: Any) -> int:
        return self.number.setdefault(v, len(self.number))

    def read_by(self, v: Any) -> list[tuple[int, int]]:
        """Everything that reads a value, through further constraints of it."""
        found = list(self.readers.get(v, ()))
        for w in self.above.get(v, ()):
            found += self.read_by(w)
        return sorted(found)
