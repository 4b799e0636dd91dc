"""Replica groups of hand-written collectives (a user's `shard_map`) as mesh axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from lensjax._errors import PartitionError
from lensjax.partition.data import Axes


def axes_of_groups(attribute: str, text: str, mesh: Mapping[str, int]) -> Axes:
    """The mesh axes along which the members of each group differ.

    attribute: `replica_groups`, or `source_target_pairs` (then: the axes that the pairs move along).
    text: the `dense<...>` of group members, positions in the flattened mesh, or the mesh axes by name.
    Raises PartitionError for a form that is not read, or for groups that are not a product of mesh axes.
    """
    if (
        "replica_group_mesh_axes" in text
    ):  # jax 0.12 names the axes: mesh = @mesh, axes = [#stablehlo.axis_ref<name = "b">]
        named = re.findall(r'axis_ref<name = "([^"]+)"(>|, sub_axis_info = \((\d+)\)(\d+)>)', text)
        if len(named) == text.count("axis_ref<"):
            return tuple(name if end == ">" else f"{name}:({pre}){size}" for name, end, pre, size in named)
    shape = re.search(r"tensor<(\d+)x(\d+)xi64>", text)
    numbers = _integers(text.split("tensor<")[0])
    if not shape or len(numbers) not in (1, int(shape[1]) * int(shape[2])):
        raise PartitionError(f"unknown form of replica groups: {text[:200]}")
    if len(numbers) == 1:  # a splat: one group of one
        numbers *= int(shape[1]) * int(shape[2])
    groups = np.array(numbers).reshape(int(shape[1]), int(shape[2]))
    where = np.stack(np.unravel_index(groups, tuple(mesh.values())), -1)
    moves = (where != where[:, :1]).any((0, 1))
    axes = tuple(axis for axis, moved in zip(mesh, moves) if moved)
    if attribute == "replica_groups" and math.prod(mesh[a] for a in axes) != groups.shape[1]:
        raise PartitionError(f"replica groups {groups.tolist()[:4]} are not along axes of the mesh {dict(mesh)}")
    return axes


def _integers(text: str) -> list[int]:
    """The 64-bit integers of `dense<[[0, 1], [2, 3]]>`, or of the bytes in which more than a hundred are printed."""
    if as_bytes := re.search(r'dense<"0x([0-9A-Fa-f]*)">', text):
        return np.frombuffer(bytes.fromhex(as_bytes[1]), "<i8").tolist()
    return [int(n) for n in re.findall(r"-?\d+", text)]
