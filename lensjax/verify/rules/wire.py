"""Collectives that send wider types than they need to, or the whole where a share would do."""

from __future__ import annotations

from collections.abc import Iterator

from lensjax.verify.collectives import Collective
from lensjax.verify.finding import SMALL, Case, Finding, size
from lensjax.verify.hlo import Computation, Frame, Instruction, Module
from lensjax.verify.hlo.shapes import BITS
from lensjax.verify.lines import where
from lensjax.verify.traffic import step_bytes

# They move or rename values and keep them.
PASSING = frozenset("bitcast copy reshape transpose get-tuple-element opt-barrier optimization-barrier slice".split())
_UNPACKING = ("bitcast", "get-tuple-element", "reshape", "slice")
_FLOATS = ("bf16", "f16", "f8e4m3fn", "f8e5m2")
_REACH = 8


def wide_wire(case: Case) -> Iterator[Finding]:
    """A value is sent in a wide type though it was narrow just before, or is narrow right after.

    Not on the CPU backend, whose compiler widens bf16 itself.
    """
    if case.artifact.backend == "cpu":
        return
    worst: dict[str, tuple[float, Collective, str, str, str]] = {}
    saved: dict[str, float] = {}
    for c in case.found.collectives:
        wide = max(c.operands, key=lambda s: s.bytes, default=None)
        if wide is None or BITS[wide.dtype] < 16:
            continue
        computation = case.module.computations[c.computation]
        narrow, kind, stack = narrower(case.module, computation, computation.by_name[c.name], wide.dtype)
        if not narrow:
            continue
        gain = step_bytes(c) * (1 - BITS[narrow] / BITS[wide.dtype]) * wide.bytes / max(c.payload, 1)
        kind = "moved" if kind == "narrowed" and _was_narrow(case, c, narrow) else kind
        saved[kind] = saved.get(kind, 0.0) + gain
        if kind not in worst or gain > worst[kind][0]:
            worst[kind] = (gain, c, wide.dtype, narrow, where(stack or c.stack))
    for kind, (_, c, wide, narrow, line) in worst.items():
        if saved[kind] < SMALL * max(case.total_sent, 1.0):
            continue
        why, hint = _WHY[kind]
        yield Finding(
            "widened_wire" if kind == "widened" else "wide_wire", "note" if kind == "moved" else "warning",
            line, saved[kind],
            f"{c.kind} sends {wide} where {narrow} is meant: {why}; {size(saved[kind])} per step on each device could "
            "stay",
            hint.format(narrow),
        )  # fmt: skip


_WHY = {
    "widened": (
        "the value was widened just before",
        "send {}: for a sum in few bits, exchange codes (all-to-all, all-gather) instead of reducing",
    ),
    "narrowed": ("every reader narrows what arrives", "send {}: convert before the value is gathered or reduced"),
    "moved": (
        "the program converts first, and the compiler moved the conversion behind the gather",
        "jax.lax.optimization_barrier after the conversion to {} keeps it in front",
    ),
}


def _was_narrow(case: Case, c: Collective, narrow: str) -> bool:
    """True when the partitioner's program sends the narrow type at that line: then the compiler widened it."""
    if case.facts is None:
        return False
    line = where(c.stack).split(" in ")[0]
    return any(p.source == line and p.dtype == narrow for p in case.facts.parts.collectives if p.op == "all_gather")


def narrower(
    module: Module, computation: Computation, start: Instruction, dtype: str
) -> tuple[str, str, tuple[Frame, ...]]:
    """(narrow type, "widened" or "narrowed", the Python frames of the conversion) of a collective whose value is narrow
    before or after; ("", "", ()) else. Frames only of a conversion after it, which is what to move."""
    wide = [o for o in computation.operands(start) if any(s.dtype == dtype for s in o.shapes)]
    before = {_narrow_source(module, ((computation, o),), dtype, _REACH) for o in wide}
    if len(before) == 1 and (found := before.pop()):
        return found, "widened", ()
    converts: list[Instruction] = []
    after = _narrow_readers(module, computation, start, dtype, converts)
    stacks = (module.stack(i) for i in converts)
    return (after, "narrowed", next((s for s in stacks if s), ())) if after else ("", "", ())


_Place = tuple[tuple[Computation, Instruction], ...]
"""An instruction inside fusions: (computation, instruction) from the outermost fusion down to itself."""


def _narrow_source(module: Module, place: _Place, dtype: str, reach: int) -> str:
    """The narrower type that a value had before a bare conversion, looking into fusions; "" where there is none."""
    computation, at = place[-1]
    if reach == 0 or not at.shapes:
        return ""
    if at.opcode == "fusion":
        inside = next((module.computations[c] for c in at.called if c in module.computations), None)
        if inside is None or inside.root is None:
            return ""
        return _narrow_source(module, (*place, (inside, inside.root)), dtype, reach)
    if at.opcode == "parameter":
        number = int(at.literal) if at.literal.strip().isdigit() else -1
        if len(place) < 2 or not 0 <= number < len(place[-2][1].operands):
            return ""
        outer, fusion = place[-2]
        source = outer.by_name.get(fusion.operands[number])
        return _narrow_source(module, (*place[:-2], (outer, source)), dtype, reach - 1) if source is not None else ""
    operands = list(computation.operands(at))
    if at.opcode == "convert" and operands and operands[0].shapes:
        narrow = operands[0].shapes[0].dtype
        return narrow if 0 < BITS[narrow] < BITS[dtype] and narrow != "pred" else ""
    if at.opcode not in (*PASSING, "concatenate") or not operands:
        return ""
    below = {_narrow_source(module, (*place[:-1], (computation, o)), dtype, reach - 1) for o in operands}
    return below.pop() if len(below) == 1 else ""


