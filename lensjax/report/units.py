"""How reports write things."""

from __future__ import annotations

from typing import Any

import jax

from lensjax._units import duration, size

__all__ = ["duration", "size", "spec", "typed"]


def typed(dtype: Any, shape: tuple[int, ...]) -> str:
    """A type as "float32[8, 16]", a random key as "key" or "key[8]"."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return f"key{list(shape)}" if shape else "key"
    return f"{dtype}{list(shape)}"


def spec(dims: tuple[tuple[str, ...], ...]) -> str:
    """A sharding as "[_, fsdp, _]"; "whole" where nothing is split."""
    if not any(dims):
        return "whole"
    return "[" + ", ".join("+".join(axes) if axes else "_" for axes in dims) + "]"
