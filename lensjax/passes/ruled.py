"""A plan's activation rules on the logical axes of one value: which mesh axes split each of its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from lensjax.partition.axes import Dimension


class Ruled:
    """Rules that apply in their order: a mesh axis splits one dimension of a value. Values of equal dimensions are
    split alike, and only the rules of their own axes are gone through: an unrolled network has some for each layer.

    rules: (logical axis, mesh axes), in order; sizes: of the logical axes; ways: devices along mesh axes.
    """

    def __init__(
        self,
        rules: Sequence[tuple[int, tuple[str, ...]]],
        sizes: Sequence[int],
        ways: Callable[[tuple[str, ...]], int],
    ):
        self.rules, self.sizes, self.ways = rules, sizes, ways
        self._about: dict[int, list[int]] = {}
        for i, (axis, _) in enumerate(rules):
            self._about.setdefault(axis, []).append(i)
        self._found: dict[tuple[Any, ...], list[Any] | None] = {}

    def __call__(self, dims: tuple[Dimension, ...], shape: tuple[int, ...]) -> list[Any] | None:
        """The entries of a PartitionSpec; None where no rule splits the value. A dimension in which a ruled axis stands
        behind another one is left to the partitioner."""
        key = dims, shape
        if key not in self._found:
            self._found[key] = self._entries(dims, shape)
        found = self._found[key]
        return None if found is None else list(found)

    def _entries(self, dims: tuple[Dimension, ...], shape: tuple[int, ...]) -> list[Any] | None:
        behind = [any(axis in self._about for axis in dim[1:]) for dim in dims]
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED if b else None for b in behind]
        used: set[str] = set()
        for i in sorted({i for dim in dims if dim for i in self._about.get(dim[0], ())}):
            axis, mesh = self.rules[i]
            for d, n in enumerate(shape):
                free = tuple(a for a in mesh if a not in used)
                if not free or not dims[d] or dims[d][0] != axis or entries[d]:
                    continue
                if n % self.ways(free) == 0 and self.sizes[axis] % self.ways(free) == 0:
                    entries[d] = free
                    used.update(free)
        return entries if used else None
