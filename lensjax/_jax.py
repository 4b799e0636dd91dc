"""Every private or moving JAX name that lensjax uses, each behind a function, with a probe of what is there.

Nothing else in the package imports `jax._src` or `jaxlib` (a test checks it). The probe runs when the planner is first
used, never at import of the package, and names the supported range when something is missing.
"""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

import jax

from lensjax._errors import PartitionError, UnsupportedJax

SUPPORTED = "jax >= 0.10.0 (tested: 0.10.2 and 0.12.0.1)"
_OLDEST = (0, 10, 0)


@functools.cache
def check_version() -> None:
    """Raises UnsupportedJax when the installed jax is older than the supported range."""
    found = tuple(jax.__version_info__[:3])
    if found < _OLDEST:
        raise UnsupportedJax(
            f"lensjax plans with {SUPPORTED}; jax {jax.__version__} is installed",
            hint="pip install -U jax",
        )


# Shardy / MLIR: XLA's own partitioner, reached through jaxlib's MLIR bindings.

PASSES_PROPAGATE = "sdy-propagation-pipeline"
# A constant that two operations share relates nothing: Shardy gives each user its own before it propagates.
PASSES_RULES = ("sdy-constant-or-scalar-splitter", "func.func(sdy-populate-op-sharding-rules)")
# Without `enable-full-version` nothing is inserted.
PASSES_EXPLICIT = (
    "sdy-close-shardings",
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)


@functools.cache
def mlir() -> types.SimpleNamespace:
    """The MLIR bindings of jaxlib: `ir`, `passmanager` and the `sdy` dialect.

    Raises UnsupportedJax, naming what is missing, when a pass or a class that the planner drives is not there.
    """
    check_version()
    try:
        from jax._src.interpreters.mlir import make_ir_context
        from jaxlib.mlir import ir, passmanager
        from jaxlib.mlir.dialects import sdy

        needed = ("TensorShardingAttr", "DimensionShardingAttr", "AxisRefAttr", "MeshAttr", "OpShardingRuleAttr")
        missing = [name for name in needed if not hasattr(sdy, name)]
        if missing:
            raise ImportError(f"jaxlib.mlir.dialects.sdy has no {', '.join(missing)}")
        with make_ir_context():
            for name in (PASSES_PROPAGATE, *PASSES_RULES, *PASSES_EXPLICIT, "cse"):
                passmanager.PassManager.parse(f"builtin.module({name})")
    except (ImportError, ValueError) as e:
        raise UnsupportedJax(
            f"XLA's partitioner (Shardy) cannot be driven from this jaxlib: {e}",
            hint=f"lensjax plans with {SUPPORTED}; jax {jax.__version__} is installed",
        ) from e
    return types.SimpleNamespace(ir=ir, passmanager=passmanager, sdy=sdy)


def run_passes(operation: Any, *passes: str) -> None:
    """Runs MLIR passes on a module operation, in place. Raises PartitionError with the compiler's words."""
    m = mlir()
    with operation.context, m.ir.Location.unknown(operation.context):
        try:
            m.passmanager.PassManager.parse(f"builtin.module({','.join(passes)})").run(operation)
        except m.ir.MLIRError as e:
            raise PartitionError(
                f"XLA's partitioner does not take this program: {e}",
                hint="find the operation named above; a sharding constraint near it usually helps",
            ) from e


class ShardingRule(NamedTuple):
    """Shardy's rule of one operation. A mapping gives, for each value and each of its dimensions, factor indices."""

    factor_sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduction: frozenset[int]
    replication: frozenset[int]
    permutation: frozenset[int]
    blocked: frozenset[int]


def sharding_rule(attribute: Any) -> ShardingRule:
    """`sdy.sharding_rule`, which PASSES_RULES puts on each operation that has one, as data."""
    sdy = mlir().sdy
    rule = sdy.OpShardingRuleAttr(attribute)

    def read(mappings: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
        tensors = [sdy.TensorMappingAttr(m).dim_mappings for m in mappings]
        return tuple(tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in dims) for dims in tensors)

    return ShardingRule(
        factor_sizes=tuple(rule.factor_sizes),
        operands=read(rule.operand_mappings),
        results=read(rule.result_mappings),
        reduction=frozenset(rule.reduction_factors),
        replication=frozenset(rule.need_replication_factors),
        permutation=frozenset(rule.permutation_factors),
        blocked=frozenset(rule.blocked_propagation_factors),
    )
