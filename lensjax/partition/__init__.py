"""XLA's own partitioner (Shardy) as a library: a lowered step in, plain data out; no device, no compile.

    lowered = jax.jit(step, in_shardings=...).trace(*shapes).lower(lowering_platforms=("cuda",))
    partition(lowered).collectives

or, for many plans of one program, lower once and write the shardings of each:

    source = template(lowered)
    partition(source, mesh={"data": 32, "model": 8}, arguments={0: (("data",), ())}, marks={3: (("data",), (), ())})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lensjax import _jax
from lensjax.partition.axes import DimensionFactors, LogicalAxis, dimension_factors
from lensjax.partition.data import Axes, Body, Collective, Node, Operation, Partitioned, Region, Spec, Value
from lensjax.partition.facts import Repeated, Reshard, repeated, reshards
from lensjax.partition.fusion import Fusions
from lensjax.partition.inline import main_function
from lensjax.partition.module import MARK, Template, instantiate, template, without
from lensjax.partition.read import donations, read
from lensjax.partition.simplify import simplify
from lensjax.partition.work import schedule

__all__ = [
    "MARK",
    "Axes",
    "Body",
    "Collective",
    "DimensionFactors",
    "LogicalAxis",
    "Node",
    "Operation",
    "Partitioned",
    "Region",
    "Repeated",
    "Reshard",
    "Spec",
    "Template",
    "Value",
    "dimension_factors",
    "partition",
    "repeated",
    "reshards",
    "template",
    "without",
]


def partition(
    source: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    arguments: Mapping[int, Spec] | None = None,
    results: Mapping[int, Spec] | None = None,
    marks: Mapping[int, Spec | None] | None = None,
) -> Partitioned:
    """Runs Shardy on a step and says what each device holds, computes and sends.

    source:     a `jax.stages.Lowered`, or a `Template` of one (cheaper when asked more than once).
    mesh:       axis -> size, when other than the one lowered with.
    arguments, results: position in the flattened tree -> spec (axes of each dimension), overriding what was lowered.
    marks:      number of a marked constraint -> spec, or None to leave it to Shardy.

    Raises PartitionError where Shardy does not take the program or a spec does not fit it, UnsupportedJax where the
    installed jaxlib has no Shardy to drive.
    """
    source = source if isinstance(source, Template) else template(source)
    sizes = dict(mesh if mesh is not None else source.mesh)
    module = instantiate(source, mesh, arguments, results, marks)
    _jax.run_passes(module, _jax.PASSES_PROPAGATE, *_jax.PASSES_EXPLICIT, "cse")
    values, body = read(module, sizes, source.places)
    body = simplify(values, body, sizes)
    fusions = Fusions(tuple(values), body)
    return Partitioned(
        mesh=sizes,
        values=fusions.values,
        body=body,
        schedule=schedule(body, fusions, sizes),
        donated=donations(main_function(module)),
        unknown_trips=_unknown_trips(body),
        fusions=fusions,
    )


def _unknown_trips(body: Body) -> int:
    return sum((n.trips is None) + sum(map(_unknown_trips, n.bodies)) for n in body.nodes)
