"""What the partitioner says, as plain data: one device's program, its values and what it sends.

A `Body` is the program of *one* device: every value has a global shape, the mesh axes that split each dimension and,
from them, the shape that the device holds. Loops keep their body as a nested `Body` with a trip count. Nothing here
refers to MLIR or to a device, so analyses are pure functions from this data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

# Mesh axes that split one dimension, major first. A sub-axis is spelled "axis:(pre)size" as Shardy prints it.
Axes = tuple[str, ...]
# One entry a dimension.
Spec = tuple[Axes, ...]

# Bytes of an element. Sub-byte types are packed on the wire and in GPU memory (XLA packs int4 and int2).
ELEMENT_BYTES: Mapping[str, float] = {
    "i1": 1, "i2": 0.25, "ui2": 0.25, "i4": 0.5, "ui4": 0.5, "i8": 1, "ui8": 1, "i16": 2, "ui16": 2, "i32": 4,
    "ui32": 4, "i64": 8, "ui64": 8, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "complex<f32>": 8, "complex<f64>": 16,
}  # fmt: skip


def element_bytes(dtype: str) -> float:
    """Bytes of one element of an MLIR element type; one byte for every 8-bit float, zero for tokens."""
    if dtype in ELEMENT_BYTES:
        return ELEMENT_BYTES[dtype]
    return 0.5 if dtype.startswith("f4") else 1 if dtype.startswith(("f8", "f6")) else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A value of the program: its global `shape`, what one device holds (`local`, rounded up), the `bytes` of that."""

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    local: tuple[int, ...]
    bytes: float

    @property
    def size(self) -> int:
        """Elements that one device holds."""
        return math.prod(self.local)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One operation on one device. `inputs` and `outputs` index `Partitioned.values`.

    `bodies` are nested programs (a loop has one, a conditional one for each branch); `trips` is how often a loop runs,
    None where the program does not say (then it counts once). `axes` are the mesh axes that a collective (or
    `all_slice`, which is local) works over. `attributes` holds the few that analyses need, as text.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    op_name: str
    source: str
    bodies: tuple[Body, ...] = ()
    trips: int | None = 1
    axes: Axes = ()
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A straight program: `arguments` and `results` index `Partitioned.values`."""

    arguments: tuple[int, ...]
    nodes: tuple[Node, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One communication that every device takes part in.

    op:     all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
    axes:   the mesh axes whose devices form a group; `group` is their number.
    bytes:  per device, of the *full* buffer: what all_gather returns, what reduce_scatter takes, what all_reduce,
            all_to_all and collective_permute take and return. A ring sends (n-1)/n of it per device
            (2(n-1)/n for all_reduce, all of it for collective_permute).
    trips:  how often a step runs it (product of the enclosing loops' trip counts).
    op_name, source: XLA's metadata name and the user's line, as "file:line".
    reads, writes: stored buffers (indices into `Partitioned.values`), for dependencies.
    """

    op: str
    axes: Axes
    group: int
    bytes: float
    dtype: str
    trips: int
    op_name: str
    source: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One kernel of local work: a matmul, a convolution, or a chain of element-wise operations fused into one pass.

    name:   the StableHLO operation without its dialect, "fusion" for a fused chain, "custom_call:TARGET".
    flops and bytes (moved to and from device memory) are of one execution on one device; a step runs `trips` of them.
    dtype:  of the first operand: what decides the speed of a matmul; `precision` is "default", "high" or "highest".
    reads, writes: stored buffers (indices into `Partitioned.values`), for dependencies.
    """

    name: str
    flops: float
    bytes: float
    dtype: str
    trips: int
    op_name: str
    source: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    precision: str = "default"


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Work in program order. A nested region is a loop (`trips` of its own, not multiplied by the outer ones)."""

    trips: int
    items: tuple[Operation | Collective | Region, ...]
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()

    def leaves(self) -> Iterator[Operation | Collective]:
        """Operations and collectives of this region and those inside, in program order."""
        for item in self.items:
            if isinstance(item, Region):
                yield from item.leaves()
            else:
                yield item


@dataclasses.dataclass(frozen=True, slots=True)
class Partitioned:
    """A step, partitioned: what each device holds, computes and sends. Made by `lensjax.partition.partition`.

    mesh:         axis -> size.
    values, body: one device's program (`data` module docstring).
    schedule:     the same as kernels and collectives in program order, loops nested.
    donated:      argument position -> result position that may reuse its buffer.
    unknown_trips: loops whose trip count the program does not tell; their work is counted once.
    fusions:      the fusion model of each body that was looked at when the schedule was made.
    """

    mesh: Mapping[str, int]
    values: tuple[Value, ...]
    body: Body
    schedule: Region
    donated: Mapping[int, int]
    unknown_trips: int
    fusions: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(x for x in self.schedule.leaves() if isinstance(x, Collective))

    @property
    def operations(self) -> tuple[Operation, ...]:
        return tuple(x for x in self.schedule.leaves() if isinstance(x, Operation))

    @property
    def arguments(self) -> tuple[Value, ...]:
        """The step's arguments, in the order of the flattened tree."""
        return tuple(self.values[v] for v in self.body.arguments)

    @property
    def results(self) -> tuple[Value, ...]:
        """The step's results, in the order of the flattened tree."""
        return tuple(self.values[v] for v in self.body.results)
