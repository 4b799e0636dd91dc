"""Collectives that send wider types than they need to, or the whole where a share would do."""

from __future__ import annotations

from collections.abc import Iterator

from lensjax.verify.collectives import Collective
from lensjax.verify.finding import SMALL, Case, Finding, size, step_bytes
from lensjax.verify.hlo import Computation, Instruction, Module
from lensjax.verify.hlo.shapes import BITS
from lensjax.verify.lines import where
from lensjax.verify.work import touched

# They move or rename values and keep them.
PASSING = frozenset("bitcast copy reshape transpose get-tuple-element opt-barrier optimization-barrier slice".split())
_FLOATS = ("bf16", "f16", "f8e4m3fn", "f8e5m2")
_REACH = 8


def wide_wire(case: Case) -> Iterator[Finding]:
    """A value is sent in a wide type though it was narrow just before, or is narrow right after.

    Not on the CPU backend, whose compiler widens bf16 itself.
    """
    if case.artifact.backend == "cpu":
        return
    worst: dict[str, tuple[float, Collective, str, str]] = {}
    saved: dict[str, float] = {}
    for c in case.found.collectives:
        wide = max(c.operands, key=lambda s: s.bytes, default=None)
        if wide is None or BITS[wide.dtype] < 16:
            continue
        computation = case.module.computations[c.computation]
        narrow, kind = narrower(case.module, computation, computation.by_name[c.name], wide.dtype, c.kind)
        if not narrow:
            continue
        gain = step_bytes(c) * (1 - BITS[narrow] / BITS[wide.dtype])
        saved[kind] = saved.get(kind, 0.0) + gain
        if kind not in worst or gain > worst[kind][0]:
            worst[kind] = (gain, c, wide.dtype, narrow)
    for kind, (_, c, wide, narrow) in worst.items():
        if saved[kind] < SMALL * max(case.total_sent, 1.0):
            continue
        told = (
            f"{c.kind} sends {wide} where {narrow} is meant: "
            + ("the value was widened just before" if kind == "widened" else "every reader narrows what arrives")
            + f"; {size(saved[kind])} per step on each device could stay"
        )
        yield Finding(
            "widened_wire" if kind == "widened" else "wide_wire", "warning", where(c.stack), saved[kind], told,
            f"send {narrow}: convert before the value is gathered or reduced"
            + (" (for a sum in few bits, encode and exchange codes instead of reducing)" if kind == "widened" else ""),
        )  # fmt: skip


def narrower(
    module: Module, computation: Computation, start: Instruction, dtype: str, kind: str
) -> tuple[str, str]:
    """(narrow type, "widened" or "narrowed") of a collective whose value is narrow before or after; ("", "") else."""
    before = {_narrow_source(module, computation, o, dtype) for o in computation.operands(start)}
    before.discard(None)
    if len(before) == 1 and (found := before.pop()):
        return found, "widened"
    after = _narrow_readers(module, computation, start, dtype)
    return (after, "narrowed") if after else ("", "")


def _narrow_source(module: Module, computation: Computation, at: Instruction | None, dtype: str) -> str | None:
    """The narrower type that a value had before a bare conversion; "" where there is none, None for a constant."""
    for _ in range(_REACH):
        if at is None or not at.shapes:
            return ""
        if at.opcode == "convert" or (at.opcode == "fusion" and _only_converts(module, at)):
            sources = [o.shapes[0].dtype for o in computation.operands(at) if o.shapes and o.shapes[0].dims]
            narrow = [d for d in sources if 0 < BITS[d] < BITS[dtype] and d != "pred"]
            return narrow[0] if narrow and len(sources) == 1 else ""
        if at.opcode not in PASSING:
            return ""
        at = next(computation.operands(at), None)
    return ""


def _only_converts(module: Module, fusion: Instruction) -> bool:
    """A fusion that converts and moves, and computes nothing."""
    inside = [i for c in fusion.called if c in module.computations for i in module.computations[c].instructions]
    moving = PASSING | {"parameter", "convert", "constant", "dynamic-slice", "broadcast", "concatenate", "pad", "tuple"}
    return bool(inside) and all(i.opcode in moving for i in inside) and any(i.opcode == "convert" for i in inside)


