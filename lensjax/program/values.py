"""The values of one body: where each is made, where it is read last, and how many bytes it holds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.program.edit import bodies, is_var

# What is worth storing: work that no fusion makes again for free.
SOLID = frozenset(
    """dot_general conv_general_dilated ragged_dot ragged_dot_general scan while cond pallas_call ffi_call
    custom_partitioning shard_map remat2 checkpoint sort top_k approx_top_k gather scatter scatter-add scatter-mul
    scatter-min scatter-max reduce_window reduce_window_sum reduce_window_max select_and_scatter_add
    select_and_gather_add fft cholesky triangular_solve eigh svd qr lu""".split()
)
_SOLID_PREFIXES = ("reduce_", "cum", "arg")
# Of these, those whose operands a fusion may make on the way.
_FUSED_INTO = frozenset({"gather", "reduce_window", "reduce_window_sum", "reduce_window_max"})


def nbytes(atom: Any) -> int:
    """Bytes of a value, whole. A key counts as the words of its generator."""
    aval = atom.aval
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 16 * math.prod(shape)
    return math.prod(shape) * dtype.itemsize


def is_solid(eqn: Any) -> bool:
    """Whether XLA stores the result of an equation: others are fused into their readers and cost nothing to remake."""
    name = eqn.primitive.name
    return name in SOLID or (name.startswith(_SOLID_PREFIXES) and name != "reduce_precision")


def reads_memory(eqn: Any) -> bool:
    """Whether an equation's operands must be in memory (a matmul's, a loop's): no fusion makes them on the way."""
    return eqn.primitive.name in SOLID and eqn.primitive.name not in _FUSED_INTO


def results(eqn: Any) -> list[Any]:
    """The results of an equation that somebody may read."""
    return [v for v in eqn.outvars if not isinstance(v, jcore.DropVar)]


@dataclasses.dataclass(frozen=True)
class Table:
    """`made`: variable -> its equation's position (arguments of the body are not in it); `last`: variable -> position
    of its last reader, the number of equations for a result; `bytes`: variable -> size."""

    made: dict[Any, int]
    last: dict[Any, int]
    bytes: dict[Any, int]


def table(jaxpr: Any) -> Table:
    inner = _jax.open_jaxpr(jaxpr)
    made: dict[Any, int] = {}
    last: dict[Any, int] = {}
    sizes: dict[Any, int] = {}
    for i, eqn in enumerate(inner.eqns):
        for v in eqn.invars:
            if is_var(v):
                last[v] = i
        for v in results(eqn):
            made[v] = i
            sizes[v] = nbytes(v)
    for v in inner.outvars:
        if is_var(v):
            last[v] = len(inner.eqns)
    return Table(made, last, sizes)


def multiplications(eqn: Any) -> float:
    """FLOPs of the matmuls and convolutions of an equation, its bodies included (a loop's as often as it runs)."""
    name = eqn.primitive.name
    if name == "dot_general":
        (lhs, _), _ = eqn.params["dimension_numbers"]
        contracted = math.prod(eqn.invars[0].aval.shape[d] for d in lhs)
        return 2.0 * contracted * math.prod(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = eqn.params["dimension_numbers"].rhs_spec[0]
        per_output = math.prod(kernel) / kernel[out_features]
        return 2.0 * per_output * math.prod(eqn.outvars[0].aval.shape)
    inner = [sum(multiplications(e) for e in _jax.open_jaxpr(b).eqns) for b in bodies(eqn)]
    if not inner:
        return 0.0
    if name == "scan":
        return inner[0] * eqn.params["length"]
    return max(inner)
