"""Whether a compiled step lost its batch somewhere: the arithmetic of its matmuls, against one device.

The step is compiled for one device and under a plan; matmuls and convolutions are told apart by the scope that JAX
gives them (`jvp(GPT)/block_3/up`; the compiler may name a matmul after the transpose it took in, so the last part is
left out), and those of each scope that touch the batch must do no more on a device than their share. A batch that was
gathered, or that a weight's sharding pushed out, shows as too much arithmetic, whatever the shapes were merged into.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import jax

from lensjax import _jax
from lensjax.passes.emit import emit, lower
from lensjax.passes.shardings import batch_axes, ways
from lensjax.plan.plan import Plan
from lensjax.program.edit import bodies
from lensjax.program.flow import touches
from lensjax.program.program import Program
from lensjax.search.presets import preset
from lensjax.verify.hlo.parse import parse_hlo
from lensjax.verify.hlo.walk import runs
from lensjax.verify.work import arithmetic

_MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


def on_one_device(program: Program) -> str:
    """HLO of the step compiled for one device."""
    plan = preset("dp", program, 1)
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return lower(emit(program, plan, mesh), donate=False).compile().as_text()


def flops_by_name(text: str) -> dict[str, float]:
    """{scope: FLOP of its matmuls on one device per step}."""
    module = parse_hlo(text)
    times = runs(module).times
    out: dict[str, float] = collections.defaultdict(float)
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode in ("dot", "convolution", "custom-call"):
                cost = arithmetic(module, computation, instruction).flops
                out[_name(instruction.op_name)] += cost * times[computation.name]
    return {name: cost for name, cost in out.items() if cost}


def _name(op_name: str) -> str:
    inside = op_name.partition("/")[2] if op_name.startswith("jit(") else op_name
    return inside.rpartition("/")[0]


def lost(program: Program, plan: Plan, one: str, many: str) -> list[str]:
    """The scopes with a batch that do more than their share, as text: "scope: 4.0 of 1 share"."""
    parts = ways(plan, batch_axes(plan))
    without = _without_batch(program)
    whole, mine = flops_by_name(one), flops_by_name(many)
    found = []
    for name, cost in mine.items():
        batchless = not name or any(w.fullmatch(name) for w in without)
        if name in whole and not batchless and cost > 1.01 * whole[name] / parts:
            found.append(f"{name}: {cost * parts / whole[name]:.1f} of 1 share")
    # Where the compiler breaks a matmul up, the parts may have no scope: they count in the sum of all.
    total, share = sum(mine.values()), sum(whole.values()) / parts
    if mine.get("") and not without and total > 1.01 * share:
        found.append(f"matmuls without a scope, all matmuls together: {total / share:.1f} of 1 share")
    return found


def _without_batch(program: Program) -> list[re.Pattern]:
    """What the scopes look like whose matmuls no batch dimension touches (products of weights)."""
    ends: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}

    def collect(jaxpr: Any, outer: tuple[str, ...]) -> None:
        for eqn in _jax.open_jaxpr(jaxpr).eqns:
            stack = (*outer, str(eqn.source_info.name_stack))
            if eqn.primitive.name in _MATMULS:
                ends[touches(eqn, lambda v: v in program.batch.dims)].add(stack)
            for body in bodies(eqn):
                collect(body, stack)

    collect(program.jaxpr, ())
    # XLA's names put what the equation is between its scope and the scopes of its body.
    inside = r"(/|\b)(while|cond|checkpoint|rematted_computation)\b.*"
    return [re.compile(".*" + inside.join(map(re.escape, stack))) for stack in ends[False] - ends[True] if any(stack)]


def collectives(text: str) -> dict[str, int]:
    """{operation: how many stand in the compiled step}."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    found: Any = collections.Counter()
    for computation in parse_hlo(text).computations.values():
        for instruction in computation.instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind in kinds:
                found[kind] += 1
    return dict(found)
