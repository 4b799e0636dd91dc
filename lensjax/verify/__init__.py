"""Proof: the real compiler for the real cluster, on a machine with no accelerator."""

from lensjax.verify.aot import compile_for
from lensjax.verify.artifact import Artifact, Memory
from lensjax.verify.devices import Layout, Target, compile_only, missing, target
from lensjax.verify.place import target_devices, target_of

__all__ = [
    "Artifact", "Layout", "Memory", "Target", "compile_for", "compile_only", "missing", "target", "target_devices",
    "target_of",
]  # fmt: skip
