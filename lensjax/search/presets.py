"""Presets: plans made by a recipe.

    dp       every device has the whole state and a part of the batch
    zero1    as dp, with the optimizer state split
    fsdp     parameters, gradients and optimizer state split; weights gathered where they are used
    hsdp     fsdp inside a group of devices, whole copies across (the rest goes to dp)
    tp       weights and the activations between them split along logical axes (see `tensor`)
    tp_sp    as tp, with the activations outside the split matmuls divided along the sequence
    ep       experts divided over the devices that also divide the batch

Products nest: in `dp=2,fsdp=4` each of two groups splits the state four ways. The recipes are those of ZeRO
(Rajbhandari et al. 2020): stage 1 is zero1, stage 3 is fsdp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.plan.grammar import Term, parse
from lensjax.plan.pins import Pin, apply_pin, check_used, find
from lensjax.plan.plan import Axis, MeshPlan, Plan, Rules, Spec
from lensjax.program.program import Argument, Program
from lensjax.search.tensor import batch_input_axes, expert_axes, tensor_axes

# Below this many elements a leaf stays whole: a collective's launch costs more than the memory is worth.
MIN_ELEMENTS = 1024

_DATA = ("dp", "zero1", "fsdp", "hsdp", "ep")  # their mesh axes split the batch
_AXIS = {"hsdp": "fsdp", "tp_sp": "tp"}


def preset(
    text: str,
    program: Program,
    devices: int,
    *,
    pins: Sequence[Pin] = (),
    tier_of: Mapping[int, str] | None = None,
) -> Plan:
    """The plan of a preset string for a program on a number of devices, pins applied.

    `tier_of`: {number of devices: name of the smallest tier that holds them}, for the axes' tiers. Raises PlanError.
    """
    terms = parse(text, devices)
    return build(terms, program, name=text, pins=pins, tier_of=tier_of)


def build(
    terms: Sequence[Term],
    program: Program,
    *,
    name: str,
    pins: Sequence[Pin] = (),
    tier_of: Mapping[int, str] | None = None,
) -> Plan:
    terms = tuple(t for t in terms if t.size > 1) or terms[:1]
    names = [_AXIS.get(t.name, t.name) for t in terms]
    if len(set(names)) < len(names):
        both = [t.name for t, n in zip(terms, names) if names.count(n) > 1]
        raise PlanError(f"{' and '.join(both)} in {name!r} are two names of one way to split", hint="give one of them")
    mesh = MeshPlan(tuple(Axis(n, t.size, tier) for n, t, tier in zip(names, terms, _tiers(terms, tier_of or {}))))
    sizes = mesh.shape
    model = _model_rules(program, terms)
    logical = program.logical if model else None
    invars = _jax.open_jaxpr(program.jaxpr).invars
    leaves = {}
    stored = [n for n in ("fsdp", "zero1") if n in sizes]
    for i, a in enumerate(program.arguments):
        if a.role not in ("parameter", "optimizer", "constant"):
            continue
        like = i if a.follows is None else a.follows
        stacked = _is_stacked(program, like)
        spec: Spec = ((),) * len(a.shape)
        if logical is not None:
            spec = model_spec(model, [logical.major(invars[like], d) for d in range(len(a.shape))], a.shape, sizes)
        own = ("fsdp", "zero1") if a.role == "optimizer" else ("fsdp",)
        spec = split(a.shape, spec, [n for n in own if n in sizes], sizes, stacked, stored)
        if any(spec):
            leaves[a.path] = spec
    leaves = pinned(program, pins, leaves, sizes)
    gather = {t.name: t.gather for t in terms if t.gather}
    return Plan(
        mesh=mesh,
        name=name,
        rules=_rules(program, terms, names, model),
        leaves=leaves,
        gather={"*": next(iter(gather.values()))} if gather else {},
    )


def _model_rules(program: Program, terms: Sequence[Term]) -> dict[int, str]:
    """{logical axis: mesh axis} of tensor and expert parallelism. Raises PlanError where a preset cannot apply."""
    rules: dict[int, str] = {}
    for t in terms:
        if t.name == "ep" and t.size > 1:
            rules |= dict.fromkeys(_experts(program, t.size), "ep")
        elif t.name in ("tp", "tp_sp") and t.size > 1:
            rules |= {axis: "tp" for axis in tensor_axes(program, t.size).axes if axis not in rules}
    return rules


def _experts(program: Program, ways: int) -> list[int]:
    experts = sorted(expert_axes(program))
    sizes = program.logical.axes
    fitting = [a for a in experts if sizes[a].size % ways == 0]
    if not fitting:
        why = (
            "the step has no experts: no matmul selects a weight by an axis"
            if not experts
            else f"{', '.join(str(sizes[a].size) for a in experts)} experts do not divide into {ways} equal parts"
        )
        raise PlanError(f"expert parallelism (ep={ways}) cannot apply: {why}")
    return fitting


def model_spec(
    model: Mapping[int, str], majors: Sequence[int | None], shape: Sequence[int], sizes: Mapping[str, int]
) -> Spec:
    """The spec by rule of a tensor with these logical axes. A mesh axis splits its first dimension that divides (a
    square weight may have one logical axis twice)."""
    spec, used = [], set()
    for major, n in zip(majors, shape):
        axis = model.get(major) if major is not None else None
        fits = axis is not None and axis not in used and n % sizes[axis] == 0
        spec.append((axis,) if axis is not None and fits else ())
        used.add(axis if fits else None)
    return tuple(spec)


def _rules(program: Program, terms: Sequence[Term], names: Sequence[str], model: Mapping[int, str]) -> Rules:
    """Activation rules in the order in which they claim mesh axes: experts and tensor axes, the batch, the sequence."""
    data = tuple(n for n, t in zip(names, terms) if t.name in _DATA and t.size > 1)
    if not model:
        return Rules(activations={"batch": data})
    logical = program.logical
    named = {logical.names[axis]: (mesh,) for axis, mesh in sorted(model.items())}
    activations = {**named, "batch": data}
    if any(t.name == "tp_sp" for t in terms):
        inputs = [a for a in sorted(batch_input_axes(program)) if logical.names[a] != "batch"]
        if not inputs:
            raise PlanError("tp_sp needs a sequence: the batch's arguments have no second axis", hint="use tp")
        activations |= {logical.names[a]: ("tp",) for a in inputs}
    return Rules(params=named, optimizer=named, grads=named, activations=activations)


def split(
    shape: Sequence[int],
    spec: Spec,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    stacked: bool,
    along: Sequence[str] | None = None,
) -> Spec:
    """`spec` with one more dimension divided over `axes`, in this order: the dimension that divides over the most of
    `along` (`axes` where not given: all that is stored of the leaf, so that its state lies on its parameters'
    dimension), of these one that nothing splits yet, of these the largest; not the layer index of a stack. Axes over
    which it does not divide are left out; a dimension that is already split may be split further. Unchanged where none
    divides or the leaf is small.

    One dimension for all of them, since XLA sums into one split dimension with a reduce-scatter, but into two with an
    all-reduce of the whole (xla/service/reduce_scatter_utils.cc), and gathers two one after the other. A dimension of
    their own, since where the sum is over more axes than are scattered, XLA scatters only into such a one: from a
    dimension that others split too it sums everything over all axes, and then slices.
    """
    if math.prod(shape) < MIN_ELEMENTS:
        return spec
    along = [a for a in (axes if along is None else along) if sizes[a] > 1]
    best, most = None, (1, False, 0)
    for d in range(1 if stacked else 0, len(shape)):
        before = math.prod(sizes[a] for a in spec[d])
        ways = math.prod(sizes[a] for a in _dividing(shape[d], before, along, sizes))
        if ways > 1 and (rank := (ways, before == 1, shape[d] // before)) > most:
            best, most = d, rank
    if best is None:
        return spec
    before = math.prod(sizes[a] for a in spec[best])
    added = tuple(a for a in _dividing(shape[best], before, along, sizes) if a in axes)
    return tuple((*own, *added) if d == best else own for d, own in enumerate(spec))


def _dividing(n: int, ways: int, axes: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Those of `axes`, in order, over which a dimension that is split `ways` times divides further."""
    found = []
    for axis in axes:
        if n % (ways * sizes[axis]) == 0:
            found.append(axis)
            ways *= sizes[axis]
    return found


