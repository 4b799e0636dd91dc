"""Loop invariants become captured values, as when XLA hands a program to Shardy.

JAX carries every constant of a `scan` (the stacked weights, the residuals that the backward reads) through the loop.
XLA turns what the body returns unchanged into a value used from outside, behind an open sharding constraint where the
value has a sharding of its own (xla/service/spmd/shardy, pass `xla-sdy-open-while-free-vars-sharding`). It decides what
Shardy lets win: with carried invariants, residuals of an FSDP backward lose their batch sharding to the gradient's, and
with captured ones they keep it. Neither that pass nor the canonicalizer that captures is reachable from Python.
"""

from __future__ import annotations

import math
from typing import Any

from lensjax import _jax
from lensjax.partition.inline import main_function, walk
from lensjax.partition.text import integers, tensor_type


def capture_invariants(module: Any) -> None:
    """Rewrites every `while` of `main` in place."""
    main = main_function(module)
    arguments = set(main.regions[0].blocks[0].arguments)
    with module.context:
        for op in [op for op in walk(main) if op.name == "stablehlo.while"]:
            _capture(op, arguments)


def _capture(loop: Any, arguments: set[Any]) -> None:
    ir = _jax.mlir().ir
    condition, body = (region.blocks[0] for region in loop.regions)
    returned = list(body.operations)[-1].operation
    operands, results = list(loop.operands), list(loop.results)
    kept = [i for i, value in enumerate(returned.operands) if value != body.arguments[i]]
    if len(kept) == len(operands):
        return
    for i in sorted(set(range(len(operands))) - set(kept), reverse=True):
        results[i].replace_all_uses_with(operands[i])
        outer = _opened(operands[i], loop, arguments)
        for block in (condition, body):
            block.arguments[i].replace_all_uses_with(outer)
            block.erase_argument(i)
    values = [returned.operands[i] for i in kept]
    with returned.location:
        ir.Operation.create("stablehlo.return", operands=values, ip=ir.InsertionPoint(returned))
    returned.erase()
    with loop.location:
        new = ir.Operation.create(
            "stablehlo.while",
            results=[results[i].type for i in kept],
            operands=[operands[i] for i in kept],
            regions=2,
            ip=ir.InsertionPoint(loop),
        )
    condition.append_to(new.regions[0])
    body.append_to(new.regions[1])
    for i, result in zip(kept, new.results):
        results[i].replace_all_uses_with(result)
    loop.erase()


def _opened(value: Any, loop: Any, arguments: set[Any]) -> Any:
    """The value behind an open constraint when it has, or may get, a sharding of its own."""
    m = _jax.mlir()
    fixed = value in arguments or getattr(value.owner, "name", "") == "sdy.sharding_constraint"
    if not fixed or not isinstance(value.type, m.ir.RankedTensorType):
        return value
    dims = [m.sdy.DimensionShardingAttr.get([], is_closed=False) for _ in range(value.type.rank)]
    with loop.location:
        open_constraint = m.ir.Operation.create(
            "sdy.sharding_constraint",
            results=[value.type],
            operands=[value],
            attributes={"sharding": m.sdy.TensorShardingAttr.get("mesh", dims)},
            ip=m.ir.InsertionPoint(loop),
        )
    return open_constraint.results[0]


def reshape_unit_broadcasts(module: Any) -> None:
    """Dimensions of size one that a broadcast adds or widens are reshaped, as in XLA's algebraic simplifier.

    Shardy propagates through a reshape before it propagates through a broadcast, so this too decides who wins.
    """
    with module.context:
        for op in [op for op in walk(main_function(module)) if op.name == "stablehlo.broadcast_in_dim"]:
            before, after = (tensor_type(str(v.type))[0] for v in (op.operands[0], op.results[0]))
            dims = integers(str(op.attributes["broadcast_dimensions"]))
            if not before or list(dims) != sorted(dims):
                continue
            if math.prod(before) == math.prod(after):
                op.results[0].replace_all_uses_with(_reshape(op, op.operands[0], op.results[0].type))
                op.erase()
            elif widened := [i for i, d in enumerate(dims) if before[i] == 1 < after[d]]:
                _drop(op, [i for i in range(len(dims)) if i not in widened], before, dims)


def _drop(op: Any, kept: list[int], shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    ir = _jax.mlir().ir
    element = op.operands[0].type.element_type
    with op.location:
        narrow = _reshape(op, op.operands[0], ir.RankedTensorType.get([shape[i] for i in kept], element))
    op.operands[0] = narrow
    op.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get([dims[i] for i in kept])


def _reshape(op: Any, value: Any, result: Any) -> Any:
    ir = _jax.mlir().ir
    with op.location:
        new = ir.Operation.create("stablehlo.reshape", results=[result], operands=[value], ip=ir.InsertionPoint(op))
    return new.results[0]
