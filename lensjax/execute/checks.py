"""What can be wrong with a call, said in the user's own names, before anything is computed or given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from lensjax import _jax
from lensjax._errors import StateError
from lensjax.program.edit import all_equations
from lensjax.program.opaque import opaque
from lensjax.program.program import Program
from lensjax.program.trace import Call, abstract, same, unfixed


def check_alive(paths: Sequence[str], leaves: Sequence[Any], program: Program | None) -> None:
    """Raises StateError when a buffer was given up by an earlier call, or is a shape only. `program`: the planned one,
    which knows what is batch."""
    if shapes := [path for path, x in zip(paths, leaves) if isinstance(x, jax.ShapeDtypeStruct)]:
        raise StateError(
            f"{shapes[0]} is a ShapeDtypeStruct: there is nothing to compute with",
            hint="call with arrays; to plan for shapes only: step.plan_for(...)",
        )
    dead = [path for path, x in zip(paths, leaves) if isinstance(x, jax.Array) and x.is_deleted()]
    if dead:
        named = f"{dead[0]} and {len(dead) - 1} more" if len(dead) > 1 else dead[0]
        were, are = ("were", "are") if len(dead) > 1 else ("was", "is")
        batch = {a.path for a in program.arguments if a.role == "batch"} if program is not None else ()
        if all(path in batch for path in dead):
            raise StateError(
                f"{named} {are} gone: batch that {were} deleted, or donated to another function",
                hint="bring a batch whose arrays are still there; this step gives up its state only",
                code="donated",
            )
        raise StateError(
            f"{named} {were} donated to an earlier call and {are} gone",
            hint="go on with the state that the call returned (state, metrics = step(state, batch)), or use "
            "parallelize(donate=False) to keep the old one",
            code="donated",
        )


def traced(leaves: Sequence[Any]) -> bool:
    """Whether the step is called inside another program that JAX is tracing."""
    return any(isinstance(x, Tracer) for x in leaves)


def check_state(old: Program, call: Call) -> None:
    """Raises StateError when a call brings a state of another structure or other shapes than the planned one.

    It looks at the arguments only: a changed state usually makes the step itself fail, in less helpful words.
    """
    before = {a.path: a for a in old.arguments if a.role != "constant"}
    after = {p: abstract(x) for p, x in zip(call.paths, call.leaves)}
    gone, come = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    if gone or come:
        fixed = {p: unfixed(x) for p, x in call.statics}
        other = f"a {type(fixed[gone[0]]).__name__}, no array" if gone and gone[0] in fixed else "missing"
        lost = f"{gone[0]} is {other}" if gone else ""
        found = f"{come[0]} is new" if come else ""
        raise StateError(
            f"the arguments changed their structure between calls: {' and '.join(x for x in (lost, found) if x)}"
            f" ({len(gone)} leaves fewer, {len(come)} more)",
            hint="a step and its plan belong to one structure: decorate the function again for another one",
        )
    for path, a in before.items():
        b = after[path]
        if a.role != "batch" and (a.shape, a.dtype) != (b.shape, b.dtype):
            raise StateError(
                f"the state changed between calls: {path} was {a.dtype}{list(a.shape)} and is {b.dtype}{list(b.shape)}",
                hint="a step and its plan belong to one set of shapes: decorate the function again for another one",
            )


# A step is traced twice and rewritten equation by equation: above this it takes minutes where a loop takes seconds.
MANY_EQUATIONS = 20_000


def advice(program: Program) -> list[str]:
    """What a user should know about a program before it is planned."""
    notes = []
    count = sum(1 for _ in all_equations(program.jaxpr))
    if count > MANY_EQUATIONS:
        notes.append(
            f"the step has {count} equations: tracing, planning and compiling grow with them. Put the repeated layers "
            "in a loop (jax.lax.scan, nn.scan, nnx.scan)"
        )
    if program.batch.doubt:
        notes.append(program.batch.doubt)
    for kernel in opaque(program.jaxpr):
        notes.append(
            f"{kernel} has no rule that says how it splits: every device computes it whole "
            "(lensjax.sharding_rule attaches one)"
        )
    return notes


def another(old: Program, new: Program, numerics: bool = False) -> str:
    """In what a call differs from the one that was compiled: the first thing that makes it another signature.

    `numerics`: whether JAX's settings changed in between.
    """
    if numerics:
        x64, prng = _jax.settings()
        return f"another signature: JAX's settings changed (now x64 {'on' if x64 else 'off'}, PRNG {prng})"
    if old.batch.size != new.batch.size:
        return f"another signature: the batch is {new.batch.size}"
    before = dict(zip(old.call.paths, map(abstract, old.call.leaves)))
    for path, leaf in zip(new.call.paths, map(abstract, new.call.leaves)):
        if path in before and before[path] != leaf:
            return f"another signature: {path} is {leaf.dtype}{list(leaf.shape)}{' (weak)' * leaf.weak_type}"
    statics = dict(old.call.statics)
    for path, value in new.call.statics:
        if path not in statics or not same(statics[path], value):
            return f"another signature: {path} is {unfixed(value)!r}"
    return "another signature: the arguments have other static attributes"
