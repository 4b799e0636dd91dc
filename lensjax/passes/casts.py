"""Weights that every reader casts first: the cast value is what should travel.

A model that keeps float32 parameters and computes in bfloat16 casts each weight where it uses it. Inside a loop body
that cast comes after the gather unless the gather is made of the cast value: half the bytes, and not a bit changed.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lensjax import _jax
from lensjax.program.edit import body_operands, is_var


class Cast:
    """`x -> x.astype(dtype)`, hashable."""

    def __init__(self, dtype: Any):
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x):
        return x.astype(self.dtype)

    def __hash__(self):
        return hash(self.dtype)

    def __eq__(self, other):
        return isinstance(other, Cast) and self.dtype == other.dtype


def read_as(eqn: Any, i: int) -> Any:
    """The one narrower float type to which the bodies of `eqn` cast operand `i` before anything else; None without
    one."""
    own = eqn.invars[i].aval.dtype
    found = set()
    for body, operands, _ in body_operands(eqn):
        inner = _jax.open_jaxpr(body)
        for v, a in zip(inner.invars, operands):
            if a is eqn.invars[i]:
                found |= _casts(inner, v)
    narrower = jnp.issubdtype(own, jnp.floating) and len(found) == 1 and None not in found
    dtype = next(iter(found)) if narrower else None
    return dtype if dtype is not None and jnp.dtype(dtype).itemsize < jnp.dtype(own).itemsize else None


def _casts(jaxpr: Any, v: Any) -> set[Any]:
    """The types to which a body casts `v`; None among them where it does anything else with it."""
    found: set[Any] = {None} if v in [a for a in jaxpr.outvars if is_var(a)] else set()
    for eqn in jaxpr.eqns:
        if not any(a is v for a in eqn.invars):
            continue
        inner = [
            (body, u) for body, operands, _ in body_operands(eqn)
            for u, a in zip(_jax.open_jaxpr(body).invars, operands) if a is v
        ]  # fmt: skip
        if eqn.primitive.name in ("remat2", "checkpoint"):
            for body, u in inner:
                found |= _casts(_jax.open_jaxpr(body), u)
        else:
            found.add(eqn.params["new_dtype"] if eqn.primitive.name == "convert_element_type" else None)
    return found
