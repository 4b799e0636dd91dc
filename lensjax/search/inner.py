"""The inner model: seconds and bytes of a mesh, a rule set and a storage choice, from tables.

    seconds = sum over regions of   sent between matmuls + max(kernels, weights on the way) + first weight + waits
    bytes   = stored tensors + the largest of all moments of (buffers alive) + gathered weights

A region is a loop (all of its trips) or what is outside of loops. What is sent between matmuls stands in their way;
weights travel beside them, except the first that a trip waits for. The network does one thing at a time: what is sent
between matmuls waits until the weights that are just travelling have arrived. For calls of l seconds each that come at
any time this takes sum(l^2) / 2T of a time T (the residual life of renewal theory). Everything that a choice changes is
linear in the choice, so that the best choice and a bound on all others can be found exactly (`solve`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from lensjax.program.program import Program
from lensjax.search.links import Links
from lensjax.search.rules import Laid, Layout, Pattern, lay
from lensjax.search.storage import Option, Storing, leaves_of
from lensjax.search.sums import MOVED
from lensjax.search.tables import ACTIVATION, STORED, Tables

# Part of a region's weight communication that nothing hides: the first of the calls of a trip.
EXPOSED = 1 / 12

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """One pattern with mesh sizes and a gather mode, ready to be solved.

    kernels, blocking: seconds by region that no choice changes. options: of every group. moments: float [moments]
    bytes alive that no choice changes; stored: float [moments, groups] bytes of stored buffers, unsplit by storage.
    fixed: bytes that are always held; gathered: bytes of whole weights by group while layers run. waits: by region,
    seconds that blocking calls wait for each square second of an option.
    """

    pattern: Pattern
    sizes: tuple[int, ...]
    again: bool
    kernels: np.ndarray
    blocking: np.ndarray
    options: list[list[Option]]
    moments: np.ndarray
    stored: np.ndarray
    fixed: float
    gathered: np.ndarray
    waits: np.ndarray | float = 0.0

    def seconds(self, chosen: list[int]) -> float:
        net = sum((o[i].net for o, i in zip(self.options, chosen)), np.zeros(len(self.kernels)))
        work = sum((o[i].work for o, i in zip(self.options, chosen)), np.zeros(len(self.kernels)))
        waited = sum(self.waited(o[i]) for o, i in zip(self.options, chosen))
        return float((self.blocking + np.maximum(self.kernels + work, net) + EXPOSED * net).sum() + waited)

    def piece(self, chosen: Sequence[int], idle: float) -> float:
        """Seconds of a piece of the batch that others follow: without what is done once. `idle`: kernel seconds that
        are not a piece's."""
        picked = [o[i] for o, i in zip(self.options, chosen)]
        pulled = sum((o.pulled for o in picked), np.zeros(len(self.kernels)))
        waited = float((self.waits * sum((o.pulled_squares for o in picked), np.zeros(len(self.kernels)))).sum())
        own = self.blocking + np.maximum(self.kernels, pulled) + EXPOSED * pulled
        return float(own.sum()) + waited - idle

    def waited(self, option: Option) -> float:
        """Seconds that blocking calls wait for what an option sends."""
        return float((self.waits * option.squares).sum())

    def bytes(self, chosen: list[int]) -> float:
        return self.fixed + float(self.by_moment(chosen).max())

    def by_moment(self, chosen: list[int]) -> np.ndarray:
        """Bytes at each moment."""
        picked = [o[i] for o, i in zip(self.options, chosen)]
        held = sum(o.held for o in picked)
        live = sum(g * (1.0 if o.storage.params else 0.0) for g, o in zip(self.gathered, picked))
        return self.moments + self.stored @ np.array([o.share for o in picked]) + held + live

    @functools.cached_property
    def least(self) -> float:
        """Bytes that no choice can undercut."""
        held = self.moments.copy()
        for g, options in enumerate(self.options):
            live = [o.held + (self.gathered[g] if o.storage.params else 0.0) for o in options]
            held += (np.array(live) + self.stored[:, g, None] * np.array([o.share for o in options])).min(axis=1)
        return self.fixed + float(held.max())

    @functools.cached_property
    def bound(self) -> float:
        """Seconds that no choice can undercut."""
        net = sum((np.min([x.net for x in o], axis=0) for o in self.options), np.zeros(len(self.kernels)))
        work = sum((np.min([x.work for x in o], axis=0) for o in self.options), np.zeros(len(self.kernels)))
        waited = sum(min(self.waited(x) for x in o) for o in self.options)
        return float((self.blocking + np.maximum(self.kernels + work, net) + EXPOSED * net).sum() + waited)


