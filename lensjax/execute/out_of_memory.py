"""Out of memory: what the plan holds, by name, and the next plan that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from lensjax._errors import LensjaxError, OutOfMemory
from lensjax._units import size
from lensjax.cost.levels import groups
from lensjax.passes.emit import Emitted
from lensjax.search.choose import largest_leaves
from lensjax.search.levels import levels
from lensjax.topology.cluster import Cluster

# The next plan is asked to hold this much of what the failed one was planned to hold.
LESS = 0.85
_BUFFERS = 6


def ran_out(failure: BaseException) -> bool:
    """Whether XLA could not get the memory that a program needs."""
    return isinstance(failure, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(failure)


def told(emitted: Emitted, cluster: Cluster, failure: BaseException, leaves: Sequence[Any]) -> OutOfMemory:
    """The error for a step that ran out of memory. `leaves`: what it was called with."""
    plan, predicted = emitted.plan, emitted.plan.predicted
    lines = [f"the step ran out of memory under the plan {plan.name!r}: {str(failure).splitlines()[0]}"]
    if predicted is not None:
        parts = sorted(((k, v) for k, v in predicted.memory.items() if k != "host"), key=lambda kv: -kv[1])
        held = ", ".join(f"{k} {size(v)}" for k, v in parts if v > 0)
        lines.append(f"  planned: peak {size(predicted.peak_bytes)} per device ({held})")
    lines.append("  the largest buffers per device:")
    lines += [f"    {name}: {size(held)}" for name, held in _largest(emitted, cluster)]
    gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)
    lines.append(
        "  the state had been given up to the step and is lost: restore it from a checkpoint"
        if gone
        else "  the state is as it was: a step with another plan can go on with it"
    )
    return OutOfMemory("\n".join(lines), hint=_next(emitted, cluster))


def _largest(emitted: Emitted, cluster: Cluster) -> list[tuple[str, float]]:
    """(name, bytes per device) of state tensors and of what layers keep for their backward."""
    found = largest_leaves(emitted.program, emitted.plan, _BUFFERS)
    if not emitted.plan.layers:
        for g in groups(emitted.program, emitted.plan, cluster):
            kept = g.options[0].kept * g.count
            found.append((f"activations of {g.count} x {g.name}" if g.count > 1 else f"activations of {g.name}", kept))
    return sorted(found, key=lambda x: -x[1])[:_BUFFERS]


def _next(emitted: Emitted, cluster: Cluster) -> str:
    plan = emitted.plan
    advice = "use more devices, or a smaller batch or sequence"
    if plan.predicted is None:
        return advice
    try:
        made = levels(emitted.program, plan.replace(layers={}), cluster, LESS * plan.predicted.peak_bytes)
    except LensjaxError:
        return advice
    if made is None or made.predicted is None or dict(made.layers) == dict(plan.layers):
        return f"recomputing layers is not enough: {advice}"
    slower = made.predicted.step_s / plan.predicted.step_s - 1
    return (
        f"the next plan that fits: plan=step.plan.replace(layers={dict(made.layers)}), "
        f"planned peak {size(made.predicted.peak_bytes)}, {slower:+.1%} time"
    )
