"""Running a small step whole and in shares, and how far apart the two are."""

from __future__ import annotations

import jax
import numpy as np

from lensjax.execute.place import device_mesh
from lensjax.passes.emit import emit
from lensjax.plan.plan import Axis, MeshPlan, Micro, Plan, Reduce, Rules
from lensjax.program.program import Program, analyze

# Programs that run once: compile fast, whatever comes out.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def micro(count: int, devices: int = 1, share: int | None = None) -> Plan:
    """Micro-batches on `devices` that split the batch."""
    return Plan(
        MeshPlan((Axis("data", devices),)), rules=Rules(activations={"batch": ("data",)}), micro=Micro(count, share)
    )


def nodes(count: int, inside: int = 1, shares: int = 1) -> Plan:
    """A node split over `count` nodes of `inside` devices, in `shares` micro-batches."""
    return Plan(
        MeshPlan((Axis("node", count, "net"), Axis("gpu", inside, "node"))),
        rules=Rules(activations={"batch": ("node", "gpu")}),
        micro=Micro(shares),
        reduce={"net": Reduce(split=True)},
    )


def between_nodes(proof, width: int = 8) -> tuple[list, list]:
    """Collectives of a compiled plan that leave a node of `width` devices; those of them that carry no codes."""
    across = [c for c in proof.audit.found.collectives if len({int(g) // width for g in c.groups[0]}) > 1]
    return across, [c for c in across if not set(c.dtypes) <= {"u8", "s8", "u16"}]


def program(step, args, **options) -> Program:
    return analyze(step, args, **({"batch_argnums": 1} | options))


def run(p: Program, plan: Plan, reduce=None) -> list[np.ndarray]:
    """The step's flat results under a plan, on real (emulated) devices."""
    mesh = device_mesh(plan.mesh, jax.devices()[: plan.mesh.size])
    emitted = emit(p, plan, mesh) if reduce is None else emit(p, plan, mesh, reduce)
    assert not any("left to the compiler" in note for note in emitted.notes), emitted.notes
    shardings = {"in_shardings": list(emitted.arguments), "out_shardings": list(emitted.results)}
    jitted = jax.jit(emitted.run, compiler_options=QUICK, **shardings)
    return numbers(jitted(*p.call.leaves, *p.captured))


def plain(step, *args, **kwargs) -> list[np.ndarray]:
    """The whole step's flat results, on one device."""
    return numbers(jax.tree.leaves(jax.jit(step, compiler_options=QUICK)(*args, **kwargs)))


def numbers(leaves) -> list[np.ndarray]:
    out = []
    for x in leaves:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        out.append(np.asarray(x).astype(np.float64))
    return out


def apart(mine: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference of a result over its own largest entry."""
    worst = 0.0
    for x, y in zip(mine, expected, strict=True):
        assert x.shape == y.shape
        if x.size:
            finite = np.isfinite(y)
            assert (np.isfinite(x) == finite).all()
            scale = max(np.abs(y[finite]).max(initial=0), 1e-3)
            worst = max(worst, float(np.abs(np.where(finite, x - y, 0)).max() / scale))
    return worst
