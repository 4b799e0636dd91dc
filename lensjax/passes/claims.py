"""A mesh axis that two logical axes claim, of the weights and of the sequence: which of them has it in an operation.

Where tensor parallelism also splits the sequence, a value lies split along its first ruled axis: hidden units, heads
and the vocabulary before the sequence. Operands that each lie right by themselves can then clash. Megatron-LM's answer
(Shoeybi et al. 2019; Korthikanti et al. 2022, section 4.2.2) is the weights' axis for the operation, and gathers and
reduce-scatters along the sequence beside it:

    matmuls   into a split axis: the operand is gathered along the sequence; out of one: both operands stay split along
              it, and the sums are scattered; a weight's gradient: the operand that has the sequence alone is gathered
    lookups   in split rows (an embedding, a target's logit): indices whole along the sequence, what was found is
              summed, and then split along it; in the backward the cotangents are gathered

Left alone, XLA exchanges logits for a loss, gathers their gradient and sums the gradients of both vocabulary weights
whole; Shardy gathers small weights and tables instead. So operands and result of such an operation are pinned along
the axes that clash, free along the others; the plan's own split of the result comes after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from lensjax.passes.windows import Splits
from lensjax.program.edit import shape_of

_FREE = PartitionSpec.UNCONSTRAINED


def claimed(eqn: Any, wanted: Callable[[Any], Sequence[Any]], batch: Collection[str]) -> Splits | None:
    """(a spec of each operand or None, that of the result or None) where a mesh axis clashes in a matmul, a lookup or
    a lookup's gradient; None elsewhere. `wanted(value)`: how the plan splits each dimension of a value; `batch`: mesh
    axes that split the batch, about which nothing is said here (experts and batch exchange what they share)."""
    name = eqn.primitive.name
    if name == "dot_general":
        return _matmul(eqn, wanted, batch)
    if name == "gather":
        rows, along, found = eqn.invars[0], eqn.params["dimension_numbers"].start_index_map, eqn.outvars[0]
    elif name in ("scatter-add", "scatter_add"):
        rows, found = eqn.outvars[0], eqn.invars[2]
        along = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    else:
        return None
    entries, others = wanted(rows), wanted(found)
    taken = {m for d in along for m in _axes(entries[d])} - set(batch)
    if not taken & {m for e in others for m in _axes(e)}:
        return None
    table, indices = PartitionSpec(*entries), _without(wanted(eqn.invars[1]), taken)
    values = _without(others, taken)
    return ([table, indices], values) if name == "gather" else ([table, indices, values], table)


def _matmul(eqn: Any, wanted: Callable[[Any], Sequence[Any]], batch: Collection[str]) -> Splits | None:
    values = (*eqn.invars, eqn.outvars[0])
    entries = [wanted(v) for v in values]
    factors = _factors(eqn)
    at: dict[str, set[int]] = {}  # mesh axis -> factors that some value lies split along
    for own, mine in zip(factors, entries):
        for f, e in zip(own, mine):
            for m in _axes(e):
                at.setdefault(m, set()).add(f)
    specs: list[list[Any]] = [[_FREE] * len(shape_of(v)) for v in values]
    for m, claims in at.items():
        lost = {g for own, mine in zip(factors, entries) for g in claims.intersection(own)
                if any(m in _axes(e) and f != g for f, e in zip(own, mine))}  # fmt: skip
        if m in batch or len(claims - lost) != 1:
            continue
        for k, (own, mine) in enumerate(zip(factors, entries)):
            for d, f in enumerate(own):
                if lost and f in claims and m in _axes(mine[d]):
                    before = _axes(mine[d]) if specs[k][d] is _FREE else _axes(specs[k][d])
                    specs[k][d] = tuple(a for a in before if a != m or f not in lost) or None
    if all(e is _FREE for e in itertools.chain(*specs)):
        return None
    left, right, result = (PartitionSpec(*s) if any(e is not _FREE for e in s) else None for s in specs)
    return [left, right], result


def _factors(eqn: Any) -> tuple[list[int], list[int], list[int]]:
    """A number for each dimension of both operands and the result of a matmul; dimensions that meet have the same."""
    (summed, batched), new = eqn.params["dimension_numbers"], itertools.count()
    sides: list[list[int]] = [[-1] * len(shape_of(v)) for v in eqn.invars]
    for left, right in (*zip(*batched), *zip(*summed)):
        sides[0][left] = sides[1][right] = next(new)
    met = [sides[0][d] for d in batched[0]]
    free = [next(new) for side in sides for f in side if f < 0]
    rest = iter(free)
    filled = [[next(rest) if f < 0 else f for f in side] for side in sides]
    return filled[0], filled[1], [*met, *free]


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None or entry is _FREE else tuple(entry)


def _without(entries: Sequence[Any], taken: Collection[str]) -> PartitionSpec:
    kept = (e if e is _FREE else tuple(m for m in _axes(e) if m not in taken) or None for e in entries)
    return PartitionSpec(*kept)
