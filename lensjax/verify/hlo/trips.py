"""How often a loop runs: what the compiler notes on it, else what its condition compares (TPU notes nothing)."""

from __future__ import annotations

import re

from lensjax.verify.hlo.module import Computation, Instruction, Module


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Runs of a while loop that counts up from and to a constant, as `lax.scan` and `fori_loop` emit; else None."""
    if loop.trip_count is not None:
        return loop.trip_count
    condition = module.computations.get((loop.attr("condition") or "").lstrip("%"))
    body = module.computations.get((loop.attr("body") or "").lstrip("%"))
    if condition is None or body is None or condition.root is None:
        return None
    index, limit = _compared(module, condition, condition.root)
    start = _start(computation, loop, index)
    step = _step(module, body, index)
    if index is None or limit is None or not step:
        return None
    return max(0, -(-(limit - (start or 0)) // step))


def _compared(module: Module, condition: Computation, root: Instruction) -> tuple[int | None, int | None]:
    """(element of the loop's state, constant it stays below) of a condition."""
    inside, compare = condition, root
    if root.opcode == "fusion":
        inside = next((module.computations[c] for c in root.called if c in module.computations), condition)
        compare = inside.root
    if compare is None or compare.opcode != "compare" or compare.attr("direction") not in ("LT", "LE"):
        return None, None
    sides = [_outside(condition, root, inside, name) for name in compare.operands]
    if len(sides) != 2 or None in sides:
        return None, None
    index, limit = _element(sides[0]), _constant(sides[1])
    return index, None if limit is None else limit + (compare.attr("direction") == "LE")


def _outside(condition: Computation, root: Instruction, inside: Computation, name: str) -> Instruction | None:
    """An operand of the comparison, seen in the condition itself where the comparison is fused."""
    at = inside.by_name.get(name)
    if at is not None and inside is not condition and at.opcode == "parameter" and at.literal.strip().isdigit():
        number = int(at.literal)
        at = condition.by_name.get(root.operands[number]) if number < len(root.operands) else None
    return at


def _element(at: Instruction | None) -> int | None:
    index = at.attr("index") if at is not None and at.opcode == "get-tuple-element" else None
    return int(index) if index and index.isdigit() else None


def _constant(at: Instruction | None) -> int | None:
    if at is None or at.opcode != "constant" or not re.fullmatch(r"\s*-?\d+\s*", at.literal):
        return None
    return int(at.literal)


def _start(computation: Computation, loop: Instruction, index: int | None) -> int | None:
    state = computation.by_name.get(loop.operands[0]) if loop.operands else None
    if index is None or state is None or state.opcode != "tuple" or index >= len(state.operands):
        return None
    at = computation.by_name.get(state.operands[index])
    while at is not None and at.opcode in ("copy", "bitcast") and at.operands:
        at = computation.by_name.get(at.operands[0])
    return _constant(at)


def _step(module: Module, body: Computation, index: int | None) -> int | None:
    """What a body adds to an element of the loop's state."""
    root = body.root
    if index is None or root is None or root.opcode != "tuple" or index >= len(root.operands):
        return None
    at, inside = body.by_name.get(root.operands[index]), body
    if at is not None and at.opcode == "fusion":
        inside = next((module.computations[c] for c in at.called if c in module.computations), body)
        at = inside.root
    if at is None or at.opcode != "add":
        return None
    return next((n for o in inside.operands(at) if (n := _constant(o)) is not None), None)