def _narrow_readers(module: Module, computation: Computation, start: Instruction, dtype: str) -> str:
    """The narrower float type to which every reader converts what a collective returns first thing; "" else."""
    todo, seen, narrow = [start], {start.name}, set()
    while todo:
        at = todo.pop()
        users = computation.users.get(at.name, ())
        if at.root or not users:
            return ""
        for user in users:
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.opcode == "convert":
                narrow.add(user.shapes[0].dtype)
            elif user.opcode == "fusion":
                narrow |= _converted_inside(module, user, at.name)
            elif user.opcode in PASSING or user.opcode.endswith("-done"):
                if _is_own(user, dtype):
                    todo.append(user)
            else:
                return ""
    kept = {n for n in narrow if n in _FLOATS and BITS[n] < BITS[dtype]}
    return kept.pop() if len(kept) == 1 and kept == narrow else ""


def _is_own(user: Instruction, dtype: str) -> bool:
    """A part of a combined collective's result may have another type; only the wide ones are followed."""
    return user.is_tuple or (bool(user.shapes) and user.shapes[0].dtype == dtype)


def _converted_inside(module: Module, fusion: Instruction, name: str) -> set[str]:
    """Types to which a fusion converts one of its operands before anything else; {""} where it uses it as it is."""
    inside = next((module.computations[c] for c in fusion.called if c in module.computations), None)
    if inside is None:
        return {""}
    found: set[str] = set()
    numbers = {str(i) for i, o in enumerate(fusion.operands) if o == name}
    todo = [p for p in inside.instructions if p.opcode == "parameter" and p.literal.strip() in numbers]
    while todo:
        at = todo.pop()
        users = inside.users.get(at.name, ())
        if not users:
            return {""}
        for user in users:
            if user.opcode == "convert":
                found.add(user.shapes[0].dtype)
            elif user.opcode in PASSING:
                todo.append(user)
            else:
                return {""}
    return found


def reduce_then_slice(case: Case) -> Iterator[Finding]:
    """An all-reduce of which every device reads only its own slice: a reduce-scatter sends half."""
    if case.artifact.backend == "cpu":
        return  # XLA:CPU has no reduce-scatter
    total, worst, most = 0.0, None, 0.0
    for c in case.found.collectives:
        if c.kind != "all-reduce" or c.payload * c.trips < SMALL * case.total_sent / 4:
            continue
        computation = case.module.computations[c.computation]
        if not _read_in_slices(case.module, computation, computation.by_name[c.name], c.members):
            continue
        total += step_bytes(c) / 2
        if step_bytes(c) > most:
            worst, most = c, step_bytes(c)
    if worst is not None and total > SMALL * case.total_sent:
        yield Finding(
            "reduce_then_slice", "warning", where(worst.stack), total,
            f"an all-reduce brings the whole sum to every device, which then keeps 1/{worst.members} of it: "
            f"{size(total)} per step on each device more than a reduce-scatter sends",
            "constrain the gradient to its parameter's sharding where it is made; a weight constrained to replicated "
            "constrains its gradient too",
        )  # fmt: skip


def _read_in_slices(module: Module, computation: Computation, start: Instruction, members: int) -> bool:
    """True when all large readers of a result read at most their share of it."""
    todo, seen, sliced = [start], {start.name}, False
    while todo:
        at = todo.pop()
        for user in computation.users.get(at.name, ()):
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.opcode in ("bitcast", "get-tuple-element", "copy", "reshape") or user.opcode.endswith("-done"):
                todo.append(user)
            elif user.opcode in ("dynamic-slice", "slice"):
                sliced = sliced or user.bytes * members <= at.bytes * 1.01
            elif user.opcode == "fusion" and _slices(module, user, at, members):
                sliced = True
            elif user.opcode == "fusion" and _only_reduces(user, at):
                continue  # a norm of the whole sum
            else:
                return False
    return sliced


def _slices(module: Module, fusion: Instruction, operand: Instruction, members: int) -> bool:
    inside = next((module.computations[c] for c in fusion.called if c in module.computations), None)
    if inside is None:
        return False
    numbers = {str(i) for i, o in enumerate(fusion.operands) if o == operand.name}
    parameters = [p for p in inside.instructions if p.opcode == "parameter" and p.literal.strip() in numbers]
    return bool(parameters) and all(touched(inside, p) * members <= p.bytes * 1.01 for p in parameters)


def _only_reduces(fusion: Instruction, operand: Instruction) -> bool:
    return fusion.bytes * 16 < operand.bytes
