"""Logical axes the long way: every value of the program is marked and the whole of it lowered. What `program.logical`
finds from one equation of each kind must be the same."""

import jax
from jax.extend import core as jcore
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax.partition import dimension_factors
from lensjax.program.edit import Builder, bodies, is_var, map_bodies, shape_of


class Open:
    """The identity as a sharding constraint that constrains nothing: what carries a mark through lowering."""

    def __init__(self, rank):
        self.rank = rank

    def __call__(self, x):
        mesh = AbstractMesh((2,), ("lensjax",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * self.rank)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def __hash__(self):
        return self.rank

    def __eq__(self, other):
        return isinstance(other, Open) and other.rank == self.rank


class Marker:
    def __init__(self):
        self.variables = []

    def mark(self, b, v, like):
        if isinstance(v, jcore.DropVar) or not is_var(v) or not shape_of(v):
            return
        if not isinstance(getattr(v.aval, "dtype", None), jax.numpy.dtype):  # keys
            return
        name = f"lensjax.mark.{len(self.variables)}"
        self.variables.append(v)
        b.env[v] = b.apply(Open(len(shape_of(v))), b.read(v), like=like, name=name)[0]

    def body(self, inner, top, like=None):
        b = Builder()
        for v in () if top else inner.invars:
            self.mark(b, v, like)
        for eqn in inner.eqns:
            b.copy(map_bodies(eqn, self._rewrite(eqn)) if any(True for _ in bodies(eqn)) else eqn)
            for v in eqn.outvars:
                self.mark(b, v, eqn)
        return b

    def _rewrite(self, eqn):
        def rewrite(body, _):
            inner = _jax.open_jaxpr(body)
            marked = self.body(inner, top=False, like=eqn)
            return _jax.rebuild(body, eqns=marked.eqns, outvars=marked.read_all(inner.outvars))

        return rewrite


def whole_program_axes(jaxpr):
    """(DimensionFactors, {variable: its dimensions})."""
    inner = _jax.open_jaxpr(jaxpr)
    marker = Marker()
    marked = marker.body(inner, top=True)
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in inner.invars]
    run = jcore.jaxpr_as_fun(_jax.close(_jax.rebuild(jaxpr, eqns=marked.eqns, outvars=marked.read_all(inner.outvars))))
    found = dimension_factors(jax.jit(run, keep_unused=True).trace(*avals).lower(lowering_platforms=("cpu",)))
    dims = {var: found.marks[n] for n, var in enumerate(marker.variables) if n in found.marks}
    dims.update(zip(inner.invars, (d[: len(shape_of(v))] for v, d in zip(inner.invars, found.arguments))))
    return found, dims
