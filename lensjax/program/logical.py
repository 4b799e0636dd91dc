"""Logical axes: which dimensions of the program's values must be split together, and what they are called.

Each kind of equation (primitive, parameters, shapes) is lowered once, whatever the number of layers, and Shardy's own
rules for its operations say which dimensions are one (`lensjax.partition.dimension_factors`). Where data flows from one
equation to the next, into a body and out of it, the dimensions of all are joined. Nothing about layers or names is
assumed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jcore

from lensjax import _jax
from lensjax.partition.axes import Dimension, LogicalAxis, dimension_factors
from lensjax.partition.factors import Factors
from lensjax.program.edit import bodies, body_operands, is_var, shape_of
from lensjax.program.flow import carried_pairs

# Equations that hand a value on: no need to ask for a rule, nor for the mesh that a constraint names.
_IDENTITY = frozenset("sharding_constraint optimization_barrier copy name".split())
_KINDS = ("reductions", "replications", "permutations")


@dataclasses.dataclass(frozen=True)
class Logical:
    """`axes[i]` is logical axis i, `names[i]` what it is called: "batch", or the first argument (by path) that has it,
    with the dimension; `dims`: variable -> for each dimension the axes that make it up, major first."""

    axes: tuple[LogicalAxis, ...]
    names: tuple[str, ...]
    dims: dict[Any, tuple[Dimension, ...]]

    def major(self, var: Any, d: int) -> int | None:
        """The logical axis that splitting dimension `d` of a variable splits first; None where nothing is known."""
        dimension = self.dims.get(var, ())
        return dimension[d][0] if d < len(dimension) and dimension[d] else None


def logical_axes(jaxpr: Any, names: Sequence[str], batch: Mapping[int, int], first: Collection[int] = ()) -> Logical:
    """The logical axes of a program without calls. `names`: paths of its arguments, which name the axes, those in
    `first` (parameters) before the others; `batch`: {argument: dimension} of the batch. Raises PartitionError or
    UnsupportedJax as the partitioner does."""
    inner = _jax.open_jaxpr(jaxpr)
    number: dict[tuple[Any, ...], int] = {}
    forms, examples = {}, []
    for eqn in _leaves(inner):
        forms[id(eqn)] = number.setdefault(_form(eqn), len(number))
        if len(number) > len(examples):
            examples.append(eqn)
    rules = [_RULES.get(form) for form in number]
    asked = [i for i, r in enumerate(rules) if r is None]
    for i, rule in zip(asked, _rules([examples[i] for i in asked])):
        rules[i] = rule
    if len(_RULES) > _MOST:
        _RULES.clear()
    _RULES.update((form, r) for form, r in zip(number, rules) if r is not None and form[-1])
    joiner = _Joiner({eqn: rules[n] for eqn, n in forms.items()})  # type: ignore[misc]
    joiner.body(inner)
    axes, dims = joiner.finish(inner)
    return Logical(axes, _names([dims[v] for v in inner.invars], len(axes), names, batch, first), dims)


def _names(
    arguments: Sequence[tuple[Dimension, ...]], count: int, paths: Sequence[str], batch: Mapping[int, int],
    first: Collection[int],
) -> tuple[str, ...]:  # fmt: skip
    names = {arguments[i][d][0]: "batch" for i, d in batch.items() if arguments[i][d]}
    order = sorted(range(len(paths)), key=lambda i: (i not in first, paths[i]))
    for path, dims in ((paths[i], arguments[i]) for i in order):
        for d, dimension in enumerate(dims):
            for k, axis in enumerate(dimension):
                inner = path.partition("/")[2] or path
                names.setdefault(axis, f"{inner}[{d}]" + (f".{k}" if len(dimension) > 1 else ""))
    return tuple(names.get(i, f"inner {i}") for i in range(count))


# Form of an equation -> its rule, and how many are remembered: steps that are planned in several ways (shares of the
# batch, fewer layers) have them in common, and asking takes longer than all the rest.
_RULES: dict[tuple[Any, ...], _Rule] = {}
_MOST = 20_000

# ---- one kind of equation -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Which dimensions of an equation's operands and results are one: entries of `operands` and `results` (a Dimension
    for each dimension) index `axes`."""

    operands: tuple[tuple[Dimension, ...], ...]
    results: tuple[tuple[Dimension, ...], ...]
    axes: tuple[LogicalAxis, ...]

    @functools.cached_property
    def noted(self) -> tuple[int, ...]:
        """The axes that are not split for nothing."""
        return tuple(i for i, a in enumerate(self.axes) if a.reductions or a.replications or a.permutations)