def _narrow_readers(
    module: Module, computation: Computation, start: Instruction, dtype: str, converts: list[Instruction]
) -> str:
    """The narrower float type to which every reader converts what a collective returns first thing; "" else. The
    conversions are put into `converts`."""
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
                converts.append(user)
            elif user.opcode == "fusion":
                narrow |= _converted_inside(module, user, at.name, converts)
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


def _converted_inside(module: Module, fusion: Instruction, name: str, converts: list[Instruction]) -> set[str]:
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
                converts.append(user)
            elif user.opcode in PASSING:
                todo.append(user)
            else:
                return {""}
    return found


def sliced_after(case: Case) -> Iterator[Finding]:
    """A sum or a gathered value brought whole to every device, which then reads only its own slice of it."""
    if case.artifact.backend == "cpu":
        return  # XLA:CPU has no reduce-scatter
    for kind in ("all-reduce", "all-gather"):
        total, worst, most = 0.0, None, 0.0
        for c in case.found.collectives:
            computation = case.module.computations[c.computation]
            large = step_bytes(c) > SMALL / 4 * case.total_sent
            if c.kind != kind or not large or c.computation in case.found.runs.fused:
                continue
            part = _sliced_part(case.module, computation, computation.by_name[c.name], c.members)
            waste = step_bytes(c) * part * (0.5 if kind == "all-reduce" else 1.0)
            total += waste
            if waste > most:
                worst, most = c, waste
        if worst is not None and total > SMALL * case.total_sent:
            yield _sliced(worst, total)


def _sliced(worst: Collective, total: float) -> Finding:
    if worst.kind == "all-reduce":
        return Finding(
            "reduce_then_slice", "warning", where(worst.stack), total,
            f"an all-reduce brings the whole sum to every device, which then keeps 1/{worst.members} of it: "
            f"{size(total)} per step on each device more than a reduce-scatter sends",
            "constrain the gradient to its parameter's sharding where it is made; a weight constrained to replicated "
            "constrains its gradient too",
        )  # fmt: skip
    return Finding(
        "gather_then_slice", "warning", where(worst.stack), total,
        f"a value is gathered whole and then only reduced, or sliced again: {size(total)} per step on each device for "
        "nothing",
        "leave it split: norms and element-wise updates work on shards (a constraint to P() makes the value whole)",
    )  # fmt: skip


def _sliced_part(module: Module, computation: Computation, start: Instruction, members: int) -> float:
    """Part of a collective's result of which every reader takes at most its own share (1 for all of it)."""
    done = next((u for u in computation.users.get(start.name, ()) if u.opcode.endswith("-done")), start)
    parts = [u for u in computation.users.get(done.name, ()) if u.opcode == "get-tuple-element"]
    pieces = parts if done.is_tuple and parts else [done]
    whole = sum(p.bytes for p in pieces) or 1
    return sum(p.bytes for p in pieces if _read_in_slices(module, computation, p, members)) / whole


def _read_in_slices(module: Module, computation: Computation, start: Instruction, members: int) -> bool:
    """True when all large readers of a result read at most their share of it."""
    todo, seen, sliced = [start], {start.name}, False
    while todo:
        at = todo.pop()
        for user in computation.users.get(at.name, ()):
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.opcode in (*_UNPACKING, "copy") or user.opcode.endswith("-done"):
                todo.append(user)
            elif user.opcode == "dynamic-slice":
                sliced = sliced or user.bytes * members <= at.bytes * 1.01
            elif user.opcode == "fusion" and _unpacks(module, user):
                todo.append(user)  # one of several values that were reduced as one
            elif user.opcode == "fusion" and _slices(module, user, at, members):
                sliced = True
            elif user.opcode == "fusion" and _only_reduces(user, at):
                continue  # a norm of the whole sum
            else:
                return False
    return sliced


def _unpacks(module: Module, fusion: Instruction) -> bool:
    inside = [i for c in fusion.called if c in module.computations for i in module.computations[c].instructions]
    return bool(inside) and all(i.opcode in (*_UNPACKING, "parameter") for i in inside)


def _slices(module: Module, fusion: Instruction, operand: Instruction, members: int) -> bool:
    """True when a fusion reads an operand only through slices at a place that depends on the device."""
    inside = next((module.computations[c] for c in fusion.called if c in module.computations), None)
    if inside is None:
        return False
    numbers = {str(i) for i, o in enumerate(fusion.operands) if o == operand.name}
    todo = [p for p in inside.instructions if p.opcode == "parameter" and p.literal.strip() in numbers]
    found = False
    while todo:
        at = todo.pop()
        if at.root:
            return False  # the fusion returns it whole
        for user in inside.users.get(at.name, ()):
            if user.opcode in ("bitcast", "reshape", "convert"):
                todo.append(user)
            elif user.opcode == "dynamic-slice" and user.bytes * members <= at.bytes * 1.01:
                found = True
            else:
                return False
    return found


def _only_reduces(fusion: Instruction, operand: Instruction) -> bool:
    return fusion.bytes * 16 < operand.bytes
