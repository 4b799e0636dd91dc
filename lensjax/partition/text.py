"""Reading MLIR's attribute texts: tensor types, shardings, axis lists, locations, window and dimension numbers.

The Python bindings have classes for only some of these attributes, and not the same ones in every jaxlib; their textual
form is what Shardy documents. Each parser is cached: a program repeats a few hundred distinct texts.
"""

from __future__ import annotations

import functools
import re

from lensjax._errors import PartitionError
from lensjax.partition.data import Axes, Spec

_SHARDING = re.compile(r"<@[\w.$-]+, \[([^\]]*)\](?:, \w+=\{[^}]*\})*>")
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')
_DIMENSION = re.compile(r"\{([^}]*)\}")


@functools.lru_cache(maxsize=65536)
def tensor_type(text: str) -> tuple[tuple[int, ...], str]:
    """`tensor<8x32xbf16>` -> ((8, 32), "bf16"); a token or another type has an empty shape and dtype "".

    Raises PartitionError for a dimension that is not known when the program is traced.
    """
    if not text.startswith("tensor<"):
        return (), ""
    *dims, dtype = text[len("tensor<") : -1].split(",")[0].split("x") if "complex" not in text else _complex(text)
    if "?" in dims:
        raise PartitionError(f"a dimension of {text} is symbolic", hint="trace the step with concrete shapes")
    return tuple(int(d) for d in dims), dtype


def _complex(text: str) -> list[str]:
    head, _, dtype = text[len("tensor<") : -1].rpartition("complex")
    return [*[d for d in head.split("x") if d], "complex" + dtype]


@functools.lru_cache(maxsize=65536)
def axes_in(text: str) -> Axes:
    """`{"a", "b":(1)2}` -> ("a", "b:(1)2")."""
    return tuple(name + sub for name, sub in _AXIS.findall(text))


@functools.lru_cache(maxsize=65536)
def axis_lists(text: str) -> Spec:
    """`[{"a"}, {}]` (also inside `#sdy<...>`) -> (("a",), ())."""
    return tuple(axes_in(dims) for dims in _DIMENSION.findall(text))


@functools.lru_cache(maxsize=65536)
def shardings(text: str) -> tuple[Spec, ...]:
    """`sdy.sharding` or `sdy.sharding_per_value` -> a spec for each value in it.

    Raises PartitionError for a form that is not read here (an inlined mesh): a wrong guess would look plausible.
    """
    found = tuple(axis_lists(dims) for dims in _SHARDING.findall(text))
    if not found and "<[]>" not in text:
        raise PartitionError(f"unknown form of sharding: {text[:200]}")
    return found


@functools.lru_cache(maxsize=65536)
def axis_size(axis: str, mesh: tuple[tuple[str, int], ...]) -> int:
    """Devices along an axis or a sub-axis ("d:(2)4" has 4)."""
    if ":" in axis:
        return int(axis.rpartition(")")[2])
    return dict(mesh)[axis]


@functools.lru_cache(maxsize=65536)
def location(text: str) -> tuple[str, str]:
    """MLIR location -> (XLA's op name, "file:line").

    The line is the innermost frame outside of installed packages, else the innermost frame, else "".
    """
    name = re.match(r'loc\("([^"]*)"(?!:\d)', text)
    places = re.findall(r'"([^"]+)":(\d+):\d+', text)
    place = next((p for p in places if "site-packages" not in p[0]), places[0] if places else None)
    return (name[1] if name else ""), (":".join(place) if place else "")


@functools.lru_cache(maxsize=65536)
def integers(text: str) -> tuple[int, ...]:
    """All integers of `array<i64: 1, 2>`, `dense<[[1, 2]]> : tensor<1x2xi64>` or `dense<3> : tensor<i32>`.

    A `dense<"0x...">` or a splat of a larger tensor is not read here.
    """
    inside = re.search(r"array<i\d+(?::\s*)?([^>]*)>|dense<([^>]*)>", text)
    if not inside:
        return ()
    return tuple(int(n) for n in re.findall(r"-?\d+", inside[1] or inside[2] or ""))


@functools.lru_cache(maxsize=65536)
def named_list(name: str, text: str) -> tuple[int, ...]:
    """`name = [0, 2]` inside a dimension-numbers attribute; () when it is absent."""
    found = re.search(rf"\b{name} = \[([^\]]*)\]", text)
    return tuple(int(n) for n in found[1].split(",") if n.strip()) if found else ()