class Model:
    """The inner model of a program on a cluster, its batch in `micro` pieces one after the other.

    piece: whether seconds are those of one piece, followed by what is done once (gradients that travel, the optimizer),
    instead of the whole batch's. Gradients are then summed over the pieces where they are made, and travel once.
    like: a model of the same program and tables on other devices or in other pieces: what rules lay is worked out once,
    and on the same devices what does not depend on the pieces.
    """

    def __init__(
        self,
        program: Program,
        t: Tables,
        links: Links,
        micro: int = 1,
        piece: bool = False,
        like: Model | None = None,
    ):
        self.program, self.t, self.links, self.micro = program, t, links, micro
        self.pieces = micro if piece else 1
        active = np.array([k == ACTIVATION for k, _ in t.classes], bool)
        self._class_pieces = np.where(active, self.pieces, 1)
        batched = np.array([any(a in t.inputs for d in dims for a in d) for dims in t.kernel_axes], bool)
        self._kernel_pieces = np.where(batched | (t.kernel_bytes[:, active] > 0).any(axis=1), self.pieces, 1)
        alike = like is not None and like.links is links and like.pieces == self.pieces
        self._parts: dict[tuple[Pattern, tuple[int, ...]], Parts] = like._parts if like is not None and alike else {}
        self._laid: dict[Pattern, tuple[Laid, Storing]] = like._laid if like is not None else {}

    def laid(self, pattern: Pattern) -> tuple[Laid, Storing]:
        if pattern not in self._laid:
            laid = lay(self.t, pattern)
            leaves = leaves_of(self.t, self.program, Layout(self.t, pattern).spec)
            self._laid[pattern] = laid, Storing(self.t, laid, leaves)
        return self._laid[pattern]

    def floor(self, pattern: Pattern, sizes: tuple[int, ...]) -> float:
        """Seconds that no storage choice can undercut: kernels and what is sent between them."""
        kernels, blocking, *_ = self.fixed_parts(pattern, sizes)
        return float((kernels + blocking).sum())

    @functools.cached_property
    def once(self) -> float:
        """Kernel seconds of a floor that are not a piece's: the launches of the optimizer's kernels."""
        t = self.t
        idle = (t.kernel_seconds == 0) & ~t.kernel_bytes.any(axis=1)
        return float((t.kernel_launch * t.kernel_trips)[idle].sum())

    def least(self, pattern: Pattern, sizes: tuple[int, ...]) -> float:
        """Bytes that no storage choice can undercut: activations, the batch and what is never split."""
        _, _, ways, _ = self.fixed_parts(pattern, sizes)
        return self._held(ways) + float(self._active(ways).max())

    def _active(self, ways: np.ndarray) -> np.ndarray:
        """Bytes at each moment of what is not stored."""
        if self.pieces > 1:
            ways = ways * self._class_pieces
            return self.t.alive[:, ~self._stored] @ (1.0 / ways[~self._stored])
        return self.t.alive[:, ~self._stored] @ (1.0 / ways[~self._stored]) / self.micro

    def _held(self, ways: np.ndarray) -> float:
        return self.t.fixed_bytes + sum(n / ways[c] for c, n in self.t.batch_arguments)

    @functools.cached_property
    def _stored(self) -> np.ndarray:
        return np.array([k == STORED for k, _ in self.t.classes])

    def fixed_parts(self, pattern: Pattern, sizes: tuple[int, ...]) -> Parts:
        """(kernel seconds by region, blocking seconds by region, ways of each class, blocking calls of a trip)."""
        if (pattern, sizes) not in self._parts:
            self._parts[pattern, sizes] = self._fixed_parts(pattern, sizes)
        return self._parts[pattern, sizes]

    def _fixed_parts(self, pattern: Pattern, sizes: tuple[int, ...]) -> Parts:
        t, (laid, _) = self.t, self.laid(pattern)
        scale = np.log2(np.array(sizes, float))
        ways = np.exp2(laid.classes @ scale)
        arithmetic = t.kernel_seconds / np.exp2(laid.kernels @ scale) / self._kernel_pieces
        traffic = t.kernel_bytes @ (1.0 / (ways * self._class_pieces)) / t.bandwidth
        each = np.maximum(arithmetic, traffic) + t.kernel_launch
        regions = len(t.regions)
        kernels = np.bincount(t.kernel_region, weights=each * t.kernel_trips, minlength=regions)
        blocking, calls = np.zeros(regions), np.zeros(regions)
        for op, axes, split, nbytes, trips, where, times in laid.calls:
            each = nbytes / 2.0 ** sum(scale[m] for m in split) / self.pieces
            np.add.at(blocking, where, trips * self.links.seconds(op, sizes, axes, each))
            np.add.at(calls, where, times * (each >= MOVED))
        return kernels, blocking, ways, calls

    def case(self, pattern: Pattern, sizes: tuple[int, ...], again: bool) -> Case:
        t, (laid, storing) = self.t, self.laid(pattern)
        kernels, blocking, ways, calls = self.fixed_parts(pattern, sizes)
        scale = np.log2(np.array(sizes, float))
        moments = self._active(ways)
        stored = np.zeros((len(t.alive), len(t.groups)))
        for c in np.flatnonzero(self._stored):
            stored[:, t.owner[c]] += t.alive[:, c]
        gathered, fixed = np.zeros(len(t.groups)), self._held(ways)
        for g, group in enumerate(t.groups):
            elements = sum(np.prod(self.program.arguments[i].shape, dtype=float) for i in group.leaves)
            trips = t.regions[group.forward] if group.layer is not None and again else 1
            by_rule = 2.0 ** float(laid.weights[g] @ scale)
            gathered[g] = elements * group.wire / by_rule / trips
            if self.pieces > 1:  # gradients are added up where they are made, in float32, from the first piece on
                fixed += 4.0 * elements / by_rule
                own = sum(self.program.arguments[i].nbytes for i in group.leaves)
                stored[:, g] = np.maximum(0.0, stored[:, g] - own)
            elif self.micro > 1:  # each piece's gradients and their sum, in float32 and whole but for the rules
                fixed += 2 * 4.0 * elements / by_rule
        options = storing.options(sizes, self.links, again)
        most = [max(o, key=lambda x: len(x.storage.params) + len(x.storage.state)).net for o in options]
        span = blocking + np.maximum(kernels, sum(most, np.zeros(len(kernels))))
        waits = np.divide(calls * np.array(t.regions), 2 * span, out=np.zeros(len(span)), where=span > 0)
        return Case(pattern, sizes, again, kernels, blocking, options, moments, stored, fixed, gathered, waits)
