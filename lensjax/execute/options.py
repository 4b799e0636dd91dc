"""Whether the options of the decorator are what they should be, said where the step is decorated."""

from __future__ import annotations

import math
import numbers
import operator
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from lensjax._errors import BatchError, ClusterError, PlanError
from lensjax.plan.grammar import is_file, read
from lensjax.plan.pins import normalize
from lensjax.plan.plan import Plan
from lensjax.search.compressed import check_compress
from lensjax.search.secondary import check_secondary
from lensjax.search.strategies import names, strategy
from lensjax.topology.cluster import Cluster


def check(options: Any) -> None:
    """Raises PlanError, BatchError or ClusterError naming the option that cannot be meant."""
    _check_plan(options.plan)
    _check_memory(options.memory)
    normalize(options.pins)
    _check_search(options.search, options.budget)
    check_compress(options.compress)
    check_secondary(options.secondary)
    _check_batch(options.batch_argnums, options.batch_axes)
    if not isinstance(options.donate, bool):
        raise PlanError(f"donate={options.donate!r}; expected True or False")
    if not isinstance(options.judge, bool):
        raise PlanError(f"judge={options.judge!r}; expected True or False")
    if options.report is not None and not callable(options.report):
        raise PlanError(
            f"report={options.report!r}; expected a function of one text",
            hint="it is called with the name of each plan while it is priced: report=print",
        )
    if options.cache is not None and not isinstance(options.cache, str | os.PathLike):
        raise PlanError(f"cache={options.cache!r}; expected a folder", hint='as in cache="~/.cache/my-plans"')
    if options.cluster is not None and not isinstance(options.cluster, str | pathlib.Path | Cluster):
        raise ClusterError(
            f"cluster={options.cluster!r}; expected a Cluster, a name or a file", hint='as in cluster="dgx-h100:4"'
        )


def _check_plan(plan: Any) -> None:
    if plan is None or isinstance(plan, Plan | pathlib.Path) or plan == "off":
        return
    if not isinstance(plan, str):
        raise PlanError(
            f"plan={plan!r}; expected a preset, a Plan, a .json file or None",
            hint='as in plan="fsdp", plan="dp=2,fsdp=4", plan="plan.json"; None chooses the fastest that fits',
        )
    if not is_file(plan):
        read(plan)


def _check_memory(memory: Any) -> None:
    if memory is None:
        return
    number = isinstance(memory, numbers.Real) and not isinstance(memory, bool)
    if not number or not math.isfinite(memory) or memory <= 0:
        raise PlanError(
            f"memory={memory!r}; expected a positive number of bytes per device",
            hint="as in memory=80e9; leave it out for the device's own",
        )


def _check_search(search: Any, budget: Any) -> None:
    if search is not None and not isinstance(search, str):
        raise PlanError(
            f"search={search!r}; expected a strategy's name or None", hint=f"there are: {', '.join(names())}"
        )
    if search is not None:
        strategy(search)
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if budget is not None and not (number and float(budget) > 0):
        raise PlanError(f"budget={budget!r}; expected a positive number of seconds, or None for no limit")


def _check_batch(argnums: Any, axes: Any) -> None:
    hint = "positions of the batch arguments, as in batch_argnums=1 or batch_argnums=(1, 2)"
    if argnums is not None:
        given = argnums if isinstance(argnums, Sequence) and not isinstance(argnums, str | bytes) else (argnums,)
        if not given or not all(map(_is_integer, given)):
            raise BatchError(f"batch_argnums={argnums!r}; expected an integer, or several", hint=hint)
        if len(set(given)) != len(given):
            raise BatchError(f"batch_argnums={argnums!r} names an argument twice", hint=hint)
    if axes is None:
        return
    if argnums is None:
        raise BatchError("batch_axes was given without batch_argnums", hint=hint)
    leaves = jax.tree.leaves(axes, is_leaf=lambda x: x is None)
    if wrong := [x for x in leaves if x is not None and not _is_integer(x)]:
        raise BatchError(
            f"batch_axes={axes!r}: {wrong[0]!r} is no dimension; expected integers, or None for what has no batch",
            hint="one integer for all, or one (or a tree like the argument) for each of batch_argnums",
        )


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
