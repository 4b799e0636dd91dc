"""Logical axes: which dimensions of the program's values must be split together, and what they are called.

Every value of the program is marked, the marked program is lowered once, and Shardy's own rules for each operation say
which dimensions are one (`lensjax.partition.dimension_factors`). Nothing about layers or names is assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jcore
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax.partition.axes import Dimension, DimensionFactors, LogicalAxis, dimension_factors
from lensjax.program.edit import Builder, bodies, is_var, map_bodies, shape_of


@dataclasses.dataclass(frozen=True)
class Logical:
    """`axes[i]` is logical axis i, `names[i]` what it is called: "batch", or the first argument (by path) that has it,
    with the dimension; `dims`: variable -> for each dimension the axes that make it up, major first."""

    axes: tuple[LogicalAxis, ...]
    names: tuple[str, ...]
    dims: dict[Any, tuple[Dimension, ...]]

    def major(self, var: Any, d: int) -> int | None:
        """The logical axis that splitting dimension `d` of a variable splits first; None where nothing is known."""
        dimension = self.dims.get(var, ())
        return dimension[d][0] if d < len(dimension) and dimension[d] else None


def logical_axes(jaxpr: Any, names: Sequence[str], batch: Mapping[int, int], first: Collection[int] = ()) -> Logical:
    """The logical axes of a program without calls. `names`: paths of its arguments, which name the axes, those in
    `first` (parameters) before the others; `batch`: {argument: dimension} of the batch. Raises PartitionError or
    UnsupportedJax as the partitioner does."""
    inner = _jax.open_jaxpr(jaxpr)
    marker = _Marker()
    marked = marker.body(inner, top=True)
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in inner.invars]
    run = jcore.jaxpr_as_fun(_jax.close(_jax.rebuild(jaxpr, eqns=marked.eqns, outvars=marked.read_all(inner.outvars))))
    found = dimension_factors(jax.jit(run, keep_unused=True).trace(*avals).lower(lowering_platforms=("cpu",)))
    dims = {var: found.marks[n] for n, var in enumerate(marker.variables) if n in found.marks}
    dims.update(zip(inner.invars, found.arguments))
    return Logical(found.axes, _names(found, names, batch, first), dims)


def _names(
    found: DimensionFactors, paths: Sequence[str], batch: Mapping[int, int], first: Collection[int]
) -> tuple[str, ...]:
    names = {found.arguments[i][d][0]: "batch" for i, d in batch.items() if found.arguments[i][d]}
    order = sorted(range(len(paths)), key=lambda i: (i not in first, paths[i]))
    for path, dims in ((paths[i], found.arguments[i]) for i in order):
        for d, dimension in enumerate(dims):
            for k, axis in enumerate(dimension):
                inner = path.partition("/")[2] or path
                names.setdefault(axis, f"{inner}[{d}]" + (f".{k}" if len(dimension) > 1 else ""))
    return tuple(names.get(i, f"inner {i}") for i in range(len(found.axes)))


class _Open:
    """The identity as a sharding constraint that constrains nothing: what carries a mark through lowering."""

    def __init__(self, rank: int):
        self.rank = rank

    def __call__(self, x):
        mesh = AbstractMesh((2,), ("lensjax",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * self.rank)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def __hash__(self):
        return self.rank

    def __eq__(self, other):
        return isinstance(other, _Open) and other.rank == self.rank


class _Marker:
    def __init__(self):
        self.variables: list[Any] = []

    def mark(self, b: Builder, v: Any, like: Any) -> None:
        if isinstance(v, jcore.DropVar) or not is_var(v) or not shape_of(v) or not _plain(v):
            return
        name = f"lensjax.mark.{len(self.variables)}"
        self.variables.append(v)
        b.env[v] = b.apply(_Open(len(shape_of(v))), b.read(v), like=like, name=name)[0]

    def body(self, inner: Any, top: bool, like: Any = None) -> Builder:
        b = Builder()
        if not top:
            for v in inner.invars:
                self.mark(b, v, like)
        for eqn in inner.eqns:
            b.copy(map_bodies(eqn, self._rewrite(eqn)) if any(True for _ in bodies(eqn)) else eqn)
            for v in eqn.outvars:
                self.mark(b, v, eqn)
        return b

    def _rewrite(self, eqn: Any) -> Callable[[Any, int], Any]:
        def rewrite(body: Any, _: int) -> Any:
            inner = _jax.open_jaxpr(body)
            marked = self.body(inner, top=False, like=eqn)
            return _jax.rebuild(body, eqns=marked.eqns, outvars=marked.read_all(inner.outvars))

        return rewrite


def _plain(v: Any) -> bool:
    return isinstance(getattr(v.aval, "dtype", None), jax.numpy.dtype)  # not PRNG keys