def _is_stacked(program: Program, i: int) -> bool:
    return any(i in layer.parameters for layer in program.layers)


def pinned(
    program: Program, pins: Sequence[Pin], leaves: Mapping[str, Spec], sizes: Mapping[str, int]
) -> dict[str, Spec]:
    """Leaves with the user's pins; a moment follows its parameter's pin unless it has one of its own."""
    state = pinnable(program)
    check_used(pins, [a.path for a in state])
    out = dict(leaves)
    for a in sorted(state, key=lambda a: a.role != "parameter"):  # an error names the parameter before its moments
        pin = find(pins, a.path)
        if pin is None and a.follows is not None:
            pin = find(pins, program.arguments[a.follows].path)
        if pin is None:
            continue
        spec = apply_pin(pin, a.path, a.shape, out.get(a.path, ((),) * len(a.shape)), sizes)
        out.pop(a.path, None)
        if any(spec):
            out[a.path] = spec
    return out


def pinnable(program: Program) -> list[Argument]:
    """The arguments that pins are matched against: all but the batch."""
    return [a for a in program.arguments if a.role in ("parameter", "optimizer", "constant", "other")]


def _tiers(terms: Sequence[Term], tier_of: Mapping[int, str]) -> list[str]:
    """The tier of each axis: the smallest that holds the axis and every axis inside it."""
    tiers, inside = [], 1
    for t in reversed(terms):
        inside *= t.size
        fitting = [size for size in tier_of if size >= inside]
        tiers.append(tier_of[min(fitting)] if fitting else "")
    return tiers[::-1]


# From this many devices on, tensor parallelism is worth pricing unasked (below, it only makes planning longer).
TENSOR_FROM = 16


def enumerate_presets(devices: int, tier_sizes: Sequence[int]) -> list[str]:
    """The preset strings worth pricing for a cluster whose tiers hold `tier_sizes` devices (innermost first)."""
    texts = ["dp", "zero1", "fsdp:again", "fsdp:once"] if devices > 1 else ["dp"]
    for size in tier_sizes:
        if 1 < size < devices and devices % size == 0:
            texts += [f"dp={devices // size},fsdp:again={size}", f"dp={devices // size},fsdp:once={size}"]
            texts += [f"zero1={devices // size},fsdp:again={size}", f"dp={devices // size},zero1={size}"]
    inner = tier_sizes[0] if tier_sizes else devices
    if devices >= TENSOR_FROM and 1 < inner <= devices and devices % inner == 0:
        texts += [f"fsdp:again={devices // inner},{name}={inner}" for name in ("tp", "tp_sp")]
    return texts
