"""A rule for what nobody can look into: how a kernel or foreign call may be split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lensjax._errors import TraceError


def sharding_rule(rule: str, *, whole: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Says how a function that XLA cannot look into may be split. A decorator.

        @lensjax.sharding_rule("row column -> row column", whole=("column",))
        def normalize(x):                 # a pallas kernel or a foreign call, right on any number of rows
            return pl.pallas_call(...)(x)

    `rule` names the dimensions of each operand, then of each result, as an einsum does (Shardy's notation): equal names
    are split together, and each device calls the function on its part. `whole`: names that are never split. Dimensions
    over which the function sums, or that need neighbours, must be among them.

    The function takes and returns arrays only. It has no derivative: give it one with `jax.custom_vjp`, as any kernel
    needs, and attach a rule to the backward kernel too. Raises TraceError for a rule that does not parse.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        from jax.experimental.custom_partitioning import custom_partitioning

        split = custom_partitioning(fn)

        def partition(mesh: Any, operands: Any, results: Any) -> Any:
            import jax

            ins = jax.tree.map(lambda x: x.sharding, operands)
            return mesh, fn, jax.tree.map(lambda x: x.sharding, results), ins

        try:
            split.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=tuple(whole))
        except (ValueError, TypeError) as e:
            raise TraceError(
                f"the sharding rule {rule!r} of {getattr(fn, '__name__', 'a function')} does not parse: {e}",
                hint='name the dimensions of operands and results, as in "row k, k column -> row column"',
            ) from e
        return functools.wraps(fn)(lambda *args: split(*args))

    return decorate
