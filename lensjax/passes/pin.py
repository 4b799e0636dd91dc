"""The pin pass: a plan becomes sharding constraints on the program, in forward, recompute and backward alike.

Parameter shardings alone are not a plan: propagation lets weights win over the batch and all-reduces what should be
reduce-scattered. So the pass pins

    activations      results of matmuls, convolutions and lookups, loop carries and slices: split along the batch
    weight uses      a split weight is gathered where the computation reads it, after its casts; once (kept from
                     forward to backward) or again in the backward (with a barrier, so that the two stay two)
    windows          whole where XLA would compute a split one wrongly (see `windows`)
    mixed axes       of some reductions, scatters and Fourier transforms: whole (see `reductions`)
    summed           alike in both operands of a matmul over three dimensions or more (see `contract`)
    clashes          of weights and sequence over one mesh axis: as the weights are split (see `claims`)
    ragged rows      of a mixture of experts: split along the batch (see `ragged`)
    weight gradients where each is made (see `gradients`): split like the optimizer needs them

Values keep their numbers: a constraint is the identity, and what the cuts between devices could make the compiler round
otherwise is held (see `steady`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax.extend import core as jcore
from jax.sharding import NamedSharding, PartitionSpec

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.passes.casts import Cast, read_as
from lensjax.passes.claims import claimed
from lensjax.passes.contract import agreeing_splits
from lensjax.passes.gradients import gradient_pins, summed_first
from lensjax.passes.ragged import ragged_rows, split_rows
from lensjax.passes.recompute_copy import AGAIN
from lensjax.passes.reductions import has_order, in_order, whole_where_mixed
from lensjax.passes.ruled import Ruled
from lensjax.passes.shardings import Shardings, batch_axes, named, ways
from lensjax.passes.steady import steady
from lensjax.passes.windows import Splits, safe_splits
from lensjax.plan.plan import Plan, Spec
from lensjax.program.edit import Builder, Constrain, body_operands, is_var, map_bodies, shape_of
from lensjax.program.flow import touches
from lensjax.program.program import Program

_PINNED = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "gather"})
_VIEWS = frozenset({"convert_element_type", "copy", "transpose"})
# Names of equations that run in the backward: transposed ones, and those that the recompute pass made again.
_BACKWARD = ("transpose(", AGAIN)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A split weight, or a view of one, on its way to its uses. `use`: the spec in which matmuls read it: whole along
    the axes that split the batch, still split along the others."""

    spec: Spec
    use: Spec
    gather: str  # "once" | "again"


def _together(x, y):
    return jax.lax.optimization_barrier((x, y))


def pin(
    program: Program, plan: Plan, mesh: Any, shardings: Shardings, share: Share | None = None, whole: bool = True
) -> Program:
    """`program` with the plan's sharding constraints. `mesh`: a jax Mesh or AbstractMesh with the plan's axes;
    `shardings`: what the plan resolves to; `share`: where the program is that of one share of the batch; `whole`: the
    program is all that the plan was made for, and has every axis that the plan names."""
    if plan.mesh.size == 1:
        return program
    rules = activation_rules(program, plan, whole and share is None)
    return dataclasses.replace(program, jaxpr=steady(_Pinner(program, plan, mesh, shardings, rules, share).top()))


Rules = tuple[tuple[int, tuple[str, ...]], ...]  # (logical axis, mesh axes), in order


@dataclasses.dataclass(frozen=True)
class Share:
    """The program of a share, of which there is one along each of the mesh axes `axes`: the batch inside it is not
    split over them. `results`: {result index: spec of a partial gradient}."""

    axes: tuple[str, ...]
    results: Mapping[int, Spec]


def activation_rules(program: Program, plan: Plan, whole: bool = True) -> Rules:
    """(logical axis, mesh axes) of the plan's activation rules, in order; empty where only the batch is ruled (then the
    batch dimensions that two traces found are enough). Raises PlanError for a name that the program does not have; a
    part of it (not `whole`) may have fewer: dimensions can come apart into other factors there."""
    rules = plan.rules.activations
    if set(rules) <= {"batch"}:
        return ()
    number: dict[str, list[int]] = {}
    for i, name in enumerate(program.logical.names):
        number.setdefault(name, []).append(i)
    if whole and (unknown := [name for name, axes in rules.items() if axes and name not in number]):
        raise PlanError(
            f"the plan has a rule for the logical axis {unknown[0]!r}, which the program does not have",
            hint="the plan was made for another program: plan again",
        )
    return tuple((i, tuple(axes)) for name, axes in rules.items() if axes for i in number.get(name, ()))


