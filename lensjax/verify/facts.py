"""What the partitioner decided about a step, and what the step's arguments are: the ground that findings stand on.

The step is lowered once as it is and once with twice the batch. Both give the same program, so the dimensions that
differ are the batch; Shardy says which mesh axes split every dimension of every value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from lensjax import _jax
from lensjax._errors import BatchError, LensjaxError
from lensjax.partition import Body, Node, Partitioned, Value, partition
from lensjax.program.program import Program, analyze


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
    traced = step.trace(*args)
    lowered = traced.lower(lowering_platforms=(platform,))
    parts = partition(lowered)
    kept = _jax.lowered_arguments(lowered)
    donated = frozenset(i for i, a in enumerate(jax.tree.leaves(lowered.args_info)) if getattr(a, "donated", False))
    try:
        program = _program(step, args)
        axes = _leaf_axes(program)
        other = _at_twice(step, args, axes, platform)
        batch, reason = _differing(parts, other)
    except LensjaxError as e:
        program, axes, batch, reason = None, {}, {}, e.message
    except Exception as e:  # user code that does not take another batch size, in whatever way
        batch, reason = {}, f"the step does not trace at twice the batch: {type(e).__name__}: {str(e)[:200]}"
    data = _data_axes(parts, kept, axes)
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


def _leaf_axes(program: Program) -> dict[int, int]:
    """Flattened argument -> batch dimension (the program counts arrays only)."""
    dynamic = [i for i, d in enumerate(program.call.dynamic) if d]
    return {dynamic[i]: axis for i, axis in program.batch.axes.items()}


def _at_twice(step: Any, args: tuple[Any, ...], axes: Mapping[int, int], platform: str) -> Partitioned:
    leaves, tree = jax.tree.flatten(args)
    for i, axis in axes.items():
        shape = list(leaves[i].shape)
        shape[axis] *= 2
        sharding = getattr(leaves[i], "sharding", None)
        leaves[i] = jax.ShapeDtypeStruct(tuple(shape), leaves[i].dtype, sharding=sharding)
    twice = step.trace(*jax.tree.unflatten(tree, leaves))
    return partition(twice.lower(lowering_platforms=(platform,)))


def _differing(one: Partitioned, two: Partitioned) -> tuple[dict[int, tuple[int, ...]], str]:
    """(dimensions in which each value differs, "") of two programs of the same structure; ({}, why not) else."""
    found: dict[int, tuple[int, ...]] = {}
    try:
        _compare(one.body, two.body, one, two, found)
    except _Mismatch as e:
        return {}, f"twice the batch gives another program: {e}"
    return found, ""


class _Mismatch(Exception):
    pass


def _compare(a: Body, b: Body, one: Partitioned, two: Partitioned, found: dict[int, tuple[int, ...]]) -> None:
    if len(a.nodes) != len(b.nodes):
        raise _Mismatch(f"{len(a.nodes)} operations became {len(b.nodes)}")
    pairs = list(zip(a.arguments, b.arguments))
    for x, y in zip(a.nodes, b.nodes):
        if x.name != y.name:
            raise _Mismatch(f"{x.name} became {y.name} ({x.source})")
        pairs += [*zip(x.inputs, y.inputs), *zip(x.outputs, y.outputs)]
        for inner, other in zip(x.bodies, y.bodies):
            _compare(inner, other, one, two, found)
    for i, j in pairs:
        s, t = one.values[i].shape, two.values[j].shape
        if len(s) != len(t):
            raise _Mismatch(f"a value of rank {len(s)} became one of rank {len(t)}")
        if dims := tuple(d for d in range(len(s)) if s[d] != t[d]):
            found[i] = dims


def _data_axes(parts: Partitioned, kept: tuple[int, ...], axes: Mapping[int, int]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for leaf, axis in axes.items():
        if leaf in kept:
            found.update(dict.fromkeys(a.partition(":")[0] for a in parts.arguments[kept.index(leaf)].spec[axis]))
    return tuple(a for a in found if parts.mesh[a] > 1)