def _leaves(jaxpr: Any) -> Iterator[Any]:
    """The equations, at every depth, that need a rule: those without bodies, that are pure and of arrays."""
    for eqn in jaxpr.eqns:
        inner = [_jax.open_jaxpr(b) for b in bodies(eqn)]
        for body in inner:
            yield from _leaves(body)
        if _needs_rule(eqn) and not inner:
            yield eqn


def _needs_rule(eqn: Any) -> bool:
    shaped = any(map(shape_of, (*eqn.invars, *eqn.outvars)))
    return shaped and not eqn.effects and eqn.primitive.name not in _IDENTITY


def _form(eqn: Any) -> tuple[Any, ...]:
    """Equal for equations that split alike. What cannot be compared (a kernel, an array) counts as different; the last
    entry says whether everything can, so that the form means the same in another program."""
    lasting = all(map(_hashable, eqn.params.values()))
    params = tuple((k, v if lasting or _hashable(v) else id(v)) for k, v in sorted(eqn.params.items()))
    ins = tuple((is_var(a), shape_of(a), getattr(a.aval, "dtype", None)) for a in eqn.invars)
    outs = tuple((shape_of(v), getattr(v.aval, "dtype", None)) for v in eqn.outvars)
    return eqn.primitive, params, ins, outs, lasting


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _rules(examples: Sequence[Any]) -> list[_Rule]:
    """The rule of each equation, all lowered as one program in which none reads another."""
    if not examples:
        return []
    eqns, arguments, results = [], [], []
    for eqn in examples:
        ins = [_jax.new_var(a.aval) if is_var(a) else a for a in eqn.invars]
        outs = [_jax.new_var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=ins, outvars=outs))
        arguments += [a for a in ins if is_var(a)]
        results += outs
    empty = jax.make_jaxpr(lambda: ())()
    run = jcore.jaxpr_as_fun(_jax.close(_jax.rebuild(empty, invars=arguments, eqns=eqns, outvars=results)))
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in arguments]
    found = dimension_factors(jax.jit(run, keep_unused=True).trace(*avals).lower(lowering_platforms=("cpu",)))
    given, made = iter(found.arguments), iter(found.results)
    rules = []
    for eqn in examples:
        # A key is an array with one dimension more than its type says.
        operands = [next(given)[: len(shape_of(a))] if is_var(a) else () for a in eqn.invars]
        outs = [next(made)[: len(shape_of(v))] for v in eqn.outvars]
        own = sorted({axis for dims in (*operands, *outs) for d in dims for axis in d})
        at = {axis: i for i, axis in enumerate(own)}
        local = lambda dims, at=at: tuple(tuple(at[axis] for axis in d) for d in dims)
        rules.append(_Rule(tuple(map(local, operands)), tuple(map(local, outs)), tuple(found.axes[a] for a in own)))
    return rules


# ---- the program ----------------------------------------------------------------------------------------------------