class _Pinner:
    def __init__(
        self, program: Program, plan: Plan, mesh: Any, shardings: Shardings, rules: Rules, share: Share | None
    ):
        self.program, self.plan, self.mesh, self.shardings = program, plan, mesh, shardings
        self.batch = program.batch
        outside = share.axes if share is not None else ()
        self.inside = tuple(a for a in plan.mesh.shape if a not in outside)
        self.gathered = batch_axes(plan)
        self.axes = tuple(a for a in self.gathered if a not in outside)
        self.rules = tuple((axis, tuple(a for a in axes if a not in outside)) for axis, axes in rules)
        sizes = [a.size for a in program.logical.axes] if self.rules else []
        self.ruled = Ruled(self.rules, sizes, partial(ways, plan))
        self.batch_ids = {i for i, n in enumerate(program.logical.names) if n == "batch"} if self.rules else set()
        inner = _jax.open_jaxpr(program.jaxpr)
        self.results = self._final_specs(inner) if share is None else dict(share.results)
        self.grads = gradient_pins(program, {inner.outvars[r]: s for r, s in self.results.items()})

    def _final_specs(self, inner: Any) -> dict[int, Spec]:
        """{result index: spec in which it is computed}: gradients, next parameters and next moments."""
        specs = {}
        for i, a in enumerate(self.program.arguments):
            if a.result is not None and a.role == "parameter":
                specs[a.result] = self.shardings.gradients[i]
            elif a.result is not None and a.role == "optimizer":
                specs[a.result] = self.shardings.arguments[i]
        for p, r in self.program.gradients.items():
            specs[r] = self.shardings.gradients[p]
        return specs

    def top(self) -> Any:
        inner = _jax.open_jaxpr(self.program.jaxpr)
        layer_of = {p: layer.name for layer in self.program.layers for p in layer.parameters}
        weights = {}
        for i, a in enumerate(self.program.arguments):
            if a.role in ("parameter", "constant") and any(self.shardings.arguments[i]):
                spec = self.shardings.arguments[i]
                use = self._use(inner.invars[i], spec)
                weights[inner.invars[i]] = Weight(spec, use, self._gather_mode(layer_of.get(i)))
        b = Builder()
        self._body(b, inner, weights)
        outs = b.read_all(inner.outvars)
        last = inner.eqns[-1] if inner.eqns else None
        for r, spec in self.results.items():
            # Sharded optimizer, whole parameters: the new value is computed in parts, then gathered.
            if last is not None and is_var(outs[r]) and spec != self.shardings.results[r]:
                outs[r] = self._constrain(b, outs[r], spec, last, "update")
        return _jax.rebuild(self.program.jaxpr, eqns=b.eqns, outvars=outs)

    def _gather_mode(self, layer: str | None) -> str:
        gather = self.plan.gather
        if layer is None and self.program.layers:
            return gather.get("", "once")  # outside the layers forward and backward uses are next to each other
        return gather.get(layer or "*", gather.get("*", "once"))

    def _use(self, v: Any, spec: Spec) -> Spec:
        """The spec in which matmuls read a weight: whole along the mesh axes that split the batch or only its sequence,
        except where a rule splits the weight's own axis over them (experts), and still split along the others."""
        gathered = {*self.gathered, *self._sequence_axes()}
        by_rule = {(axis, m) for axis, mesh in self.rules if axis not in self.batch_ids for m in mesh}
        majors = [self.program.logical.major(v, d) if self.rules else None for d in range(len(spec))]
        return tuple(
            tuple(m for m in axes if m not in gathered or (major, m) in by_rule) for major, axes in zip(majors, spec)
        )

    def _sequence_axes(self) -> set[str]:
        """Mesh axes that rules give to axes of the batch's arguments alone (the sequence): like the batch's, they split
        activations and no weight."""
        if not self.rules:
            return set()
        logical, inner = self.program.logical, _jax.open_jaxpr(self.program.jaxpr)
        inputs = {
            axis
            for v, a in zip(inner.invars, self.program.arguments) if a.role == "batch"
            for dimension in logical.dims.get(v, ()) for axis in dimension
        }  # fmt: skip
        return {m for _, mesh in self.rules for m in mesh} - {
            m for a, mesh in self.rules if a not in inputs for m in mesh
        }

    # ---- one body ---------------------------------------------------------------------------------------------------

    def _body(self, b: Builder, jaxpr: Any, weights: dict[Any, Weight]) -> None:
        gathered: dict[Any, Any] = {}
        n = ways(self.plan, self.inside)
        for eqn in jaxpr.eqns:
            ins = self._with_weights(b, eqn, weights, gathered)
            if any(True for _ in body_operands(eqn)):
                eqn = self._with_bodies(eqn, weights)
            splits = safe_splits(eqn, self.inside, n, self._kept(eqn)) or claimed(eqn, self._wanted, self.gathered)
            splits = splits or whole_where_mixed(eqn, n, self._wanted) or self._rows(eqn)
            splits = splits or agreeing_splits(eqn, self._wanted)
            if splits is not None:
                self._held(b, eqn, ins, splits)
            else:
                b.emit(eqn if all(map(operator.is_, ins, eqn.invars)) else eqn.replace(invars=ins))
            for v in eqn.outvars:
                self._pin_value(b, eqn, v, weights)

    def _pin_value(self, b: Builder, eqn: Any, v: Any, weights: dict[Any, Weight]) -> None:
        if isinstance(v, jcore.DropVar):
            return
        if v in self.grads:
            before = summed_first(eqn, self.grads[v], self.gathered)
            made = b.read(v) if before is None else self._constrain(b, v, before, eqn, "sum")
            b.env[v] = self._constrain(b, made, self.grads[v], eqn, "gradient")
        elif v in weights:
            b.env[v] = self._constrain(b, v, weights[v].spec, eqn, "weight")
        elif eqn.primitive.name in _PINNED:
            b.env[v] = self._pin_batch(b, v, eqn)

    def _pin_batch(self, b: Builder, v: Any, like: Any) -> Any:
        """`v` split along its batch dimension; unchanged where it has none, or only one merged with another."""
        entries = self._entries(v) if self.rules else self._batch_entries(v)
        if entries is None:
            return b.read(v)
        sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
        return b.apply(Constrain(sharding), b.read(v), like=like, name="lensjax.batch")[0]

    def _wanted(self, v: Any) -> list[Any]:
        """How the plan splits each dimension of a value; free where the batch is merged behind another."""
        entries = (self._entries(v) if self.rules else self._batch_entries(v)) if is_var(v) else None
        if entries is not None:
            return entries
        hidden = self.batch.dims.get(v, ()) if is_var(v) else ()
        return [PartitionSpec.UNCONSTRAINED if d in hidden else None for d in range(len(shape_of(v)))]

    def _batch_entries(self, v: Any) -> list[Any] | None:
        plain = self.batch.plain(v)
        if not plain or not self.axes:
            return None
        hidden = set(self.batch.dims[v]) - set(plain)
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED if d in hidden else None for d in range(len(shape_of(v)))]
        entries[plain[0]] = self.axes
        return entries

    def _entries(self, v: Any) -> list[Any] | None:
        dims = self.program.logical.dims
        return self.ruled(dims[v], shape_of(v)) if v in dims else self._batch_entries(v)

    def _kept(self, eqn: Any) -> Spec | None:
        """The mesh axes that split a gradient where it is made, less those over which it is summed."""
        spec = self.grads.get(eqn.outvars[0]) if eqn.outvars else None
        return None if spec is None else tuple(tuple(a for a in axes if a not in self.gathered) for axes in spec)

    def _rows(self, eqn: Any) -> Splits | None:
        """The rows of a ragged matmul split like the batch, over the axes that do not split its groups."""
        rows = ragged_rows(eqn)
        if rows is None or rows.operands[0] in self.batch.plain(eqn.invars[0]):
            return None
        taken = set()
        if self.rules:
            group = self.program.logical.major(*rows.groups)
            taken = {m for axis, mesh in self.rules if axis == group for m in mesh}
        axes = tuple(a for a in self.axes if a not in taken)
        if not axes or rows.count % ways(self.plan, axes):
            return None
        return split_rows(eqn, rows, axes)

    def _held(self, b: Builder, eqn: Any, ins: list[Any], splits: Splits) -> None:
        """An equation with operands and result split as told."""

        def pinned(spec: PartitionSpec, atom: Any) -> Any:
            return b.apply(Constrain(NamedSharding(self.mesh, spec)), atom, like=eqn, name="lensjax.split")[0]

        operands, result = splits
        ins = [pinned(s, a) if s is not None and is_var(a) else a for s, a in zip(operands, ins)]
        ordered = partial(b.apply, in_order, like=eqn, name="lensjax.order")
        b.emit(eqn.replace(invars=ordered(*ins) if has_order(eqn) else ins))
        for v in eqn.outvars:
            if result is not None and not isinstance(v, jcore.DropVar):
                b.env[v] = pinned(result, ordered(b.read(v))[0] if has_order(eqn) else b.read(v))

    def _constrain(self, b: Builder, atom: Any, spec: Spec, like: Any, name: str) -> Any:
        return b.apply(Constrain(named(self.mesh, spec)), b.read(atom), like=like, name=f"lensjax.{name}")[0]

    # ---- weights ------------------------------------------------------------------------------------------------

    def _with_weights(self, b: Builder, eqn: Any, weights: dict[Any, Weight], gathered: dict[Any, Any]) -> list[Any]:
        """The operands of `eqn`, split weights gathered where the computation (not only the optimizer) reads them."""
        held = [i for i, a in enumerate(eqn.invars) if is_var(a) and a in weights]
        ins = b.read_all(eqn.invars)
        if not held or not self._computes(eqn):
            return ins
        layers = eqn.primitive.name == "slice" and not weights[eqn.invars[0]].spec[0]  # a part of a stack of layers
        if (eqn.primitive.name in _VIEWS or layers) and not touches(eqn, lambda v: v in self.batch.dims):
            weights[eqn.outvars[0]] = self._view(eqn, weights[eqn.invars[0]])
            return ins
        inside = eqn.primitive.name in ("scan", "remat2", "checkpoint")
        for i in held:
            weight = weights[eqn.invars[i]]
            if inside and weight.gather == "again":
                continue  # gathered in the body, trip by trip
            if not inside or self._body_computes(eqn, i):
                ins[i] = self._gather(b, eqn, i, ins, weight, gathered)
        return ins

    def _computes(self, eqn: Any) -> bool:
        return touches(eqn, lambda v: v in self.batch.dims) or any(v in self.program.compute for v in eqn.outvars)

    def _body_computes(self, eqn: Any, i: int) -> bool:
        operand = eqn.invars[i]
        for body, operands, _ in body_operands(eqn):
            for v, a in zip(_jax.open_jaxpr(body).invars, operands):
                if a is operand and v in self.program.compute:
                    return True
        return False

    def _view(self, eqn: Any, weight: Weight) -> Weight:
        if eqn.primitive.name == "transpose":
            order = eqn.params["permutation"]
            return dataclasses.replace(
                weight, spec=tuple(weight.spec[d] for d in order), use=tuple(weight.use[d] for d in order)
            )
        return weight

    def _gather(self, b: Builder, eqn: Any, i: int, ins: list[Any], weight: Weight, gathered: dict[Any, Any]) -> Any:
        var = eqn.invars[i]
        phase = ""
        if weight.gather == "again":
            name = str(eqn.source_info.name_stack)
            phase = "backward" if any(mark in name for mark in _BACKWARD) else "forward"
        narrow = read_as(eqn, i)
        key = (var, phase, narrow)
        if key not in gathered:
            source = b.read(var)
            other = next((k for k, a in enumerate(eqn.invars) if k != i and is_var(a) and a in self.batch.dims), None)
            if phase == "backward" and (var, "forward", narrow) in gathered and other is not None:
                # Tied to a cotangent: else the compiler merges this gather with the forward's, and keeps the weight.
                source, ins[other] = b.apply(_together, source, ins[other], like=eqn, name="lensjax.again")
            if narrow is not None:
                # Every reader casts first: the cast value is what travels. Casting back and again changes no bit.
                source = b.apply(Cast(narrow), source, like=eqn, name="lensjax.cast")[0]
                source = self._constrain(b, source, weight.spec, eqn, "weight")
            source = self._constrain(b, source, weight.use, eqn, "gather")
            if narrow is not None:
                source = b.apply(Cast(var.aval.dtype), source, like=eqn, name="lensjax.cast")[0]
            gathered[key] = source
        return gathered[key]

    # ---- nested bodies ------------------------------------------------------------------------------------------

    def _with_bodies(self, eqn: Any, weights: dict[Any, Weight]) -> Any:
        operands = [ops for _, ops, _ in body_operands(eqn)]
        name = eqn.primitive.name
        sliced = len(eqn.invars)
        if name == "scan":
            sliced = sum(_jax.scan_split(eqn))

        def rewrite(body: Any, k: int) -> Any:
            inner = _jax.open_jaxpr(body)
            inside = {}
            for j, (v, a) in enumerate(zip(inner.invars, operands[k])):
                weight = weights.get(a) if is_var(a) else None
                if weight is not None and weight.gather == "again" and name in ("scan", "remat2", "checkpoint"):
                    if j >= sliced:
                        weight = dataclasses.replace(weight, spec=weight.spec[1:], use=weight.use[1:])
                    if any(weight.spec):
                        inside[v] = weight
            b = Builder()
            for v in inner.invars:
                if v in self.grads:
                    b.env[v] = self._constrain(b, v, self.grads[v], eqn, "gradient")
                elif v in self.batch.dims:
                    b.env[v] = self._pin_batch(b, v, eqn)
            self._body(b, inner, inside)
            outs = [self._pin_result(b, v, eqn) for v in inner.outvars]
            return _jax.rebuild(body, eqns=b.eqns, outvars=outs)

        return map_bodies(eqn, rewrite)

    def _pin_result(self, b: Builder, v: Any, eqn: Any) -> Any:
        if not is_var(v) or v not in self.batch.dims or b.read(v) is not v:
            return b.read(v)
        return self._pin_batch(b, v, eqn)
