"""Codecs by name: "int8", "int8:256", "int4:32:hadamard", "powersgd:4:stacked=1".

A name is followed by parameters, each after a colon: values in the order of the dataclass's fields, a field's own name
for a flag that is turned on, or `field=value`. A package adds codecs of its own under the entry point group
`lensjax.codecs`; by hand, outside of plans, an instance can be used anywhere a name can.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib.metadata import entry_points
from typing import Any

from lensjax._errors import CodecError
from lensjax.comm.codec import Codec, Exact
from lensjax.comm.floats import BFloat16, Float8
from lensjax.comm.integers import Int4, Int8
from lensjax.comm.low_rank import PowerSGD

GROUP = "lensjax.codecs"
_BUILT_IN: dict[str, type[Codec]] = {c.name: c for c in (Exact, BFloat16, Float8, Int8, Int4, PowerSGD)}


def codecs() -> dict[str, type[Codec]]:
    """Every codec that a name can mean: the built-in ones, and those that installed packages register."""
    found = {e.name: e for e in entry_points(group=GROUP) if e.name not in _BUILT_IN}
    return {**_BUILT_IN, **{name: e.load() for name, e in found.items()}}


def parse_codec(spec: str | Codec) -> Codec:
    """The codec that a name and its parameters mean; a codec as it is. Raises CodecError."""
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        found = f"the class {spec.__name__}" if isinstance(spec, type) else repr(spec)
        raise CodecError(
            f"codec is {found}",
            hint="a codec is a name ('int8:256'), an instance (lensjax.comm.Int8(256)) or, for a tree, a function "
            "(path, shape) -> either, such as lensjax.comm.Policy('int8')",
        )
    return _parse(spec)


@functools.cache
def _parse(spec: str) -> Codec:
    name, *words = spec.split(":")
    kind = _BUILT_IN.get(name) or codecs().get(name)
    if kind is None:
        raise CodecError(
            f"there is no codec {name!r}",
            hint=f"codecs: {', '.join(sorted(codecs()))}; a package adds one under the entry point group {GROUP!r}",
        )
    fields = {f.name: f for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    given: dict[str, Any] = {}
    order = list(fields)
    for word in words:
        key, sign, value = word.partition("=")
        if not sign and word in fields:
            value = "on"
        elif not sign:
            key, value = next((k for k in order if k not in given), ""), word
        if key not in fields or key in given:
            takes = f"{name} takes {', '.join(fields)}" if fields else f"{name} takes no parameters"
            raise CodecError(f"codec {spec!r}: {word!r} is no parameter of it", hint=takes)
        given[key] = _read(spec, fields[key], value)
    return kind(**given)


def _read(spec: str, field: dataclasses.Field, text: str) -> Any:
    kind = type(field.default)
    try:
        if kind is bool:
            return {"on": True, "off": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        wanted = {bool: "on or off", int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise CodecError(f"codec {spec!r}: {field.name} is {text!r}", hint=f"{field.name} is {wanted}") from None
