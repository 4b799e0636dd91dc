"""Union-find over the dimensions of a program, where a dimension may be a product of others.

A reshape that merges batch and sequence makes one dimension of two factors; whatever that dimension is then joined to
has the same two factors. So a class of joined dimensions can be *split* into smaller classes, and joining two products
aligns them from the major side, splitting further where sizes ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence


class Factors:
    """Grows by `new`, `join` and `split`; `leaves` says what a dimension is made of, major factor first."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._parts: dict[int, tuple[int, ...]] = {}
        self.sizes: list[set[int]] = []

    def new(self, size: int) -> int:
        self._parent.append(len(self._parent))
        self.sizes.append({size})
        return len(self._parent) - 1

    def find(self, x: int) -> int:
        while self._parent[x] != x:
            self._parent[x] = self._parent[self._parent[x]]
            x = self._parent[x]
        return x

    def leaves(self, x: int) -> list[int]:
        root = self.find(x)
        return [leaf for part in self._parts[root] for leaf in self.leaves(part)] if root in self._parts else [root]

    def size(self, x: int) -> int:
        """The size of a class; the largest where a slice or a pad joined several."""
        return max(self.sizes[self.find(x)])

    def join(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Says that two products of factors are one dimension. Does nothing where their sizes cannot be aligned."""
        if len(left) == len(right) == 1 and self._whole(left[0]) and self._whole(right[0]):
            self._merge(left[0], right[0])
            return
        a = [leaf for x in left for leaf in self.leaves(x)]
        b = [leaf for x in right for leaf in self.leaves(x)]
        if len(a) == len(b) == 1:
            self._merge(a[0], b[0])
            return
        while a and b:
            x, y = self.find(a[0]), self.find(b[0])
            n, m = self.size(x), self.size(y)
            if x in self._parts or y in self._parts:
                a[:1], b[:1] = self.leaves(x), self.leaves(y)
                continue
            if n == m:
                self._merge(x, y)
                a, b = a[1:], b[1:]
            elif n % m == 0 and self.split(x, (m, n // m)):
                a[:1] = self.leaves(x)
            elif m % n == 0 and self.split(y, (n, m // n)):
                b[:1] = self.leaves(y)
            else:
                return

    def _whole(self, x: int) -> bool:
        return self.find(x) not in self._parts

    def split(self, x: int, sizes: tuple[int, ...]) -> bool:
        """Splits a class into factors of these sizes, major first; False where members of other sizes forbid it."""
        root = self.find(x)
        if root in self._parts or len(self.sizes[root]) > 1:
            return False
        self._parts[root] = tuple(self.new(n) for n in sizes)
        return True

    def _merge(self, x: int, y: int) -> None:
        x, y = self.find(x), self.find(y)
        if x != y:
            self._parent[y] = x
            self.sizes[x] |= self.sizes[y]
