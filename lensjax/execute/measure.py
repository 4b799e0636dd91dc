"""Measuring plans on the devices that are there: every plan's step in turns, so that what changes on the machine
meanwhile changes for all of them.

    visit 1: plan A (place, warm up, n steps), plan B, ...;   visit 2: plan A, plan B, ...

Only one plan's state is on the devices at a time; compiled steps are kept. Everything found is a dict handed to
`record` at once, so that a crash loses one visit at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lensjax._errors import LensjaxError
from lensjax.execute import nnx
from lensjax.execute.place import place
from lensjax.execute.planning import Options, make_plan
from lensjax.execute.step import Step
from lensjax.program.program import Program, analyze
from lensjax.program.trace import is_dynamic
from lensjax.topology.cluster import Cluster
from lensjax.verify.collectives import collectives
from lensjax.verify.hlo import parse_hlo
from lensjax.verify.prices import Priced
from lensjax.verify.traffic import traffic

WARM_UP = 2  # steps at the start of a visit that are not counted
Record = Callable[[dict[str, Any]], None]


def measure(
    fn: Callable[..., Any],
    arguments: tuple[Any, ...],
    plans: Sequence[str],
    cluster: Cluster,
    *,
    steps: int,
    visits: int,
    done: Sequence[dict[str, Any]],
    record: Record,
) -> None:
    """Measures `fn(*arguments)` (arrays or shapes) under each plan ("best": the planner's own choice), `steps` steps in
    `visits` turns. `done`: what an earlier run recorded, which is not measured again.

    Records {"event": "begin" | "plan" | "compiled" | "visit" | "failed", "plan": name, ...}; seconds and bytes.
    """
    values = materialize(arguments)
    program = analyze(fn, values)
    gone = {r["plan"] for r in done if r["event"] == "failed"}
    known = {(r["plan"], r["event"], r.get("visit", 0)) for r in done}
    ready: dict[str, Step] = {}
    each = [len(part) for part in np.array_split(np.arange(steps), visits)]
    for visit, count in enumerate(each):
        for name in plans:
            if name in gone or (name, "visit", visit) in known or not count:
                continue
            record({"event": "begin", "plan": name, "visit": visit})
            try:
                if name not in ready:
                    ready[name] = _prepare(fn, program, name, cluster, values, record)
                before = peaks()
                seconds = _visit(ready[name], values, count)
                after = peaks()
                record({
                    "event": "visit", "plan": name, "visit": visit, "seconds": seconds,
                    "peak_bytes": after if after is not None and after != before else None,
                })  # fmt: skip
            except (LensjaxError, jax.errors.JaxRuntimeError, MemoryError) as e:
                record({"event": "failed", "plan": name, **reason(e)})
                gone.add(name)
                ready.pop(name, None)


def reason(error: BaseException) -> dict[str, Any]:
    """Why a plan could not be measured, and whether memory ran out."""
    text = getattr(error, "message", "") or (str(error).strip().splitlines() or [type(error).__name__])[0]
    memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "ut of memory" in str(error)
    return {"reason": text[:500], "out_of_memory": memory}


def _prepare(fn: Any, program: Program, name: str, cluster: Cluster, values: Any, record: Record) -> Step:
    plan = make_plan(program, cluster, Options(plan=None if name == "best" else name)).plan
    predicted = plan.predicted
    assert predicted is not None
    record({
        "event": "plan", "plan": name, "chosen": plan.name, "mesh": plan.mesh.shape, "batch": program.batch.size,
        "predicted_s": predicted.step_s, "predicted_peak_bytes": predicted.peak_bytes,
        "predicted_tiers": dict(predicted.tiers),
    })  # fmt: skip
    step = Step(fn, Options(cluster=cluster, plan=plan))
    step.plan_for(*values)
    start = time.perf_counter()
    step.lower()
    traced = time.perf_counter()
    compiled = step.compiled  # kept: the visits run this one
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    peak = None
    if memory is not None:
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = held + memory.temp_size_in_bytes
    found = collectives(parse_hlo(compiled.as_text() or ""))
    priced = Priced(cluster, plan.mesh.size, plan.mesh.order)
    record({
        "event": "compiled", "plan": name, "lower_s": traced - start, "compile_s": end - traced,
        "compiled_peak_bytes": peak, "tiers": dict(traffic(found.collectives, plan.mesh.shape, priced.bytes).tiers),
    })  # fmt: skip
    return step


def _visit(step: Step, values: Any, count: int) -> list[float]:
    """Seconds of `count` steps, each waited for, from a state that is placed anew."""
    args = tuple(jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, values))
    if not _in_place(args):
        args = _on_devices(step, args)
    seconds = []
    for i in range(WARM_UP + count):
        start = time.perf_counter()
        out = step(*args)
        jax.block_until_ready((out, [_values(a) for a in args]) if _in_place(args) else out)
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - start)
        if not _in_place(args):
            args = _next(step, args, out)
    return seconds


def _in_place(args: Any) -> bool:
    return any(map(nnx.is_module, nnx.leaves(args)))


def _values(arg: Any) -> Any:
    return nnx.take(arg).tree if _in_place(arg) else None


def _on_devices(step: Step, args: Any) -> Any:
    """The arguments where the step takes them from: JAX compiles again for arrays that come from elsewhere."""
    flat, tree = jax.tree.flatten(args)
    dynamic = [i for i, x in enumerate(flat) if is_dynamic(x)]
    emitted = step._executable().emitted
    for i, sharding in zip(dynamic, emitted.arguments):
        if isinstance(flat[i], np.ndarray):
            flat[i] = place(flat[i], sharding, own=True)
    return jax.tree.unflatten(tree, flat)


def _next(step: Step, args: Any, out: Any) -> Any:
    """The arguments of the next call: the state that came back, and the same batch."""
    results, flat, tree = jax.tree.leaves(out), *jax.tree.flatten(args)
    dynamic = [i for i, x in enumerate(flat) if is_dynamic(x)]
    for i, a in zip(dynamic, step._executable().emitted.program.arguments):
        if a.result is not None and a.role != "batch":
            flat[i] = results[a.result]
    return jax.tree.unflatten(tree, flat)


def peaks() -> int | None:
    """The most bytes that were ever in use on a device of this process; None where it does not tell."""
    stats = [d.memory_stats() or {} for d in jax.local_devices()]
    found = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return max(found) if found else None


def materialize(arguments: Any) -> Any:
    """Arrays in the place of shapes: small positive numbers, indices 0 and 1, counters 0."""
    rng = np.random.default_rng(0)

    def one(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            keys = jax.random.split(jax.random.key(0), int(np.prod(x.shape, dtype=int)) or 1)
            return keys.reshape(x.shape)
        if jax.numpy.issubdtype(x.dtype, np.inexact):
            return (0.01 * np.abs(rng.standard_normal(x.shape, np.float32))).astype(x.dtype)
        if x.dtype == np.bool_:
            return np.ones(x.shape, np.bool_)
        return (rng.integers(0, 2, x.shape) if x.shape else np.zeros((), int)).astype(x.dtype)

    return jax.tree.map(one, arguments)
