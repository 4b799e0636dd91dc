"""Operations that slide, skip or pad along a dimension, and how they may be split.

XLA's partitioner, which all platforms share, gives wrong values or ends the process for many splits of these (seen in
jax 0.10.2 and 0.12.0.1, by plain shardings under plain `jit`; tests/passes/test_windows.py tries them at random):

    convolutions      input, kernel or result split over positions: one random case in fourteen is wrong
    with groups       channels of a grouped convolution split: some are wrong, some abort in a failed check
    their gradient    a grouped kernel's gradient, summed over mesh axes that leave others out, is summed over all: too
                      large by the number of replicas
    kernels' gradient an axis that splits the channels of an operand on one side and those of the result on the other,
                      where the sum is scattered too
    pooling           its gradients (`select_and_scatter_add`, or padding between elements) split over positions
    pads and slices   with padding between elements or below zero, with strides, or from a place that is data: split
                      along that dimension

So such a dimension is kept whole in operands and results; all others are free. With that, every random case that was
tried is right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from lensjax.program.edit import shape_of

_FREE = PartitionSpec.UNCONSTRAINED
Splits = tuple[list[PartitionSpec | None], PartitionSpec | None]


def safe_splits(eqn: Any, axes: Sequence[str], devices: int, kept: Sequence[Any] | None = None) -> Splits | None:
    """(a spec of each operand or None, the spec of the result) with which XLA partitions `eqn` rightly, free where any
    split is; None where the operation is not of this kind. `axes` are all mesh axes, of `devices` devices together;
    `kept`, for the gradient of a kernel, the mesh axes along each dimension of the result over which it is not
    summed."""
    name, params = eqn.primitive.name, eqn.params
    if name == "conv_general_dilated":
        return _convolution(eqn, tuple(axes), devices, kept)
    if name.startswith(("reduce_window", "select_and_")) and "window_dimensions" in params:
        slides = {d for d, n in enumerate(params["window_dimensions"]) if n != 1}
        slides |= _unlike(params.get("window_strides")) | _unlike(params.get("base_dilation"))
        rank = len(params["window_dimensions"])
        return _whole(eqn, slides, [v for v in eqn.invars if len(shape_of(v)) == rank])
    if name == "pad":
        config = params["padding_config"]
        return _whole(eqn, {d for d, (low, high, inside) in enumerate(config) if min(low, high) < 0 or inside})
    if name == "slice":
        return _whole(eqn, _unlike(params["strides"]))
    if name == "dynamic_slice":
        return _whole(eqn, _changed(params["slice_sizes"], shape_of(eqn.invars[0])))
    if name == "dynamic_update_slice":
        return _whole(eqn, _changed(shape_of(eqn.invars[1]), shape_of(eqn.invars[0])), eqn.invars[:2])
    return None


def _unlike(steps: Sequence[int] | None) -> set[int]:
    return {d for d, n in enumerate(steps or ()) if n != 1}


def _changed(mine: Sequence[int], theirs: Sequence[int]) -> set[int]:
    return {d for d, (a, b) in enumerate(zip(mine, theirs)) if a != b}


def _whole(eqn: Any, dimensions: Collection[int], operands: Sequence[Any] | None = None) -> Splits | None:
    """The dimensions whole in these operands (the first one) and in the result; None where there are no such."""
    if not dimensions:
        return None
    spec = PartitionSpec(*(None if d in dimensions else _FREE for d in range(len(shape_of(eqn.outvars[0])))))
    held = eqn.invars[:1] if operands is None else operands
    return [spec if any(v is h for h in held) else None for v in eqn.invars], spec


def _convolution(eqn: Any, axes: tuple[str, ...], devices: int, kept: Sequence[Any] | None) -> Splits:
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if eqn.params["batch_group_count"] > 1:
        # Summed over all devices or none.
        summed = axes if shape_of(eqn.invars[0])[lhs[1]] % devices == 0 else None
        return [_channels(lhs, None, summed), _channels(rhs, None, summed)], _channels(out, None, None)
    if eqn.params["feature_group_count"] > 1:
        return [_channels(lhs, _FREE, None), _channels(rhs, None, None)], _channels(out, _FREE, None)
    rows, columns = (_FREE, _FREE) if kept is None else (kept[out[0]] or None, kept[out[1]] or None)
    return [_channels(lhs, rows, _FREE), _channels(rhs, columns, _FREE)], _channels(out, _FREE, _FREE)


def _channels(dimensions: Sequence[int], first: Any, second: Any) -> PartitionSpec:
    """`first` and `second` on the first two dimensions that a `ConvDimensionNumbers` names, None on all windows."""
    entries: list[Any] = [None] * len(dimensions)
    entries[dimensions[0]], entries[dimensions[1]] = first, second
    return PartitionSpec(*entries)
