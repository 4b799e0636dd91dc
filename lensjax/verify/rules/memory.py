"""Memory: too near its end, recompute that the compiler undid, copies that the partitioner could not avoid."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from lensjax import _jax
from lensjax.program.edit import bodies
from lensjax.verify.finding import Case, Finding, size
from lensjax.verify.work import arithmetic

_NEAR = 0.92  # of the device's memory: the allocator's own overhead and fragmentation take the rest
_MERGED = 0.2  # of what checkpoints ask for that may be missing: XLA rightly drops what nothing reads
RECOMPUTED = "rematted_computation"  # JAX's name for what jax.checkpoint runs again


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
    """`jax.checkpoint` asks for matmuls to be run again, and the compiled step does not run them.

    Common-subexpression elimination merges the second run with the first where nothing forbids it. The compiled matmuls
    are then fewer than the program's; names alone do not tell, since XLA merges matmuls and keeps one name.
    """
    if case.facts is None or case.facts.program is None or case.artifact.backend == "cpu":
        return  # XLA:CPU undoes all of them, which says nothing about a GPU
    everything, again, line = matmul_flops(case.facts.program.jaxpr)
    if not again:
        return
    done = named = 0.0
    for computation in case.module.computations.values():
        times = case.found.runs.times[computation.name]
        for instruction in computation.instructions if times else ():
            if instruction.opcode != "fusion":
                flops = times * arithmetic(case.module, computation, instruction).flops
                done += flops
                named += flops if RECOMPUTED in instruction.op_name else 0.0
    devices = max(case.module.devices, 1)
    missing = everything / devices - done
    if missing > _MERGED * again / devices and named < again / devices:
        yield Finding(
            "remat_undone", "warning", line, 0.0,
            f"jax.checkpoint asks for {again / devices:.3g} FLOP to be run again on each device, {missing:.3g} of them "
            "are not in the compiled step: the compiler merged them with the first run and keeps the activations",
            "use prevent_cse=True (the default) outside of scan, or scan over the layers",
        )  # fmt: skip


def matmul_flops(jaxpr: Any) -> tuple[float, float, str]:
    """(FLOP of a step's matmuls, of those that checkpoints run again, the line of the first such), over all devices."""
    total, again, line = 0.0, 0.0, ""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for body in bodies(eqn):
            inner, recomputed, at = matmul_flops(body)
            total, again, line = total + times * inner, again + times * recomputed, line or at
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            flops = 2.0 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += flops
            if RECOMPUTED in str(eqn.source_info.name_stack):
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
        yield Finding(
            "involuntary_remat", "warning", place, _shape_bytes(shape.group(1) if shape else ""),
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
