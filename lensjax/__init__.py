"""lensjax: a sharding compiler frontend for JAX.

    @lensjax.parallelize(cluster="dgx-h100:32")
    def train_step(state, batch): ...

The names are imported when they are first used, so that importing the package touches neither JAX nor a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lensjax._errors import (
    BatchError,
    CaptureWarning,
    ClusterError,
    CodecError,
    CompileError,
    DoesNotFit,
    LensjaxError,
    PartitionError,
    PlanError,
    ProcessError,
    StateError,
    TraceError,
    UnsupportedJax,
)

if TYPE_CHECKING:
    from lensjax.execute.parallelize import parallelize
    from lensjax.execute.processes import connect
    from lensjax.execute.reshard import reshard
    from lensjax.plan.plan import Plan
    from lensjax.program.rules import sharding_rule
    from lensjax.topology.cluster import Cluster

__version__ = "0.1.0"

_LAZY = {
    "parallelize": "lensjax.execute.parallelize",
    "connect": "lensjax.execute.processes",
    "reshard": "lensjax.execute.reshard",
    "Plan": "lensjax.plan.plan",
    "sharding_rule": "lensjax.program.rules",
    "Cluster": "lensjax.topology.cluster",
}

__all__ = [
    "BatchError",
    "CaptureWarning",
    "Cluster",
    "ClusterError",
    "CodecError",
    "CompileError",
    "DoesNotFit",
    "LensjaxError",
    "PartitionError",
    "Plan",
    "PlanError",
    "ProcessError",
    "StateError",
    "TraceError",
    "UnsupportedJax",
    "connect",
    "parallelize",
    "reshard",
    "sharding_rule",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'lensjax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
