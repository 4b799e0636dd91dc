"""Shapes in HLO text: `bf16[8,512]{1,0}`, tuples of them, dynamic sizes, layouts with memory spaces."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

# Bits of one element. https://github.com/openxla/xla/blob/main/xla/xla_data.proto (PrimitiveType)
BITS = {
    "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32,
    "u32": 32, "s64": 64, "u64": 64, "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8,
    "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip

_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
HOST_SPACE = 5  # S(5) in a layout: host memory, in XLA's GPU and TPU compilers (xla/layout.h, kHostMemorySpace)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: HLO dtype name, dimensions, and the memory space of its layout (0 = device default)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the array, sub-byte types packed; 0 for tokens and types this table does not know."""
        return -(-self.elements * BITS.get(self.dtype, 0) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def arrays(text: str) -> tuple[Shape, ...]:
    """Every array in a shape's text, depth first: one for an array, all leaves for a tuple."""
    return tuple(_leaves(text))


def _leaves(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype not in BITS:
            continue
        space = re.search(r"S\((\d+)\)", layout) if layout else None
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d.strip().lstrip("<=").isdigit())
        yield Shape(dtype, sizes, int(space.group(1)) if space else 0)


def unknown_types(text: str) -> set[str]:
    """Names that look like element types and are in no table: to be reported, since their bytes count as 0."""
    return {dtype for dtype, _, _ in _ARRAY.findall(text) if dtype not in BITS}


def total_bytes(shapes: tuple[Shape, ...]) -> int:
    return sum(s.bytes for s in shapes)
