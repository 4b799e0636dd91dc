"""Rings on a torus: how fast a group of its devices can go when all groups of an axis go at once.

A group that is a box (a product of evenly spaced positions per dimension) runs one ring per dimension it extends in,
all of them at once on different parts of the data (Jouppi et al., TPU v4, ISCA 2023; the bidirectional ring: JAX
scaling book, part 3). A side that closes through the wrap link goes both ways round, 2 links; an open side folds its
ring back, 1 link. Groups interleaved with stride s share each link s ways. Any other group is priced by routing its
ring over the links.
"""

from __future__ import annotations

import math

import numpy as np

from lensjax.topology.cluster import Tier


def link_rate(tier: Tier) -> float:
    """Bytes/s of one link in one direction: `bandwidth` is over 2 links per dimension."""
    return tier.usable / (2 * len(tier.shape))


def side_rate(tier: Tier, dim: int, extent: int, stride: int) -> float:
    """Bytes/s that a ring along one side gets: `extent` positions, `stride` apart, in dimension `dim`."""
    closed = tier.wrap[dim] and extent * stride == tier.shape[dim]
    return link_rate(tier) * (2 if closed else 1) / stride


def torus_seconds(tier: Tier, positions: np.ndarray, nbytes: float) -> float:
    """Seconds for groups of positions (int [groups, members], row-major within one torus) with `nbytes` per device."""
    if positions.shape[1] == 1:
        return 0.0
    coordinates = np.stack(np.unravel_index(positions, tier.shape), axis=-1)
    sides = _sides(tier, coordinates)
    if sides is not None:
        return nbytes / sum(side_rate(tier, d, n, s) for d, (n, s) in enumerate(sides) if n > 1)
    return _routed(tier, coordinates) * nbytes / link_rate(tier)


def _sides(tier: Tier, coordinates: np.ndarray) -> list[tuple[int, int]] | None:
    """(extent, stride) per dimension when all groups are boxes of one shape, else None."""
    members, sides = coordinates.shape[1], []
    for d in range(len(tier.shape)):
        ordered = np.sort(coordinates[:, :, d], axis=1)
        steps = np.diff(ordered, axis=1)
        extents = 1 + np.count_nonzero(steps, axis=1)
        moving = steps[steps > 0]
        stride = int(moving[0]) if len(moving) else 1
        # An open side that is adjacent only through the wrap link (0 and 15 of 16) is no box either.
        if (extents != extents[0]).any() or (moving != stride).any() or extents[0] * stride > tier.shape[d]:
            return None
        sides.append((int(extents[0]), stride))
    return sides if math.prod(n for n, _ in sides) == members else None


def _routed(tier: Tier, coordinates: np.ndarray) -> float:
    """Rings over the most loaded directed link, when each ring is routed dimension by dimension, the shorter way
    round.

    The two directions of each ring carry half of the data each.
    """
    load = np.zeros((len(tier.shape), 2, *tier.shape))
    start = coordinates.reshape(-1, len(tier.shape))
    stop = np.roll(coordinates, -1, axis=1).reshape(start.shape)
    for here, there in ((start, stop), (stop, start)):
        here = here.copy()
        for d, length in enumerate(tier.shape):
            ahead = there[:, d] - here[:, d]
            if tier.wrap[d]:
                ahead = (ahead + length // 2) % length - length // 2
            sign = np.sign(ahead)
            while (moving := sign * (there[:, d] - here[:, d]) % length != 0).any():
                where = tuple(here[moving].T)
                np.add.at(load[d], (np.where(sign[moving] > 0, 0, 1), *where), 0.5)
                here[moving, d] = (here[moving, d] + sign[moving]) % length
    return float(load.max())
