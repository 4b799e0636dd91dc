"""Memory: too near its end, recompute that the compiler undid, copies that the partitioner could not avoid."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lensjax import _jax
from lensjax.program.edit import bodies
from lensjax.verify.finding import LATENT, Case, Finding, size
from lensjax.verify.hlo import Computation
from lensjax.verify.work import arithmetic

_NEAR = 0.92  # of the device's memory: the allocator's own overhead and fragmentation take the rest
# Of what checkpoints ask for, this part may be missing: XLA rightly drops what nothing reads, such as the last matmul
# of a block, whose result only the next block needs (a third of the FLOP of a gated MLP).
_MERGED = 0.4
RECOMPUTED = "rematted_computation"  # JAX's name for what jax.checkpoint runs again
_BACKWARD = "transpose("  # and for what reverse-mode differentiation adds


def near_full(case: Case) -> Iterator[Finding]:
    """The peak does not fit the device, or only just."""
    if case.cluster is None or case.artifact.backend == "cpu":
        return
    room, peak = case.cluster.device.memory, case.artifact.memory.peak
    if peak > _NEAR * room:
        over = peak > room
        yield Finding(
            "out_of_memory" if over else "near_out_of_memory", "error" if over else "warning", "", float(peak),
            f"a step needs {size(peak)} on each device, which has {size(room)}"
            + ("" if over else f": {1 - peak / room:.0%} is left for fragmentation and the runtime"),
            "split the state or the batch over more devices, or recompute more (see the largest buffers)",
        )  # fmt: skip


def remat_undone(case: Case) -> Iterator[Finding]:
    """`jax.checkpoint` asks for matmuls to be run again in the backward, and the compiled backward does not run them.

    Where nothing forbids it the compiler merges the second run with the first (equal operations are one, matmuls that
    share an operand become one call), or runs it beside the first: either way its results wait from the forward to the
    backward, as without a checkpoint. So what counts is the work that comes after the backward has begun. Names tell
    where that is; they do not tell what was merged, since a merged matmul keeps one name.
    """
    if case.facts is None or case.facts.program is None or case.artifact.backend == "cpu":
        return  # XLA:CPU undoes all of them, which says nothing about a GPU
    asked, again, line = matmul_flops(case.facts.program.jaxpr)
    if not again:
        return
    devices = max(case.module.devices, 1)
    after = list(_backward(_matmuls(case, case.module.entry, 1.0)))
    missing = asked / devices - sum(m.flops for m in after)
    named = sum(m.flops for m in after if m.kind == RECOMPUTED)
    if missing > _MERGED * again / devices and named < again / devices:
        yield Finding(
            "remat_undone", "warning", line, 0.0,
            f"jax.checkpoint asks for {again / devices:.3g} FLOP to be run again on each device, {missing:.3g} of them "
            "are not in the backward of the compiled step: the compiler merged them with the first run or runs them "
            "beside it, and keeps what they make",
            "use prevent_cse=True (the default) outside of scan, or scan over the layers",
        )  # fmt: skip


class _Matmul(NamedTuple):
    """FLOP of one step on each device (0 for what is no matmul), and what it belongs to: "forward", "backward" or
    RECOMPUTED."""

    flops: float
    kind: str


def _matmuls(case: Case, computation: Computation, times: float) -> Iterator[_Matmul]:
    """What runs, in the order of the schedule, loops in their place."""
    for instruction in computation.instructions:
        if instruction.opcode in ("while", "call", "conditional", "async-start"):
            for name in instruction.called:
                inner = case.module.computations.get(name)
                if inner is not None:
                    yield from _matmuls(case, inner, case.found.runs.times[name])
        elif instruction.op_name:
            flops = arithmetic(case.module, computation, instruction).flops
            yield _Matmul(times * flops, _kind(instruction.op_name))


def _kind(name: str) -> str:
    return RECOMPUTED if RECOMPUTED in name else "backward" if _BACKWARD in name else "forward"


def _backward(everything: Iterable[_Matmul]) -> Sequence[_Matmul]:
    """What comes after the backward has begun: after its first own matmul, or when no matmul of the forward is left."""
    run = list(everything)
    first = next((i for i, m in enumerate(run) if m.flops and m.kind == "backward"), len(run))
    last = max((i for i, m in enumerate(run) if m.flops and m.kind == "forward"), default=-1)
    return run[min(first, last + 1) :]


def matmul_flops(jaxpr: Any, outer: str = "") -> tuple[float, float, str]:
    """(FLOP of the matmuls of a step's backward, of those that checkpoints run again, the line of the first such), over
    all devices. `outer`: names of the equations around; those inside a loop or checkpoint are named from there on."""
    total, again, line = 0.0, 0.0, ""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        name = f"{outer}/{eqn.source_info.name_stack}"
        for body in bodies(eqn):
            inner, recomputed, at = matmul_flops(body, name)
            total, again, line = total + times * inner, again + times * recomputed, line or at
        kind = _kind(name)
        if eqn.primitive.name == "dot_general" and kind != "forward":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            flops = 2.0 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += flops
            if kind == RECOMPUTED:
                again, line = again + flops, line or _jax.user_line(eqn)
    return total, again, line


def involuntary(case: Case) -> Iterator[Finding]:
    """What the partitioner itself complains of: a value made whole since it could not go from one split to another."""
    seen: set[str] = set()
    for line in case.artifact.log.splitlines():
        if "nvoluntary full rematerialization" not in line:
            continue
        file = re.search(r'source_file="([^"]+)"', line)
        number = re.search(r"source_line=(\d+)", line)
        place = f"{file.group(1)}:{number.group(1)}" if file and number else _frame(case, line)
        if place in seen:
            continue
        seen.add(place)
        shape = re.search(r"= \(?(\w+\[[\d,]*\])", line)
        what = f" {shape.group(1)}" if shape else ""
        made = _shape_bytes(shape.group(1) if shape else "")
        yield Finding(
            "involuntary_remat", "note" if 0 < made < LATENT else "warning", place, made,
            f"the partitioner could not go from one split to another and makes a value{what} whole on every device",
            "pin the value to a split that the next operation can take",
        )  # fmt: skip


def _frame(case: Case, line: str) -> str:
    from lensjax.verify.lines import where

    found = re.search(r"stack_frame_id=(\d+)", line)
    return where(case.module.frames.get(int(found.group(1)), ())) if found else ""


def _shape_bytes(text: str) -> float:
    from lensjax.verify.hlo.shapes import arrays, total_bytes

    return float(total_bytes(arrays(text)))
