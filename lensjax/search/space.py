"""The space: mesh shapes over the tiers, and rule sets from the roles that a mesh axis can have.

    data       splits the batch
    expert     splits the batch, and selects experts (or the rows of large lookup tables)
    sequence   splits the sequence: context parallelism
    tensor     splits logical axes of weights: pairs of column and row, heads, vocabulary; with or without the sequence
               outside of the matmuls

A mesh has one to four axes, in any order (which is what lies on which tier), with sizes that multiply to the devices.
What recipes call DP, ZeRO, FSDP and HSDP are storage choices on data axes (`storage`), not roles.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.partition.axes import Dimension
from lensjax.program.edit import all_equations, is_var
from lensjax.program.program import Program
from lensjax.search.rules import Pattern, Rule
from lensjax.search.tables import Tables
from lensjax.search.tensor import batch_input_axes, expert_axes, tensor_axes

# Largest tensor or sequence axis tried: beyond it every published plan uses another axis.
LARGEST = 64
# A lookup table that holds at least this part of the parameters may be split by rows over devices that split the batch.
TABLES = 0.25
# and of these tables those that hold at least this part: a small one is not worth moving its lookups.
LARGE_TABLE = 0.01


@dataclasses.dataclass(frozen=True)
class Axes:
    """Logical axes by use, as the tables number them; `logical` translates to the program's numbers."""

    batch: tuple[int, ...]
    sequence: tuple[int, ...]
    experts: tuple[int, ...]
    tables: tuple[int, ...]
    logical: dict[int, int]
    sizes: tuple[int, ...]


def axes_of(program: Program, t: Tables) -> Axes:
    """What each logical axis of a program may be split for."""
    logical = program.logical
    invars = _jax.open_jaxpr(program.jaxpr).invars
    to_logical: dict[int, int] = {}
    for v, dims in zip(invars, t.argument_dims):
        for own, theirs in zip(dims, logical.dims.get(v, ())):
            to_logical.update(zip(own, theirs))
    back = {b: a for a, b in to_logical.items()}
    batch = _majors(
        t.argument_dims[i][a.batch_axis] for i, a in enumerate(program.arguments)
        if a.role == "batch" and a.batch_axis is not None
    )  # fmt: skip
    inputs = {back[a] for a in batch_input_axes(program) if a in back}
    halo = {a for a in inputs if a in to_logical and logical.axes[to_logical[a]].permutations}
    sequence = tuple(sorted(a for a in inputs if a not in batch and a not in halo and t.sizes[a] >= 64))
    experts = tuple(sorted(back[a] for a in expert_axes(program) if a in back))
    return Axes(batch, sequence, experts, _tables(program, back), to_logical, t.sizes)


def _majors(dims: Iterator[Dimension] | Sequence[Dimension]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(d[0] for d in dims if d))


def _tables(program: Program, back: dict[int, int]) -> tuple[int, ...]:
    """Row axes of large tables that are only looked up."""
    total = sum(program.arguments[i].nbytes for i in program.parameters)
    invars = _jax.open_jaxpr(program.jaxpr).invars
    read: dict[int, set[str]] = {}
    for eqn in all_equations(program.jaxpr):
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated", "gather"):
            continue
        for k, v in enumerate(eqn.invars):
            if is_var(v) and v in program.logical.dims and v in program.compute:
                for d in range(len(v.aval.shape)):
                    axis = program.logical.major(v, d)
                    if axis is not None:
                        looked = eqn.primitive.name == "gather" and k == 0
                        rows = looked and d in eqn.params["dimension_numbers"].collapsed_slice_dims
                        read.setdefault(axis, set()).add("rows" if rows else "other")
    held: dict[int, int] = {}
    for i in program.parameters:
        for d in range(len(program.arguments[i].shape)):
            axis = program.logical.major(invars[i], d)
            if axis is not None and read.get(axis) == {"rows"}:
                held[axis] = held.get(axis, 0) + program.arguments[i].nbytes
    if sum(held.values()) < TABLES * total:
        return ()
    large = [a for a, n in held.items() if n >= LARGE_TABLE * total]
    return tuple(sorted(back[a] for a in large if a in back))


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pattern with mesh sizes."""

    pattern: Pattern
    sizes: tuple[int, ...]

    def ways(self, *roles: str) -> int:
        """In how many parts the axes of these roles split together."""
        return math.prod(self.sizes[m] for m in self.pattern.axes(*roles))


def shapes(program: Program, axes: Axes, devices: int) -> Iterator[Shape]:
    """Every mesh with its rule set. `devices` is what the sizes multiply to."""
    batch = program.batch.size
    tensor = _Tensor(program, axes)
    for roles in _roles(axes):
        for sizes in factorings(devices, len(roles)):
            size = dict(zip(roles, sizes))
            if not _possible(roles, sizes, batch, axes):
                continue
            for columns in tensor.sets(size["tensor"], len(roles)) if "tensor" in size else ((),):
                for spread in (False, True) if columns and axes.sequence and "sequence" not in size else (False,):
                    if spread and any(axes.sizes[a] % size["tensor"] for a in axes.sequence):
                        continue
                    yield Shape(pattern_of(roles, axes, columns, spread), sizes)


def pattern_of(roles: tuple[str, ...], axes: Axes, columns: tuple[int, ...], spread: bool) -> Pattern:
    """The rules of a mesh's roles, in the order in which they claim mesh axes: experts and weights, batch, sequence."""
    at = {r: i for i, r in enumerate(roles)}
    rules: list[Rule] = []
    if "expert" in at:
        rules += [(a, (at["expert"],)) for a in axes.experts or axes.tables]
    rules += [(a, (at["tensor"],)) for a in columns]
    data = tuple(i for i, r in enumerate(roles) if r in ("data", "expert"))
    if data:
        rules += [(a, data) for a in axes.batch]
    if "sequence" in at:
        rules += [(a, (at["sequence"],)) for a in axes.sequence]
    elif spread:
        rules += [(a, (at["tensor"],)) for a in axes.sequence]
    return Pattern(roles, tuple(rules))


