"""What a backward scan reads from the host, fetched one trip ahead.

The backward of a layer begins with its input, so a fetch in the layer's own trip hides behind nothing. Instead each
trip is handed its layer's values by the trip before, and fetches the next one's; the first layer's are fetched before
the loop. The last trip has no next one and fetches its own again: a trip apart from the others would be compiled twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lensjax.passes.recompute_copy import DEVICE, Writer

NAME = "lensjax.offload"


@dataclasses.dataclass(frozen=True)
class Fetch:
    """How values of a scan's layers reach its trips. `values`: body variables of the forward. Of the backward's body:
    `stacks` (constants, on the host), `held` (carried, on the device), `ahead` (what is handed on), `rows` (scanned
    over: the row of the next trip). Around it: `operands`, `first` and `order`, which those three are given."""

    values: tuple[Any, ...] = ()
    stacks: tuple[Any, ...] = ()
    held: tuple[Any, ...] = ()
    ahead: tuple[Any, ...] = ()
    rows: tuple[Any, ...] = ()
    operands: tuple[Any, ...] = ()
    first: tuple[Any, ...] = ()
    order: tuple[Any, ...] = ()


def fetch(eqn: Any, values: Sequence[Any], stacked: Mapping[Any, Any], around: Writer, body: Writer) -> Fetch:
    """Emits the first fetches into `around`, which comes before the backward scan `eqn`, and those of the next trip
    into its `body`. `stacked`: body variable of the forward -> its stack on the host."""
    if not values:
        return Fetch()
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    copies = body.copies
    (order,) = around.apply(Next(length, reverse), like=eqn, name=NAME)
    (row,) = (copies.fresh(order, order.aval.update(shape=())),)
    operands = [stacked[v] for v in values]
    stacks = [copies.fresh(x) for x in operands]
    first, ahead = [], []
    for v, outside, inside in zip(values, operands, stacks):
        for w, index, source, found in (
            (around, Row(length - 1 if reverse else 0), (outside,), first),
            (body, take, (inside, row), ahead),
        ):
            (x,) = w.apply(index, *source, like=eqn, name=NAME)
            copies.add(x, v)
            found.append(w.put(x, DEVICE, eqn))
    held = [copies.fresh(v) for v in values]
    return Fetch(*map(tuple, (values, stacks, held, ahead, [row], operands, first, [order])))


def take(stack, row):
    return jax.lax.dynamic_index_in_dim(stack, row, 0, keepdims=False)


@dataclasses.dataclass(frozen=True)
class Row:
    """`x -> x[at]`, hashable."""

    at: int

    def __call__(self, stack):
        return take(stack, self.at)


@dataclasses.dataclass(frozen=True)
class Next:
    """`() -> int32[length]`: for each row of a scan that of the trip after it, the last one's own; hashable."""

    length: int
    reverse: bool

    def __call__(self):
        row = jax.lax.iota(jnp.int32, self.length)
        return jax.lax.max(row - 1, 0) if self.reverse else jax.lax.min(row + 1, self.length - 1)
