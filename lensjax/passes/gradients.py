"""Where each gradient is made: the values behind a parameter's update, followed back to the equations that sum over the
batch.

From the parameter's next value, back through element-wise equations, transposes, casts, branches, and into loop bodies
(a stacked gradient is made slice by slice), until an equation that does something else: there the partial sums of the
shards become a total, so there the gradient is pinned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lensjax import _jax
from lensjax.plan.plan import Spec
from lensjax.program.edit import body_operands, is_var, shape_of
from lensjax.program.flow import ELEMENTWISE
from lensjax.program.program import Program


def gradient_pins(program: Program, starts: Mapping[Any, Spec]) -> dict[Any, Spec]:
    """{variable: spec} of the values to pin, from result variables with the spec of their tensor (`starts`)."""
    index = _Index(program.jaxpr)
    batch_bits = sum(1 << i for i, a in enumerate(program.arguments) if a.role == "batch")
    pins: dict[Any, Spec] = {}
    seen: set[tuple[Any, Spec]] = set()
    todo = [(v, s) for v, s in starts.items() if is_var(v)]
    while todo:
        var, spec = todo.pop()
        if (var, spec) in seen or not program.depends.get(var, 0) & batch_bits or var in program.batch.dims:
            continue
        seen.add((var, spec))
        stops, onward = index.back(var, spec)
        if stops:
            pins.setdefault(var, spec)
        todo.extend((a, s) for a, s in onward if is_var(a))
    return pins


def gradient_inputs(program: Program, starts: Mapping[Any, Spec]) -> dict[Any, tuple[Spec, Any]]:
    """{argument variable: (spec, result variable)} of the arguments that the result variables in `starts` are made of
    element by element (or reshaped): where gradients come in from outside, in which spec they are needed, and by which
    result. Results that stand first in `starts` come first."""
    index = _Index(program.jaxpr)
    top = set(_jax.open_jaxpr(program.jaxpr).invars)
    found: dict[Any, tuple[Spec, Any]] = {}
    seen: set[tuple[Any, Spec]] = set()
    for start, first in starts.items():
        todo = [(start, first)] if is_var(start) else []
        while todo:
            var, spec = todo.pop()
            if (var, spec) in seen:
                continue
            seen.add((var, spec))
            if var in top and len(spec) == len(shape_of(var)):
                found.setdefault(var, (spec, start))
            onward = index.reshaped(var, spec) or index.back(var, spec)[1]
            todo.extend((a, s) for a, s in onward if is_var(a))
    return found


class _Index:
    """Where every variable of a program comes from."""

    def __init__(self, jaxpr: Any):
        self.made: dict[Any, tuple[Any, int]] = {}
        # body argument -> (the operand behind it, whether it is a slice of that operand, whether it is carried)
        self.passed: dict[Any, tuple[Any, bool, bool]] = {}
        self._add(_jax.open_jaxpr(jaxpr))

    def _add(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            self.made.update((v, (eqn, i)) for i, v in enumerate(eqn.outvars))
            for body, operands, _ in body_operands(eqn):
                body = _jax.open_jaxpr(body)
                first, last = len(operands), 0
                if eqn.primitive.name == "scan":
                    last, carry = _jax.scan_split(eqn)
                    first = last + carry
                for k, (v, a) in enumerate(zip(body.invars, operands)):
                    self.passed[v] = (a, k >= first, last <= k < first and eqn.primitive.name == "scan")
                self._add(body)

    def reshaped(self, var: Any, spec: Spec) -> list[tuple[Any, Spec]]:
        """What `var` is a reshape of, with the same spec where only dimensions of one come or go, else whole."""
        eqn, _ = self.made.get(var, (None, 0))
        if eqn is None or eqn.primitive.name not in ("reshape", "squeeze"):
            return []
        before, after = shape_of(eqn.invars[0]), shape_of(var)
        if [n for n in before if n != 1] != [n for n in after if n != 1]:
            return [(eqn.invars[0], ((),) * len(before))]
        kept = iter(s for n, s in zip(after, spec) if n != 1)
        return [(eqn.invars[0], tuple(next(kept) if n != 1 else () for n in before))]

    def back(self, var: Any, spec: Spec) -> tuple[bool, list[tuple[Any, Spec]]]:
        """(whether `var` itself is to be pinned, where to go on)."""
        if var in self.passed:
            operand, sliced, carried = self.passed[var]
            return carried, [(operand, ((), *spec) if sliced else spec)]
        if var not in self.made:
            return False, []
        eqn, i = self.made[var]
        name = eqn.primitive.name
        if name == "scan":
            _, carry = _jax.scan_split(eqn)
            inner = _jax.open_jaxpr(eqn.params["jaxpr"]).outvars[i]
            return (False, [(inner, spec)]) if i < carry else (True, [(inner, spec[1:])])
        results = [_jax.open_jaxpr(b).outvars[i] for b, _, outs in body_operands(eqn) if len(outs) == len(eqn.outvars)]
        if results:
            return False, [(v, spec) for v in results]
        if name == "transpose":
            source: list[tuple[str, ...]] = [()] * len(spec)
            for d, s in zip(eqn.params["permutation"], spec):
                source[d] = s
            return False, [(eqn.invars[0], tuple(source))]
        same = [a for a in eqn.invars if is_var(a) and shape_of(a) == shape_of(var)]
        if name == "concatenate" and not spec[eqn.params["dimension"]]:
            return False, [(a, spec) for a in eqn.invars]
        if name == "optimization_barrier":
            return False, [(eqn.invars[i], spec)]
        if name in ELEMENTWISE and same:
            return False, [(a, spec) for a in same]
        return True, []


def summed_first(eqn: Any, spec: Spec, batch: Collection[str]) -> Spec | None:
    """The spec in which a matmul or convolution makes a weight's gradient that is stored as `spec`, before its sum over
    the mesh axes that split the batch is scattered; None where it should not be said. Told the last spec alone, Shardy
    plans to move rows where there are fewer of them than columns; XLA sums whatever there is. Only where all axes of
    the sum are axes of the scatter: else XLA would sum over all of them, and then slice."""
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated") or not batch:
        return None
    if not set(batch) <= {a for axes in spec for a in axes}:
        return None
    return tuple(tuple(a for a in axes if a not in batch) for axes in spec)
