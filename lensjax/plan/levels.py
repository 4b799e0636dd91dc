"""Levels: what a layer keeps from its forward for its backward, as the plan's field `layers` spells it.

    keep       everything (what JAX does)
    scores     everything but attention's scores: results of matmuls that are larger than what they multiply, and what
               is made of them before another matmul reads it. These, and what is element by element, are made again
    dots       results of matmuls without batch dimensions, convolutions and kernels; the rest is made again
    named      the values that the user named with `jax.ad_checkpoint.checkpoint_name`; "named:attn,mlp": only these
    inputs     what the layer is given; its forward runs again in the backward
    recompute  as `inputs`, and where it holds less several layers as one: only the first one's inputs are kept
    offload    as `inputs`, with the layer's inputs in the host's memory in between

A stack of scanned layers may be split: "recompute*28+keep*4" recomputes the first 28 of 32 layers.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping

from lensjax._errors import PlanError

LEVELS = ("keep", "scores", "dots", "named", "inputs", "recompute", "offload")
_PART = re.compile(r"^(?P<kind>[a-z]+)(:(?P<names>[^*+]+))?(\*(?P<count>\d+))?$")


@dataclasses.dataclass(frozen=True)
class Level:
    """One level: `kind` is one of LEVELS, `names` those that "named:..." lists, `count` the layers of a stack that it
    is for (None: all)."""

    kind: str
    names: tuple[str, ...] = ()
    count: int | None = None

    def __str__(self) -> str:
        names = f":{','.join(self.names)}" if self.names else ""
        return f"{self.kind}{names}" + (f"*{self.count}" if self.count is not None else "")


KEEP = Level("keep")


def parse(text: str, field: str = "layers") -> tuple[Level, ...]:
    """The parts of a level's spelling. Raises PlanError naming `field`."""
    parts = []
    for word in text.split("+"):
        found = _PART.match(word.strip())
        if found is None or found["kind"] not in LEVELS or (found["names"] and found["kind"] != "named"):
            raise PlanError(
                f"field '{field}' is {text!r}; expected one of {', '.join(LEVELS)}",
                hint='parts of a stack of layers are joined by "+", as in "recompute*28+keep*4"; "named:a,b" keeps the '
                "values with these names",
            )
        names = tuple(n.strip() for n in found["names"].split(",")) if found["names"] else ()
        parts.append(Level(found["kind"], names, int(found["count"]) if found["count"] else None))
    if any(p.count == 0 for p in parts) or (len(parts) > 1 and any(p.count is None for p in parts)):
        raise PlanError(
            f"field '{field}' is {text!r}: each part of a stack says how many layers it is for",
            hint='as in "recompute*28+keep*4", in forward order',
        )
    return tuple(parts)


def level_of(layers: Mapping[str, str], name: str) -> tuple[Level, ...]:
    """The level of a layer: its own entry, the first pattern that matches its name, "*", or keep. What lies outside of
    the layers ("") has only its own entry."""
    if name in layers:
        return parse(layers[name], f"layers.{name}")
    if name:
        for pattern, text in layers.items():
            if fnmatch.fnmatchcase(name, pattern):
                return parse(text, f"layers.{pattern}")
    return (KEEP,)


def for_stack(levels: tuple[Level, ...], count: int, name: str) -> tuple[Level, ...]:
    """The levels with the number of layers that each is for; raises PlanError where they do not add up to `count`."""
    if len(levels) == 1 and levels[0].count is None:
        return (dataclasses.replace(levels[0], count=count),)
    total = sum(p.count or 0 for p in levels)
    if total != count:
        text = "+".join(map(str, levels))
        raise PlanError(
            f"field 'layers.{name}' is {text!r}, which is for {total} layers; the stack has {count}",
            hint="the counts add up to the number of layers",
        )
    return levels
