"""Logical axes: which dimensions of a step must be split together, from Shardy's rule for each operation.

Two dimensions belong to one class when an operation maps them to one factor of its rule, or when data flows from one to
the other through a loop, a branch or a barrier. What people write by hand as `batch`, `embed`, `mlp`, `heads`, `vocab`
falls out (cf. TOAST, Alabed et al. 2025, which colours dimensions the same way).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lensjax import _jax
from lensjax.partition.factors import Factors
from lensjax.partition.inline import main_function, walk
from lensjax.partition.module import MARK, Template, template
from lensjax.partition.text import tensor_type

# A dimension is a product of classes, major first; () for a dimension of size one.
Dimension = tuple[int, ...]

_RULE = "sdy.sharding_rule"
_IDENTITY = ("stablehlo.optimization_barrier", "sdy.sharding_constraint", "sdy.propagation_barrier", "stablehlo.case",
             "stablehlo.if")  # fmt: skip
_LEAVES = (
    "stablehlo.constant",
    "sdy.constant",
    "stablehlo.iota",
    "func.return",
    "stablehlo.return",
    "sdy.return",
    "sdy.mesh",
)


@dataclasses.dataclass(frozen=True)
class LogicalAxis:
    """A class of dimensions that are split together.

    size:  of the dimension; the largest of `sizes` where slices, pads or windows joined several.
    reductions, replications, permutations: operations (name -> how many) over which splitting it costs an all-reduce,
           is not possible without gathering it first, or makes neighbours exchange their edges.
    twice: values that have it in two dimensions (attention scores over one sequence, a square weight): a mesh axis can
           then split only one of them.
    """

    size: int
    sizes: tuple[int, ...]
    reductions: Mapping[str, int]
    replications: Mapping[str, int]
    permutations: Mapping[str, int]
    twice: int


@dataclasses.dataclass(frozen=True)
class DimensionFactors:
    """The classes of a step. `arguments`, `results` (flattened trees) and `marks` give a `Dimension` for each
    dimension; its entries index `axes`. `without_rule` counts operations that Shardy has no rule for."""

    axes: tuple[LogicalAxis, ...]
    arguments: tuple[tuple[Dimension, ...], ...]
    results: tuple[tuple[Dimension, ...], ...]
    marks: Mapping[int, tuple[Dimension, ...]]
    without_rule: Mapping[str, int]


def dimension_factors(source: Any) -> DimensionFactors:
    """The logical axes of a `jax.stages.Lowered` or `Template`. Shardings in it play no part.

    `without_rule` counts operations that Shardy has no rule for (their results relate to nothing).
    """
    module, joiner = joined(source if isinstance(source, Template) else template(source))
    for op, mapped in joiner.facts:
        joiner.note(op, mapped)
    return joiner.finish(main_function(module))


def joined(source: Template) -> tuple[Any, Joiner]:
    """(a copy of the module with the rules of its operations, which its operations do not keep alive by themselves; the
    dimensions that belong together in it)."""
    module = source.module.clone()
    _jax.run_passes(module, *_jax.PASSES_RULES)
    joiner = Joiner()
    main = main_function(module)
    for argument in main.regions[0].blocks[0].arguments:
        joiner.dims(argument)
    for op in walk(main):
        joiner.operation(op)
    return module, joiner


class Joiner:
    """Collects while one module is walked."""

    def __init__(self) -> None:
        self.factors = Factors()
        self.known: dict[Any, tuple[int, ...]] = {}
        self.shapes: dict[Any, tuple[int, ...]] = {}
        self.without: Counter[str] = Counter()
        self.facts: list[tuple[str, dict[str, list[int]]]] = []
        self.noted: dict[str, dict[int, Counter[str]]] = {k: {} for k in _KINDS}

    def dims(self, value: Any) -> tuple[int, ...]:
        if value not in self.known:
            self.shapes[value] = tensor_type(str(value.type))[0]
            self.known[value] = tuple(self.factors.new(n) for n in self.shapes[value])
        return self.known[value]

    def operation(self, op: Any) -> None:
        if _RULE in op.attributes:
            self.rule(op)
        elif op.name == "stablehlo.while":
            self.loop(op)
        elif op.name in _IDENTITY:
            self.identity(op)
        elif op.name == "chlo.top_k":
            self.same(op.operands[0], op.results[0], skip_last=True)
            self.same(op.results[0], op.results[1])
        elif op.name.startswith("chlo."):
            for operand in op.operands:
                self.same(operand, op.results[0])
        elif op.name not in _LEAVES and op.results and not _inside_reducer(op):
            self.without[op.name] += 1

    def rule(self, op: Any) -> None:
        """Joins every dimension that the operation's rule maps to one factor."""
        rule = _jax.sharding_rule(op.attributes[_RULE])
        own = [self.factors.new(n) for n in rule.factor_sizes]
        pairs = [*zip(op.operands, rule.operands), *zip(op.results, rule.results)]
        mapped = [
            (dim, n, factors)
            for value, mapping in pairs
            for dim, n, factors in zip(self.dims(value), self.shapes[value], mapping)
        ]
        sizes: dict[int, set[int]] = {}
        for _, n, factors in mapped:
            if len(factors) == 1:
                sizes.setdefault(factors[0], set()).add(n)
        # Where the size changes and the dimension cannot be split anyway (a layer sliced from a stack, a
        # concatenation), it is not the same dimension.
        apart = rule.blocked | {f for f in rule.replication if len(sizes.get(f, ())) > 1}
        for dim, n, factors in mapped:
            found = [f for f in factors if rule.factor_sizes[f] > 1]
            if n > 1 and found and not apart.intersection(found):
                self.factors.join([dim], [own[f] for f in found])
        kinds = (rule.reduction, rule.replication, rule.permutation)
        self.facts.append((op.name, {k: [own[f] for f in fs] for k, fs in zip(_KINDS, kinds)}))

    def loop(self, op: Any) -> None:
        for i, (operand, result) in enumerate(zip(op.operands, op.results)):
            self.same(operand, result)
            for region in op.regions:
                self.same(result, region.blocks[0].arguments[i])
        body = list(op.regions[1].blocks[0])[-1].operation
        for result, value in zip(op.results, body.operands):
            self.same(result, value)

    def identity(self, op: Any) -> None:
        if op.regions:
            for region in op.regions:
                for result, value in zip(op.results, list(region.blocks[0])[-1].operation.operands):
                    self.same(result, value)
            return
        for operand, result in zip(op.operands, op.results):
            self.same(operand, result)

    def same(self, left: Any, right: Any, skip_last: bool = False) -> None:
        a, b = self.dims(left), self.dims(right)
        if len(a) == len(b):
            for x, y in list(zip(a, b))[: -1 if skip_last else None]:
                if self.factors.size(x) > 1 and self.factors.size(y) > 1:
                    self.factors.join([x], [y])

    def note(self, name: str, mapped: Mapping[str, Sequence[int]]) -> None:
        for kind, factors in mapped.items():
            for leaf in {leaf for f in factors for leaf in self.factors.leaves(f)}:
                self.noted[kind].setdefault(leaf, Counter())[name.partition(".")[2]] += 1

    def finish(self, main: Any) -> DimensionFactors:
        number: dict[int, int] = {}

        def named(value: Any) -> tuple[Dimension, ...]:
            leaves = [
                self.factors.leaves(d) if n > 1 else []
                for d, n in zip(self.dims(value), self.shapes[value], strict=True)
            ]
            return tuple(tuple(number.setdefault(leaf, len(number)) for leaf in dim) for dim in leaves)

        block = main.regions[0].blocks[0]
        arguments = tuple(named(a) for a in block.arguments)
        results = tuple(named(r) for r in list(block)[-1].operation.operands)
        marks = {}
        for op in walk(main):
            if op.name == "sdy.sharding_constraint" and (mark := MARK.search(str(op.location))):
                marks[int(mark[1])] = named(op.results[0])
        twice = self.twice()
        axes = tuple(self.axis(leaf, twice) for leaf in number)
        return DimensionFactors(axes, arguments, results, marks, dict(self.without))

    def twice(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for dims in self.known.values():
            leaves = Counter(leaf for d in dims for leaf in self.factors.leaves(d))
            found.update(leaf for leaf, n in leaves.items() if n > 1)
        return found

    def axis(self, leaf: int, twice: Counter[int]) -> LogicalAxis:
        reduced, whole, moved = (dict(self.noted[kind].get(leaf, {})) for kind in _KINDS)
        sizes = tuple(sorted(self.factors.sizes[leaf]))
        return LogicalAxis(sizes[-1], sizes, reduced, whole, moved, twice[leaf])


_KINDS = ("reduction", "replication", "permutation")


def _inside_reducer(op: Any) -> bool:
    """Operations on scalars inside a reduce, sort or scatter."""
    return all(not tensor_type(str(r.type))[0] for r in op.results)
