"""What the partitioner decided about a step, and what the step's arguments are: the ground that findings stand on.

The step is lowered once as it is and once with twice the batch. Both give the same program, so the dimensions that
differ are the batch; Shardy says which mesh axes split every dimension of every value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from lensjax import _jax
from lensjax._errors import BatchError, LensjaxError
from lensjax.partition import Body, Node, Partitioned, Value, partition
from lensjax.program.program import Program, analyze

# What the partitioner puts between an array and its use.
RESHARDS = ("all_gather", "all_to_all", "all_slice", "collective_permute")


@dataclasses.dataclass(frozen=True)
class Facts:
    """A step before it is compiled.

    parts:      what each device holds, computes and sends, as Shardy has it
    program:    roles of the arguments, or None where they could not be found (then `reason` says why)
    kept:       position in the flattened arguments of each argument of the module
    batch:      index of a value in `parts.values` -> its dimensions that grow with the batch
    data:       mesh axes that split the batch arguments
    donated:    positions in the flattened arguments that were donated
    """

    parts: Partitioned
    program: Program | None
    kept: tuple[int, ...]
    batch: Mapping[int, tuple[int, ...]]
    data: tuple[str, ...]
    donated: frozenset[int]
    reason: str = ""

    @property
    def mesh(self) -> Mapping[str, int]:
        return self.parts.mesh

    def argument(self, leaf: int) -> Value | None:
        """The value of a flattened argument, None where the step never reads it."""
        return self.parts.arguments[self.kept.index(leaf)] if leaf in self.kept else None

    def walk(self) -> Iterator[tuple[Node, int, Body]]:
        """(node, runs per step, its body) of everything, in program order."""
        yield from _walk(self.parts.body, 1)

    @functools.cached_property
    def _moved(self) -> Mapping[int, int]:
        return {n.outputs[0]: n.inputs[0] for n, _, _ in self.walk() if n.name in RESHARDS and n.outputs}

    def before(self, value: int) -> int:
        """The value that the partitioner moved or gathered to make this one, which is the same array.

        Where it moves operands rather than sums, that is its idea of cheap; the compiler's may be another.
        """
        while value in self._moved:
            value = self._moved[value]
        return value

    def pieces(self, value: Value) -> int:
        """Devices that hold different parts of a value."""
        return size_of(self.mesh, [a for axes in value.spec for a in axes])

    def split_by(self, value: int, dims: tuple[int, ...]) -> frozenset[str]:
        """Names of the mesh axes (sub-axes count as their axis) that split some dimensions of a value."""
        spec = self.parts.values[value].spec
        return frozenset(a.partition(":")[0] for d in dims if d < len(spec) for a in spec[d])


def size_of(mesh: Mapping[str, int], axes: Any) -> int:
    """Devices along some mesh axes ("a" or the sub-axis "a:(2)4")."""
    size = 1
    for axis in axes:
        size *= int(axis.rpartition(")")[2]) if ":" in axis else mesh[axis]
    return size


def _walk(body: Body, times: int) -> Iterator[tuple[Node, int, Body]]:
    for node in body.nodes:
        yield node, times, body
        for inner in node.bodies:
            yield from _walk(inner, times * (node.trips or 1) if node.name == "stablehlo.while" else times)


def facts(step: Any, args: tuple[Any, ...], platform: str = "cuda") -> Facts:
    """Facts of a jitted step and its arguments (shapes suffice; NamedShardings on them count).

    Raises PartitionError where Shardy does not take the step.
    """
    lowered = step.trace(*args).lower(lowering_platforms=(platform,))
    try:
        program = _program(step, args)
    except LensjaxError as e:
        return lowered_facts(lowered, None, None, e.message)

    def twice() -> Partitioned:
        args, kwargs = doubled(program)
        return partition(step.trace(*args, **kwargs).lower(lowering_platforms=(platform,)))

    return lowered_facts(lowered, program, twice)


def lowered_facts(
    lowered: Any, program: Program | None, twice: Callable[[], Partitioned] | None, reason: str = ""
) -> Facts:
    """Facts of a lowered step. `twice`: the same step, partitioned, with twice the batch."""
    parts = partition(lowered)
    kept = _jax.lowered_arguments(lowered)
    donated = frozenset(i for i, a in enumerate(jax.tree.leaves(lowered.args_info)) if getattr(a, "donated", False))
    batch: dict[int, tuple[int, ...]] = {}
    if twice is not None:
        try:
            batch, reason = _differing(parts, twice())
        except Exception as e:  # user code that does not take another batch size, in whatever way
            reason = f"the step does not trace at twice the batch: {type(e).__name__}: {str(e)[:200]}"
    data = _data_axes(parts, kept, program.batch.axes if program is not None else {})
    return Facts(parts, program, kept, batch, data, donated, reason)


def _program(step: Any, args: tuple[Any, ...]) -> Program:
    """The step's program. Where several groups of arguments could be the batch (an evaluation step, whose parameters do
    not come back), what follows the first argument is."""
    try:
        return analyze(step, args)
    except BatchError:
        if len(args) < 2:
            raise
        return analyze(step, args, batch_argnums=range(1, len(args)))


def doubled(program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arguments, keywords) of the program's call with twice the batch, as shapes; shardings are kept."""
    leaves = list(program.call.leaves)
    for i, axis in program.batch.axes.items():
        shape = list(leaves[i].shape)
        shape[axis] *= 2
        sharding = getattr(leaves[i], "sharding", None)
        leaves[i] = jax.ShapeDtypeStruct(tuple(shape), leaves[i].dtype, sharding=sharding)
    return program.call.rebuild(leaves)