class _Joiner:
    """Joins the dimensions of a program's variables, equation by equation. `rules`: {id of an equation: its rule}."""

    def __init__(self, rules: Mapping[int, _Rule]):
        self.rules = rules
        self.factors = Factors()
        self.known: dict[Any, tuple[int, ...]] = {}
        self.noted: list[tuple[int, LogicalAxis]] = []

    def dims(self, v: Any) -> tuple[int, ...]:
        if v not in self.known:
            self.known[v] = tuple(self.factors.new(n) for n in shape_of(v))
        return self.known[v]

    def body(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if any(True for _ in bodies(eqn)):
                self.structure(eqn)
            elif eqn.primitive.name in _IDENTITY:
                for a, v in zip(eqn.invars, eqn.outvars):
                    self.same(a, v)
            elif id(eqn) in self.rules:
                self.rule(eqn, self.rules[id(eqn)])

    def rule(self, eqn: Any, rule: _Rule) -> None:
        own: list[int | None] = [None] * len(rule.axes)
        for v, dims in [*zip(eqn.invars, rule.operands), *zip(eqn.outvars, rule.results)]:
            for x, dimension in zip(self.dims(v), dims) if is_var(v) else ():
                if len(dimension) == 1 and own[dimension[0]] is None and len(rule.axes[dimension[0]].sizes) == 1:
                    own[dimension[0]] = x
                elif dimension:
                    self.factors.join([x], [self.own(own, a, rule.axes[a]) for a in dimension])
        self.noted += [(self.own(own, a, rule.axes[a]), rule.axes[a]) for a in rule.noted]

    def own(self, own: list[int | None], a: int, axis: LogicalAxis) -> int:
        """The class that stands for axis `a` of a rule in this equation."""
        x = own[a]
        if x is None:
            x = own[a] = self.factors.new(axis.size)
            self.factors.sizes[x] |= set(axis.sizes)
        return x

    def structure(self, eqn: Any) -> None:
        """A loop, a branch or a remat: what goes in and comes out, trip by trip."""
        held = stacked = None
        if eqn.primitive.name == "scan":
            consts, carry = _jax.scan_split(eqn)
            held, stacked = consts + carry, carry
        for body, operands, results in body_operands(eqn):
            body = _jax.open_jaxpr(body)
            for k, (a, v) in enumerate(zip(operands, body.invars)):
                self.same(a, v, skip=held is not None and k >= held)
            self.body(body)
            for k, (a, v) in enumerate(zip(results, body.outvars)):
                self.same(a, v, skip=stacked is not None and k >= stacked)
        for result, arguments in carried_pairs(eqn):
            for v in arguments:
                self.same(result, v)

    def same(self, a: Any, b: Any, skip: bool = False) -> None:
        """Two values are one; `skip`: the first has the trips of a loop as one more dimension."""
        if is_var(a) and is_var(b):
            for x, y in zip(self.dims(a)[int(skip) :], self.dims(b)):
                if self.factors.size(x) > 1 and self.factors.size(y) > 1:
                    self.factors.join([x], [y])

    def finish(self, jaxpr: Any) -> tuple[tuple[LogicalAxis, ...], dict[Any, tuple[Dimension, ...]]]:
        """The axes, numbered from the program's arguments on, and {variable: what each dimension is made of}."""
        number: dict[int, int] = {}
        dims, twice = {}, Counter()
        order = dict.fromkeys([*jaxpr.invars, *filter(is_var, jaxpr.outvars), *self.known])
        for v in order:
            leaves = [self.factors.leaves(x) if n > 1 else [] for x, n in zip(self.dims(v), shape_of(v))]
            if leaves or v in jaxpr.invars:
                dims[v] = tuple(tuple(number.setdefault(leaf, len(number)) for leaf in d) for d in leaves)
            every = [leaf for d in leaves for leaf in d]
            if len(set(every)) < len(every):
                twice.update(leaf for leaf, n in Counter(every).items() if n > 1)
        noted: dict[str, dict[int, Counter[str]]] = {kind: {} for kind in _KINDS}
        for x, axis in self.noted:
            for kind in _KINDS:
                if names := getattr(axis, kind):
                    for leaf in self.factors.leaves(x):
                        noted[kind].setdefault(leaf, Counter()).update(names)
        axes = []
        for leaf in number:
            sizes = tuple(sorted(self.factors.sizes[leaf]))
            reduced, whole, moved = (dict(noted[kind].get(leaf, {})) for kind in _KINDS)
            axes.append(LogicalAxis(sizes[-1], sizes, reduced, whole, moved, twice[leaf]))
        return tuple(axes), dims
