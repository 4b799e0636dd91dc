"""`step.extra`: what a plan keeps between calls besides the user's state.

A pass that needs memory (codec residuals, low-rank factors, pending reductions) declares it in `Emitted.extra`, a
mapping from a name to a ShapeDtypeStruct with a sharding. From there on

    the emitted `run(*leaves, *extra)` takes these arrays after the program's arguments, in the mapping's order, and
        returns their next values after the program's results
    the executable gives their buffers up with the state's, and puts the next values into `step.extra`
    `step.save` writes them under "extra", `step.restore` reads them back where the plan declares the same ones

The first call starts from zeros. The user's state never changes in structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lensjax._errors import StateError


def fill(store: dict[str, Any], declared: Mapping[str, Any]) -> None:
    """Puts zeros where `store` lacks what the plan declares, and drops what it does not."""
    for name in set(store) - set(declared):
        del store[name]
    for name, wanted in declared.items():
        held = store.get(name)
        if held is None or (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
            store[name] = jax.jit(lambda w=wanted: jnp.zeros(w.shape, w.dtype), out_shardings=wanted.sharding)()


def take(store: Mapping[str, Any], declared: Mapping[str, Any]) -> list[Any]:
    """The values in the order that the program takes. Raises StateError when a failed call left them given up."""
    values = [store[name] for name in declared]
    for name, value in zip(declared, values):
        if value.is_deleted():
            raise StateError(
                f"step.extra[{name!r}] was given up to a call that failed",
                hint="restore a checkpoint, or clear it (step.extra.clear()) to start from zeros",
                code="donated",
            )
    return values
