"""What a compile gives back, as data: the optimised HLO, the memory it takes, and what the compiler said."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device of a compiled step. `peak` is what must fit: arguments, temporaries and outputs not aliased."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    code: int = 0
    host_arguments: int = 0
    host_outputs: int = 0
    host_aliased: int = 0
    host_temporaries: int = 0

    @property
    def host(self) -> int:
        """Bytes of host memory that offload uses."""
        return self.host_arguments + self.host_outputs - self.host_aliased + self.host_temporaries

    @staticmethod
    def of(stats: Any) -> Memory:
        """From XLA's CompiledMemoryStats."""
        sums = {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
        }
        peak = getattr(stats, "peak_memory_in_bytes", 0)
        # XLA counts what it is given and gives back on the host as well.
        peak -= stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        parts = sums["arguments"] + sums["outputs"] - sums["aliased"] + sums["temporaries"]
        return Memory(
            **sums,
            peak=peak if peak >= sums["temporaries"] else parts,  # XLA:CPU leaves the temporaries out of its peak
            code=stats.generated_code_size_in_bytes,
            host_arguments=stats.host_argument_size_in_bytes,
            host_outputs=stats.host_output_size_in_bytes,
            host_aliased=stats.host_alias_size_in_bytes,
            host_temporaries=stats.host_temp_size_in_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A compiled step.

    backend:     "cuda", "tpu" or "cpu", whose compiler made it
    target:      the device compiled for ("h100-80gb")
    devices:     number of devices
    hlo:         the optimised, scheduled HLO text of one device
    memory:      bytes per device
    assignment:  XLA's text of which buffer sits where, "" where the backend gives none
    liveness:    XLA's text of when each buffer lives, "" where the backend gives none
    log:         what the compiler wrote to standard error
    notes:       what this compile does not prove, one sentence each
    seconds:     time of the compile
    options:     XLA flags it was compiled with
    """

    backend: str
    target: str
    devices: int
    hlo: str
    memory: Memory
    assignment: str = ""
    liveness: str = ""
    log: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(compiled: Any, *, backend: str, target: str = "", notes: tuple[str, ...] = ()) -> Artifact:
        """From a `jax.stages.Compiled` of this process. What the compiler wrote, and buffers by name, are not in it."""
        import jax

        devices = {d for s in jax.tree.leaves(compiled.input_shardings) for d in s.device_set}
        return Artifact(
            backend, target or backend, max(len(devices), 1), compiled.as_text(), Memory.of(compiled.memory_analysis()),
            notes=notes,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Artifact:
        known = {f.name for f in dataclasses.fields(Artifact)}
        made = {k: v for k, v in data.items() if k in known}
        made["memory"] = Memory(**made["memory"])
        made["notes"] = tuple(made.get("notes", ()))
        made["options"] = tuple((k, v) for k, v in made.get("options", ()))
        return Artifact(**made)


def bytecode(lowered: Any) -> bytes:
    """The StableHLO of a jax Lowered with its source lines, as MLIR bytecode."""
    out = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(out)
    return out.getvalue()
