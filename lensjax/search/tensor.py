"""Tensor and expert parallelism from logical axes: which dimensions to split so that matmuls pair up as column and row.

Splitting a logical axis costs an all-reduce wherever a matmul contracts it, and nothing where it only runs along. A
weight between two axes can be split along one of them. So the axes to split, no two of them in one weight, are those
that save the most multiplication less what they make devices send: in a dense decoder the hidden axis of the MLP, the
heads and the vocabulary, never the residual stream. That is the column/row pairing of Megatron-LM (Shoeybi et al. 2019,
section 3), found rather than named.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import networkx

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.program.edit import bodies, is_var, shape_of
from lensjax.program.program import Program, once
from lensjax.program.roles import itemsize

# Multiplications and additions in the time in which a device sends one byte of an all-reduce inside a node: 312 to 989
# TFLOP/s and 235 to 450 GB/s on A100 to H100, of which kernels and collectives reach about the same part. Only its
# order counts: it weighs a vocabulary that does not divide against the residual stream of every layer.
FLOPS_FOR_A_BYTE = 1500.0

# Part of all weights below which memory is no reason to split an axis that costs more time than it saves: a router.
LITTLE = 1e-3


@dataclasses.dataclass(frozen=True)
class SplitAxes:
    """`axes`: logical axes to split; `reasons`: why the others that touch weights are not."""

    axes: tuple[int, ...]
    reasons: dict[int, str]


@once
def weight_axes(program: Program) -> dict[int, set[int]]:
    """{logical axis: matrices that it splits} (as the major part of a dimension), layer indices left out."""
    logical, found = program.logical, collections.defaultdict(set)
    stacked = {i for layer in program.layers for i in layer.parameters}
    for i, v in _parameters(program):
        dims = range(1 if i in stacked else 0, len(program.arguments[i].shape))
        for d in dims if len(dims) > 1 else ():
            axis = logical.major(v, d)
            if axis is not None:
                found[axis].add(i)
    return dict(found)


@once
def multiplied(program: Program) -> set[int]:
    """The parameters that matmuls and lookups read: not a table of positions, which is added to activations."""
    logical, read = program.logical, set()
    for eqn, _ in _equations(_jax.open_jaxpr(program.jaxpr), 1):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated", "gather", "ragged_dot", "ragged_dot_general"):
            weights = [v for v in eqn.invars[:2] if is_var(v) and v in program.compute and v not in program.batch.dims]
            read |= {frozenset(logical.major(v, d) for d in range(len(shape_of(v)))) for v in weights}
    stacked = {i for layer in program.layers for i in layer.parameters}
    majors = lambda i, v: (logical.major(v, d) for d in range(i in stacked, len(program.arguments[i].shape)))
    return {i for i, v in _parameters(program) if frozenset(majors(i, v)) in read}


def _parameters(program: Program) -> Iterator[tuple[int, Any]]:
    invars = _jax.open_jaxpr(program.jaxpr).invars
    return ((i, invars[i]) for i in program.parameters)


@once
def batch_input_axes(program: Program) -> set[int]:
    """Logical axes of the batch arguments: the batch itself, sequence, image height, ..."""
    invars = _jax.open_jaxpr(program.jaxpr).invars
    members = [invars[i] for i, a in enumerate(program.arguments) if a.role == "batch"]
    return {axis for v in members for dimension in program.logical.dims[v] for axis in dimension}


@once
def expert_axes(program: Program) -> set[int]:
    """Logical axes that select a weight rather than run through it: batch dimensions of a matmul between activations
    and weights, groups of a ragged matmul. Where there are experts, their axis is one of these."""
    logical, found = program.logical, set()
    weights = weight_axes(program)
    inputs = batch_input_axes(program)
    for eqn, _ in _equations(_jax.open_jaxpr(program.jaxpr), 1):
        if eqn.primitive.name == "dot_general":
            _, (left, right) = eqn.params["dimension_numbers"]
            sides = [(eqn.invars[0], left), (eqn.invars[1], right)]
            if any(is_var(v) and v in program.compute and v not in program.batch.dims for v, _ in sides):
                found |= {logical.major(v, d) for v, dims in sides for d in dims if is_var(v)}
        elif eqn.primitive.name in ("ragged_dot", "ragged_dot_general") and is_var(eqn.invars[1]):
            found.add(logical.major(eqn.invars[1], 0))
    return {a for a in found if a is not None and a in weights and a not in inputs}


@once
def contraction_bytes(program: Program) -> dict[int, float]:
    """{logical axis: bytes of the matmul and lookup results with a batch dimension that sum over it}, loops
    multiplied."""
    logical, cost = program.logical, collections.defaultdict(float)
    for eqn, trips in _equations(_jax.open_jaxpr(program.jaxpr), 1):
        out = eqn.outvars[0] if eqn.outvars else None
        if out is None or out not in program.batch.dims:
            continue
        size = trips * itemsize(out.aval.dtype)
        for n in shape_of(out):
            size *= n
        for axis in _contracted(eqn, logical):
            cost[axis] += size
    return dict(cost)


@once
def flops_along(program: Program) -> dict[int, float]:
    """{logical axis: multiplications and additions of the matmuls and convolutions that it runs through}, loops
    multiplied: what is divided where it is split."""
    logical, found = program.logical, collections.defaultdict(float)
    for eqn, trips in _equations(_jax.open_jaxpr(program.jaxpr), 1):
        if eqn.primitive.name == "dot_general":
            (left, _), _ = eqn.params["dimension_numbers"]
            summed = [shape_of(eqn.invars[0])[d] for d in left]
        elif eqn.primitive.name == "conv_general_dilated":
            kernel, out = shape_of(eqn.invars[1]), eqn.params["dimension_numbers"].rhs_spec[0]
            summed = [n for d, n in enumerate(kernel) if d != out]
        else:
            continue
        flops = 2.0 * trips * math.prod(shape_of(eqn.outvars[0])) * math.prod(summed)
        values = [v for v in (*eqn.invars[:2], eqn.outvars[0]) if is_var(v)]
        for axis in {logical.major(v, d) for v in values for d in range(len(shape_of(v)))} - {None}:
            found[axis] += flops
    return dict(found)


def _contracted(eqn: Any, logical: Any) -> set[int]:
    name = eqn.primitive.name
    if name == "dot_general":
        (left, _), _ = eqn.params["dimension_numbers"]
        pairs = [(eqn.invars[0], d) for d in left]
    elif name == "conv_general_dilated":
        pairs = [(eqn.invars[0], eqn.params["dimension_numbers"].lhs_spec[1])]
    elif name == "gather":
        pairs = [(eqn.invars[0], d) for d in eqn.params["dimension_numbers"].collapsed_slice_dims]
    else:
        return set()
    return {a for v, d in pairs if is_var(v) and (a := logical.major(v, d)) is not None}


def _equations(jaxpr: Any, trips: int) -> Iterator[tuple[Any, int]]:
    for eqn in jaxpr.eqns:
        yield eqn, trips
        inner = trips * eqn.params["length"] if eqn.primitive.name == "scan" else trips
        for body in bodies(eqn):
            yield from _equations(_jax.open_jaxpr(body), inner)


def tensor_axes(program: Program, ways: int) -> SplitAxes:
    """The logical axes that tensor parallelism splits in `ways` parts. Raises PlanError, with the reasons, where none
    is."""
    weights, inputs, cost = weight_axes(program), batch_input_axes(program), contraction_bytes(program)
    experts, flops, counted = expert_axes(program), flops_along(program), multiplied(program)
    reasons: dict[int, str] = {}
    gain: dict[int, tuple[float, float]] = {}
    saved: dict[int, float] = {}  # bytes that could be sent in the time that is saved, less what is sent
    for axis, members in weights.items():
        size = program.logical.axes[axis].size
        if axis in inputs:
            reasons[axis] = "it is an axis of the batch's arguments"
        elif axis in experts:
            reasons[axis] = "it selects a weight (experts, groups): see the preset ep"
        elif size % ways:
            reasons[axis] = f"its size {size} does not divide into {ways} equal parts"
        else:
            held = sum(program.arguments[i].nbytes for i in members & counted)
            gain[axis] = (held, -cost.get(axis, 0.0))
            saved[axis] = flops.get(axis, 0.0) / FLOPS_FOR_A_BYTE - 2.0 * cost.get(axis, 0.0)
    clashes = {a: frozenset(o for o in gain if o != a and weights[o] & weights[a]) for a in gain}
    # What pays, and then what holds the most weight for the least sent: all there is where matmuls are small. Where
    # some pay, what holds next to nothing stays whole.
    paying = {a: (s, gain[a][0]) for a, s in saved.items() if s > 0}
    chosen = _best_independent(paying, {a: clashes[a] & paying.keys() for a in paying})
    least = LITTLE * sum(program.arguments[i].nbytes for i in program.parameters) if chosen else 0.0
    rest = {a: g for a, g in gain.items() if a not in chosen and g[0] >= least and not clashes[a] & chosen}
    chosen |= _best_independent(rest, {a: clashes[a] & rest.keys() for a in rest})
    for axis in set(gain) - chosen:
        clash = next(iter(sorted(clashes[axis] & chosen)), None)
        if clash is None and gain[axis][0]:
            reasons[axis] = "it has next to none of the weights, and split it would send more than it saves"
        elif clash is None:
            reasons[axis] = "no matmul multiplies a weight that has it: split, it would add traffic and save nothing"
        else:
            reasons[axis] = f"a weight has it together with {program.logical.names[clash]!r}, which is better split"
    if not chosen:
        listed = "; ".join(f"{program.logical.names[a]}: {r}" for a, r in reasons.items())
        listed = listed or "no weight with two dimensions was found"
        raise PlanError(f"no logical axis of the weights can be split in {ways}: {listed}")
    return SplitAxes(tuple(sorted(chosen)), reasons)


def _best_independent(gain: Mapping[int, tuple[float, float]], clashes: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The set without clashes whose first gains add up to the most, and of these the one whose second do. Exact:
    components are solved apart and remembered, and a component is halved at the axis with the most clashes (the
    residual stream), after which one layer no longer knows of the next."""

    @functools.cache
    def best(vertices: frozenset[int]) -> tuple[float, float, frozenset[int]]:
        if not vertices:
            return 0.0, 0.0, frozenset()
        parts = _components(vertices, clashes)
        if len(parts) > 1:
            found = [best(p) for p in parts]
            return sum(f[0] for f in found), sum(f[1] for f in found), frozenset().union(*(f[2] for f in found))
        v = max(sorted(vertices), key=lambda a: len(clashes[a] & vertices))
        without = best(vertices - {v})
        rest = best(vertices - {v} - clashes[v])
        taken = (rest[0] + gain[v][0], rest[1] + gain[v][1], rest[2] | {v})
        return max(taken, without, key=lambda x: (x[0], x[1], sorted(x[2])))

    return best(frozenset(gain))[2]


def _components(vertices: frozenset[int], clashes: Mapping[int, frozenset[int]]) -> list[frozenset[int]]:
    graph = networkx.Graph()
    graph.add_nodes_from(sorted(vertices))
    graph.add_edges_from((a, b) for a in vertices for b in clashes[a] & vertices)
    return [frozenset(c) for c in networkx.connected_components(graph)]
