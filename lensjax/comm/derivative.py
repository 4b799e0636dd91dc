"""What is rounded has no derivative: JAX would find zero (codes are integers) and say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from lensjax._errors import CodecError


def no_derivative(fn: Callable[..., Any], what: object) -> Callable[..., Any]:
    """`fn`, of positional arguments, which raises CodecError where it is differentiated. `what`: its name there."""
    guarded = jax.custom_jvp(fn)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise CodecError(
            f"a derivative is taken through a reduction or a gather by {what}, which has none",
            hint="differentiate first and reduce the gradients: all_reduce(jax.grad(loss)(params), ...). In the loss "
            "use jax.lax.psum and gather_weight; of what is only looked at, reduce jax.lax.stop_gradient(value)",
        )

    guarded.defjvp(refuse)
    return guarded
