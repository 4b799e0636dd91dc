"""`lint`: the audit of any jitted, hand-sharded step, for people who do not use the planner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from lensjax._errors import LensjaxError, PartitionError, UnsupportedJax, UsageError
from lensjax.topology.cluster import Cluster
from lensjax.verify.aot import compile_for
from lensjax.verify.audit import Audit, audit
from lensjax.verify.facts import Facts, facts
from lensjax.verify.place import target_of

DEFAULT = "dgx-h100"  # the cluster of a lint that names none: as many nodes of it as the mesh fills


def lint(
    step: Any,
    args: tuple[Any, ...],
    *,
    cluster: Cluster | str | None = None,
    backend: str | None = None,
    flags: Mapping[str, Any] | str | None = None,
    time_limit: float = 600.0,
) -> Audit:
    """Compiles `step(*args)` for a cluster and says what is wrong with its sharding.

    `step`: a function under `jax.jit` (a plain one is jitted, which donates nothing). `args`: arrays or
    `jax.ShapeDtypeStruct`s, whose NamedShardings count; their mesh may be of emulated devices or abstract, and its
    device order is taken for that of the cluster. `cluster`: default as many nodes of 8 H100 as the mesh fills.
    Raises UsageError when no argument is sharded, CompileError as `compile_for`.
    """
    step = step if hasattr(step, "trace") else jax.jit(step)
    mesh = mesh_of(args)
    count = math.prod(mesh.shape.values())
    where = Cluster.parse(cluster) if cluster is not None else default_cluster(count)
    if count > where.devices:
        raise UsageError(
            f"the step's mesh has {count} devices, {where.name} has {where.devices}", hint="name a larger cluster"
        )
    known = _facts(step, args, where, backend)
    artifact = compile_for(
        step.trace(*args), where, backend=backend, order=order_of(mesh), flags=flags, time_limit=time_limit
    )
    return audit(artifact, mesh=dict(mesh.shape), cluster=where, order=order_of(mesh), facts=known)


def _facts(step: Any, args: tuple[Any, ...], cluster: Cluster, backend: str | None) -> Facts | None:
    try:
        platform = backend or target_of(cluster.device).platform
    except LensjaxError:
        platform = "cpu"
    try:
        return facts(step, args, platform)
    except (PartitionError, UnsupportedJax):
        return None  # what the compiled program shows is still audited


def mesh_of(args: Any) -> Any:
    """The mesh of the NamedShardings on the arguments. Raises UsageError where there is none, or more than one."""
    found = []
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh not in found:
            found.append(sharding.mesh)
    shapes = {tuple(m.shape.items()) for m in found}
    if len(shapes) == 1:
        return found[0]
    hint = "put jax.sharding.NamedSharding on the arguments (jax.ShapeDtypeStruct(shape, dtype, sharding=...))"
    if not shapes:
        raise UsageError("no argument has a NamedSharding: there is nothing to lint", hint=hint)
    raise UsageError(f"the arguments are on different meshes: {sorted(shapes)}", hint=hint)


def order_of(mesh: Any) -> list[int] | None:
    """Device id of each mesh position; None (in order) for an abstract mesh or ids that do not count from 0."""
    devices = None if isinstance(mesh, AbstractMesh) else getattr(mesh, "devices", None)
    if devices is None:
        return None
    ids = [d.id for d in devices.flat]
    return ids if sorted(ids) == list(range(len(ids))) and ids != sorted(ids) else None


def default_cluster(count: int) -> Cluster:
    """As many whole nodes of the default machine as hold `count` devices."""
    per_node = Cluster.parse(f"{DEFAULT}:1").devices
    return Cluster.parse(f"{DEFAULT}:{math.ceil(count / per_node)}")
