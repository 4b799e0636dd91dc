"""The decorator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lensjax._errors import PlanError
from lensjax.execute.off import Off
from lensjax.execute.planning import Options
from lensjax.execute.step import Step


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: Any = None,
    memory: float | None = None,
    plan: Any = None,
    pins: Mapping[str, Any] | None = None,
    batch_argnums: Sequence[int] | int | None = None,
    batch_axes: Any = None,
    donate: bool = True,
    compress: str | Mapping[str, str] = "off",
    secondary: str | None = None,
    search: str | None = None,
    budget: float | None = None,
    cache: str | os.PathLike[str] | None = None,
    judge: bool = False,
    report: Any = None,
) -> Any:
    """Makes a training step run under the fastest plan that fits a cluster. A decorator, with or without arguments.

    The step is any function of arrays that could be passed to `jax.jit`: it takes a state and a batch and returns the
    next state and metrics, in any structure. It needs no change.

    cluster        a `Cluster`, a name such as "dgx-h100:32" or "cpu:2x4", or a file; None: the devices that JAX sees
    memory         bytes per device to stay within; None: the device's own
    plan           None: choose; a preset such as "fsdp" or "dp=2,fsdp=4"; a `Plan`; a .json file; "off": do nothing
    pins           {pattern: dimensions}: what you decide yourself, see `lensjax.plan.pins`
    batch_argnums  positions of the batch arguments, where they cannot be found by tracing at two sizes
    batch_axes     their batch dimension: one integer, or one (or a pytree of them) for each of these arguments
    donate         give up the old state's buffers, as training loops want
    compress       how gradients cross the slowest tier of the batch. "off": in their own precision; a codec's name
                   ("bf16", "int8", "int4", see `lensjax.comm`): as codes, whatever it gains; "auto": as codes where
                   that is predicted to pay. {"*/router/*": "exact", "*": "int8"} decides for single parameters by
                   their paths, the first match wins. `explain()` says what was decided and how gradients are rounded
    secondary      how weights that all devices share (fsdp over nodes) cross the slowest tier: None: as the plan says;
                   a codec's name ("int8", "bf16", "exact"): once a step, by this codec, for a copy inside each node
                   that forward and backward read. It costs the copy's memory; the optimizer keeps the weights exact
    search         the strategy that looks for plans (`lensjax.search.strategies`); None: "milp", exact in its own model
    budget         seconds that planning may take; None: as long as the strategy needs
    cache          a folder in which plans are kept: the same step on the same cluster is not searched again
    judge          compile the last few candidates and let the timelines of their compiled schedules decide (minutes)
    report         a function that is called with the name of each plan while it is priced

    Returns a `Step`. With the environment variable LENSJAX_OFF=1 the step runs as it was written.
    Raises PlanError, BatchError or ClusterError for an option that cannot be meant; what needs the arguments is
    checked at the first call.
    """
    options = Options(
        cluster, memory, plan, pins, _tuple(batch_argnums), batch_axes, donate, report, search, budget, cache, judge,
        compress, secondary,
    )  # fmt: skip

    def decorate(f: Callable[..., Any]) -> Any:
        _check_function(f)
        if os.environ.get("LENSJAX_OFF", "") not in ("", "0") or plan == "off":
            return Off(f)
        return Step(f, options)

    return decorate if fn is None else decorate(fn)


def _check_function(fn: Any) -> None:
    if isinstance(fn, staticmethod | classmethod):
        kind = type(fn).__name__
        raise PlanError(
            f"parallelize got a {kind}: it decorates the function itself",
            hint=f"write @{kind} above @parallelize(...), not below it",
        )
    if not callable(fn):
        raise PlanError(
            f"parallelize got {fn!r} where the step is expected",
            hint='options go by name, as in parallelize(plan="fsdp")',
        )


def _tuple(value: Any) -> Any:
    return (value,) if hasattr(value, "__index__") and not isinstance(value, bool) else value
