"""`jax_debug_nans` and `jax_debug_infs`, for a step under a plan.

JAX looks at the results of a compiled function and, where one is not finite, runs the function again operation by
operation to find the line. What it would run again here is the rewritten program, which has no lines of the user's to
stop at; and it does not look at all at arrays on several devices when the option came on after the first call. So the
look is taken here, at the step's results, and what runs again is the user's own function.

While one of these options is on, a call works on copies: the state that led to the NaN stays, to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def looked_for() -> bool:
    """Whether JAX was asked to raise where a result is not finite. (Among several processes it looks itself: what runs
    in one of them only would wait for the others.)"""
    config: Any = jax.config
    return bool(config.jax_debug_nans or config.jax_debug_infs) and jax.process_count() == 1


def run(step: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any, hidden: dict[str, Any]) -> Any:
    """`step(args, kwargs)`, where `step` runs `fn` under a plan and keeps `hidden` between calls.

    Raises FloatingPointError at the line of `fn` that made what is not finite; nothing is given up then.
    """
    config: Any = jax.config
    nans, infs = bool(config.jax_debug_nans), bool(config.jax_debug_infs)
    with jax.debug_nans(False), jax.debug_infs(False):
        before = {name: _copy(x) for name, x in hidden.items()}
        result = step(*jax.tree.map(_copy, (args, kwargs)))
        found = _first(result, nans, infs)
        if found is None:
            return result
        hidden.update(before)
    fn(*args, **kwargs)  # operation by operation: raises
    raise FloatingPointError(
        f"the step's result {found} is not finite under the plan, and is when the step runs operation by operation: "
        "the same sums, in another order"
    )


def _copy(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) and not x.is_deleted() else x


def _first(result: Any, nans: bool, infs: bool) -> str | None:
    for path, x in jax.tree_util.tree_flatten_with_path(result)[0]:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            if (nans and bool(jnp.isnan(x).any())) or (infs and bool(jnp.isinf(x).any())):
                return jax.tree_util.keystr(path, simple=True, separator="/")
    return None
