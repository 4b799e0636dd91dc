"""A step before anything is split, with the logical axes of every value: what cost tables are made from.

The same reading as `partition` (one device's program, fused, with its loops), on a mesh of nothing, and for each value
the classes of dimensions of `dimension_factors`. How a value, an operation or a peak shrinks under any rules is then
arithmetic: no partitioner is asked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lensjax.partition.axes import Dimension, joined
from lensjax.partition.data import Body, Value
from lensjax.partition.inline import main_function
from lensjax.partition.module import Template, template
from lensjax.partition.read import Reader
from lensjax.partition.simplify import simplify


@dataclasses.dataclass(frozen=True)
class Whole:
    """`values` and `body` of the unsplit step; `dims[v]` gives value v's dimensions as products of logical axes, major
    first; `sizes[a]` is axis a's size."""

    values: tuple[Value, ...]
    body: Body
    dims: tuple[tuple[Dimension, ...], ...]
    sizes: tuple[int, ...]


def whole(source: Any) -> Whole:
    """Reads a `jax.stages.Lowered` or `Template` whose shardings split nothing. Raises PartitionError as `partition`
    does."""
    source = source if isinstance(source, Template) else template(source)
    module, joiner = joined(source)
    reader = Reader(source.mesh)
    body = reader.function(main_function(module))
    number: dict[int, int] = {}
    dims: list[tuple[Dimension, ...]] = [()] * len(reader.values)
    for value, i in reader.ids.items():
        dims[i] = tuple(
            tuple(number.setdefault(leaf, len(number)) for leaf in joiner.factors.leaves(d)) if n > 1 else ()
            for d, n in zip(joiner.dims(value), reader.values[i].shape)
        )
    sizes = tuple(max(joiner.factors.sizes[leaf]) for leaf in number)
    body = simplify(reader.values, body, dict(source.mesh))
    return Whole(tuple(reader.values), body, tuple(dims), sizes)