def _differing(one: Partitioned, two: Partitioned) -> tuple[dict[int, tuple[int, ...]], str]:
    """(dimensions in which each value differs between two sizes of one step, why that is not known of all of them).

    Operations are paired by what they are and where they come from, in order: lowering may hoist a constant elsewhere,
    or write a broadcast that adds nothing as a reshape.
    """
    found: dict[int, tuple[int, ...]] = {}
    paired, total = _compare(one.body, two.body, one, two, found)
    if paired < 0.5 * total:
        return {}, f"twice the batch gives another program: {total - paired} of {total} operations have no counterpart"
    return found, ""


def _compare(
    a: Body, b: Body, one: Partitioned, two: Partitioned, found: dict[int, tuple[int, ...]]
) -> tuple[int, int]:
    """Records differing dimensions; returns (operations paired, operations in all)."""
    _differ(zip(a.arguments, b.arguments), one, two, found)
    there: dict[tuple, list[Node]] = {}
    for node in b.nodes:
        there.setdefault(_key(node, two), []).append(node)
    here: dict[tuple, list[Node]] = {}
    for node in a.nodes:
        here.setdefault(_key(node, one), []).append(node)
    paired = total = 0
    for key, nodes in here.items():
        others = there.get(key, [])
        total += len(nodes)
        if len(others) != len(nodes):
            continue
        paired += len(nodes)
        for x, y in zip(nodes, others):
            _differ([*zip(x.inputs, y.inputs), *zip(x.outputs, y.outputs)], one, two, found)
            for inner, other in zip(x.bodies, y.bodies):
                some, all_ = _compare(inner, other, one, two, found)
                paired, total = paired + some, total + all_
    return paired, total


def _key(node: Node, parts: Partitioned) -> tuple:
    ranks = tuple(len(parts.values[v].shape) for v in (*node.inputs, *node.outputs))
    name = "reshape" if node.name in ("stablehlo.reshape", "stablehlo.broadcast_in_dim") else node.name
    return name, node.op_name, node.source, ranks


def _differ(pairs: Any, one: Partitioned, two: Partitioned, found: dict[int, tuple[int, ...]]) -> None:
    for i, j in pairs:
        s, t = one.values[i].shape, two.values[j].shape
        if len(s) == len(t) and (dims := tuple(d for d in range(len(s)) if s[d] != t[d])):
            found[i] = dims


def _data_axes(parts: Partitioned, kept: tuple[int, ...], axes: Mapping[int, int]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for leaf, axis in axes.items():
        if leaf in kept:
            found.update(dict.fromkeys(a.partition(":")[0] for a in parts.arguments[kept.index(leaf)].spec[axis]))
    return tuple(a for a in found if parts.mesh[a] > 1)
