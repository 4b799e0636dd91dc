"""Closed forms of what presets send, and a cluster of 2 x 4 H100 to compile for without a GPU."""

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from lensjax.topology.cluster import Cluster
from lensjax.verify import target_devices

_NODE, _RAIL = Cluster.parse("dgx-h100:2").tiers[:2]
CLUSTER = dataclasses.replace(
    Cluster.parse("dgx-h100:2"),
    name="2x4 H100",
    tiers=(dataclasses.replace(_NODE, size=4), dataclasses.replace(_RAIL, size=8, nic_sharing=1)),
)


def mesh_on(plan, platform):
    """The plan's mesh on compile-only H100s ("cuda") or on emulated devices ("cpu")."""
    devices = target_devices(CLUSTER) if platform == "cuda" else jax.devices()
    axes = plan.mesh.axes
    grid = np.array(devices, dtype=object).reshape([a.size for a in axes])
    return Mesh(grid, tuple(a.name for a in axes), axis_types=(AxisType.Auto,) * len(axes))


def split_and_whole(program, plan):
    """(bytes of the parameters that are split, bytes of those that stay whole)."""
    split = sum(program.arguments[i].nbytes for i in program.parameters if program.arguments[i].path in plan.leaves)
    return split, sum(program.arguments[i].nbytes for i in program.parameters) - split


def fsdp_bytes(program, plan, gather, n):
    """Bytes sent per device: gathers and reduce-scatters of split weights, all-reduces of the gradients of whole
    ones."""
    layers = {i for layer in program.layers for i in layer.parameters}
    total = 0.0
    for i in program.parameters:
        a = program.arguments[i]
        if a.path not in plan.leaves:
            total += 2 * (n - 1) / n * a.nbytes
        else:
            total += (3 if gather == "again" and i in layers else 2) * (n - 1) / n * a.nbytes
    return total
