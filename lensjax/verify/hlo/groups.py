"""Who talks to whom: replica groups in the three spellings of XLA, and source-target pairs.

    {{0,1},{2,3}}                                              lists
    [64,8]<=[8,8,8]T(2,1,0)                                    iota, version 2 (xla/hlo/ir/tile_assignment.h)
    mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}          mesh and axes, version 3 (xla/hlo/ir/mesh_and_axis.h)

Anything else raises UnknownGroups: a default ("everybody") would look plausible and be wrong.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from lensjax._errors import LensjaxError

_INTS = re.compile(r"\d+")
_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:,\s*device_ids=\((?P<ids>[^{]*)\))?\s*\{(?P<picked>[^}]*)\}",
)
_IOTA = re.compile(r"\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?")
_LISTS = re.compile(r"\{\s*(?:\{[\d,\s]*\}[,\s]*)*\}")
_AXIS = re.compile(r"'?([^'=,\s]+)'?=(\d+)")
_SUB_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


class UnknownGroups(LensjaxError, ValueError):
    """A spelling of device groups that is not known."""

    code = "unknown_groups"


def replica_groups(text: str, devices: int) -> np.ndarray | tuple[tuple[int, ...], ...]:
    """Groups from the text that follows `replica_groups=`: int [groups, members], or tuples where sizes differ.

    An empty list means one group of all devices. Raises UnknownGroups.
    """
    text = text.lstrip()
    for spelling in (_MESH, _IOTA, _LISTS):
        if found := spelling.match(text):
            return _parse(found.group(), devices)
    raise UnknownGroups(f"device groups spelled in a way that is not known: {text[:200]}")


@functools.lru_cache(maxsize=4096)
def _parse(text: str, devices: int) -> np.ndarray | tuple[tuple[int, ...], ...]:
    if found := _MESH.match(text):
        return _from_mesh(found)
    if found := _IOTA.match(text):
        dims, shape = _ints(found["dims"]), _ints(found["shape"])
        if math.prod(dims) != math.prod(shape) or len(shape) != 2:
            raise UnknownGroups(f"device groups that do not hold together: {text[:200]}")
        return _iota(dims, found["perm"]).reshape(shape)
    groups = [tuple(_ints(g)) for g in re.findall(r"\{([\d,\s]*)\}", text[1:-1])]
    groups = [g for g in groups if g]
    if not groups:
        return np.arange(devices).reshape(1, -1)
    return np.array(groups) if len({len(g) for g in groups}) == 1 else tuple(groups)


def _from_mesh(found: re.Match[str]) -> np.ndarray:
    axes = [(name, int(size)) for name, size in _AXIS.findall(found["axes"])]
    sizes = [size for _, size in axes]
    ids = _device_ids(found["ids"], math.prod(sizes))
    dims, kept = _split_sub_axes(axes, _SUB_AXIS.findall(found["picked"]))
    rest = [i for i in range(len(dims)) if i not in kept]
    members = math.prod(dims[i] for i in kept)
    return ids.reshape(dims).transpose(rest + kept).reshape(-1, members)


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    if found := re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?\s*", text.strip()):
        ids = _iota(_ints(found[2] or found[1]), found[3]).reshape(-1)
    else:
        ids = np.array(_ints(text))
    if sorted(ids.tolist()) != list(range(count)):
        raise UnknownGroups(f"device ids of a mesh of {count} are not a permutation: {text[:200]}")
    return ids


def _split_sub_axes(axes: list[tuple[str, int]], picked: list[tuple[str, str, str]]) -> tuple[list[int], list[int]]:
    """Dimensions with every picked sub-axis `'a':(pre)size` as one of its own, and which are picked, in order."""
    dims: list[int] = []
    where: dict[tuple[str, str, str], int] = {}
    for name, size in axes:
        parts = sorted((p for p in picked if p[0] == name), key=lambda p: int(p[1] or 1))
        done = 1
        for part in parts:
            pre, length = int(part[1] or 1), int(part[2] or size)
            if pre % done or size % (pre * length):
                raise UnknownGroups(f"sub-axis {part} of axis {name!r} with {size} devices")
            if pre > done:
                dims.append(pre // done)
            where[part] = len(dims)
            dims.append(length)
            done = pre * length
        if done < size or not parts:
            dims.append(size // done)
    if len(where) != len(picked):
        raise UnknownGroups(f"axes {[p[0] for p in picked]} picked of a mesh with {[a for a, _ in axes]}")
    return dims, [where[p] for p in picked]


def _iota(dims: list[int], perm: str | None) -> np.ndarray:
    ids = np.arange(math.prod(dims)).reshape(dims)
    if perm and sorted(_ints(perm)) != list(range(len(dims))):
        raise UnknownGroups(f"{perm} is no order of the dimensions {dims}")
    return ids.transpose(_ints(perm)) if perm else ids


def _ints(text: str) -> list[int]:
    return [int(n) for n in _INTS.findall(text)]


def source_target_pairs(text: str) -> np.ndarray:
    """int [pairs, 2] from the text that follows `source_target_pairs=`. Raises UnknownGroups."""
    found = _LISTS.match(text.lstrip())
    pairs = re.findall(r"\{\s*(\d+)\s*,\s*(\d+)\s*\}", found.group()) if found else []
    if found is None or (not pairs and _INTS.search(found.group())):
        raise UnknownGroups(f"source-target pairs spelled in a way that is not known: {text[:200]}")
    return np.array([(int(a), int(b)) for a, b in pairs], int).reshape(-1, 2)


def as_lists(groups: np.ndarray | tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Groups as plain lists."""
    return [list(map(int, g)) for g in groups]
