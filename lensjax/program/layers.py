"""Layers: repeated sub-programs. A scan that runs over stacked parameters is a stack of layers.

The forward scan and the backward scan of one stack share its parameters, so a layer is known by them.
"""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Sequence
from typing import Any

from lensjax import _jax
from lensjax.program.edit import all_equations, is_var


@dataclasses.dataclass(frozen=True)
class Layer:
    """A stack of `count` equal layers. `parameters`: indices of the arguments stacked along their leading dimension;
    `name`: the common path of these."""

    name: str
    count: int
    parameters: tuple[int, ...]


def find_layers(jaxpr: Any, parameters: Sequence[int], paths: Sequence[str]) -> tuple[Layer, ...]:
    """The stacks that scans at the top level run over, in program order."""
    inner = _jax.open_jaxpr(jaxpr)
    origin = _origins(inner, parameters)
    stacks: dict[tuple[int, ...], int] = {}
    for eqn in inner.eqns:
        if eqn.primitive.name != "scan":
            continue
        consts, carry = _jax.scan_split(eqn)
        scanned = {origin[a] for a in eqn.invars[consts + carry :] if is_var(a) and a in origin}
        if scanned:
            stacks.setdefault(tuple(sorted(scanned)), eqn.params["length"])
    merged: dict[tuple[int, ...], int] = {}
    for members, count in sorted(stacks.items(), key=lambda kv: -len(kv[0])):
        if not any(set(members) & set(m) for m in merged):
            merged[members] = count
    named = [(_name([paths[i] for i in m]), c, m) for m, c in merged.items()]
    return tuple(Layer(n, c, m) for n, c, m in sorted(named, key=lambda x: x[2]))


def _origins(inner: Any, parameters: Sequence[int]) -> dict[Any, int]:
    """Variables that are a parameter, or a cast of one."""
    origin = {inner.invars[i]: i for i in parameters}
    for eqn in inner.eqns:
        if eqn.primitive.name in ("convert_element_type", "copy") and is_var(eqn.invars[0]) and eqn.invars[0] in origin:
            origin[eqn.outvars[0]] = origin[eqn.invars[0]]
    return origin


def _name(paths: Sequence[str]) -> str:
    """The common directory of the paths."""
    if len(paths) == 1:
        return paths[0].rsplit("/", 1)[0]
    return os.path.commonpath(["/" + p for p in paths]).strip("/")


def scanned_leading(jaxpr: Any) -> set[Any]:
    """Variables that some scan, at any depth, runs over: their leading dimension is a layer index, not a tensor
    dimension."""
    found = set()
    for eqn in all_equations(jaxpr):
        if eqn.primitive.name == "scan":
            consts, carry = _jax.scan_split(eqn)
            found.update(a for a in eqn.invars[consts + carry :] if is_var(a))
    return found