def _roles(axes: Axes) -> list[tuple[str, ...]]:
    optional = ["tensor"]
    optional += ["sequence"] if axes.sequence else []
    optional += ["expert"] if axes.experts or axes.tables else []
    found: dict[tuple[str, ...], None] = {}
    for data in (1, 2, 0):
        for n in range(len(optional) + 1):
            for extra in itertools.combinations(optional, n):
                roles = ("data",) * data + extra
                if not 1 <= len(roles) <= 4:
                    continue
                orders = sorted(set(itertools.permutations(roles))) if len(roles) <= 3 else [roles]
                found.update(dict.fromkeys(orders))
    return list(found)


def factorings(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write n as an ordered product of `parts` factors above one (a single part may be one)."""
    if parts == 1:
        yield (n,)
        return
    for d in range(2, n // 2 + 1):
        if n % d == 0:
            for rest in factorings(n // d, parts - 1):
                if 1 not in rest:
                    yield (d, *rest)


def _possible(roles: Sequence[str], sizes: Sequence[int], batch: int, axes: Axes) -> bool:
    ways = math.prod(n for r, n in zip(roles, sizes) if r in ("data", "expert"))
    if batch % ways:
        return False
    for r, n in zip(roles, sizes):
        if r in ("tensor", "sequence") and n > LARGEST:
            return False
        if r == "sequence" and any(axes.sizes[a] % n for a in axes.sequence):
            return False
        if r == "expert" and any(axes.sizes[a] % n for a in axes.experts or axes.tables):
            return False
    return True


class _Tensor:
    """Sets of weight axes to split, by the size of the mesh axis."""

    def __init__(self, program: Program, axes: Axes):
        self.program, self.axes = program, axes
        self.back = {b: a for a, b in axes.logical.items()}
        self.cache: dict[tuple[int, bool], tuple[tuple[int, ...], ...]] = {}

    def sets(self, ways: int, rank: int) -> tuple[tuple[int, ...], ...]:
        key = (ways, rank <= 2)
        if key not in self.cache:
            self.cache[key] = self._sets(*key)
        return self.cache[key]

    def _sets(self, ways: int, all_parts: bool) -> tuple[tuple[int, ...], ...]:
        try:
            found = tensor_axes(self.program, ways).axes
        except PlanError:
            return ()
        every = tuple(sorted(self.back[a] for a in found if a in self.back))
        inside = tuple(a for a in every if self._in_layers(a))
        outside = tuple(a for a in every if a not in inside)
        chosen = [every, inside, outside]
        if all_parts and len(every) <= 4:
            chosen += [s for n in range(1, len(every)) for s in itertools.combinations(every, n)]
        return tuple(dict.fromkeys(s for s in chosen if s))

    def _in_layers(self, a: int) -> bool:
        logical, invars = self.program.logical, _jax.open_jaxpr(self.program.jaxpr).invars
        stacked = {i for layer in self.program.layers for i in layer.parameters}
        axis = self.axes.logical[a]
        return any(
            logical.major(invars[i], d) == axis for i in stacked for d in range(len(self.program.arguments[i].shape))
        )
