"""How the update wants its totals: each laid out as what it changes, known by the tensor that it is a gradient of."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from lensjax import _jax
from lensjax.passes.gradients import gradient_inputs
from lensjax.passes.shardings import Shardings, whole
from lensjax.passes.split import Part
from lensjax.plan.plan import Spec
from lensjax.program.edit import shape_of


def total_specs(after: Part, count: int, shardings: Shardings) -> tuple[dict[Any, Spec], dict[Any, str]]:
    """({cut variable: the spec in which the update needs its total}, {cut variable: the path of the tensor whose
    gradient it is}). `count`: the step's own arguments, which come first among the update's."""
    p = after.program
    inner, paths = _jax.open_jaxpr(p.jaxpr), {}
    wanted: dict[Any, Spec] = {}

    def want(result: int, spec: Spec, path: str) -> None:
        wanted[inner.outvars[result]] = spec
        paths.setdefault(inner.outvars[result], path)

    arguments = list(enumerate(p.arguments[:count]))
    for i, a in arguments:
        if a.result is not None and a.role == "parameter":
            want(a.result, shardings.gradients[i], a.path)
    for i, r in p.gradients.items():
        want(r, shardings.gradients[i], p.arguments[i].path)
    for i, a in arguments:
        if a.result is not None and a.role == "optimizer":
            want(a.result, shardings.arguments[i], a.path)
    found = gradient_inputs(p, wanted)
    specs, owners = {}, {}
    for c, v in zip(after.known, inner.invars[count + 1 :], strict=True):
        specs[c.var], start = found.get(v, (whole(len(shape_of(v))), None))
        if start is not None and c.op == "sum" and jnp.issubdtype(v.aval.dtype, jnp.floating):
            owners[c.var] = paths[start]
    return specs, owners
