"""When a compiled schedule fetches what waits in the host's memory."""

from __future__ import annotations

import dataclasses

from lensjax.topology.cluster import Device
from lensjax.verify.hlo import Computation, Module
from lensjax.verify.hlo.shapes import HOST_SPACE
from lensjax.verify.roofline import Efficiency, seconds
from lensjax.verify.work import work


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A copy from the host. `ahead`: seconds of compute between its start and the point at which the schedule waits for
    it; `bytes`; `handed`: the loop's body hands it to its next trip; `looped`: it is in a loop's body."""

    name: str
    bytes: int
    ahead: float
    handed: bool
    looped: bool

    def hidden(self, device: Device) -> bool:
        """Whether the host link carries it in that time."""
        return bool(device.host_bandwidth) and self.bytes / device.host_bandwidth <= self.ahead


def fetches(module: Module, device: Device) -> tuple[Fetch, ...]:
    """Every asynchronous copy from the host of the entry computation and of loops' bodies."""
    bodies = {(i.attr("body") or "").lstrip("%") for c in module.computations.values() for i in c.instructions}
    found = []
    for name, computation in module.computations.items():
        if name == module.entry_name or name in bodies:
            found += _of(module, computation, device, name in bodies)
    return tuple(found)


def _of(module: Module, computation: Computation, device: Device, looped: bool) -> list[Fetch]:
    clock, started, found = 0.0, {}, []
    for instruction in computation.instructions:
        if instruction.opcode.endswith("-start"):
            if _from_host(computation, instruction.operands):
                started[instruction.name] = clock
            continue
        before = instruction.operands[0] if instruction.operands else ""
        if instruction.opcode.endswith("-done") and before in started and not _on_host(instruction):
            views = _seen(computation, instruction.name)
            read = [i for i in computation.instructions if i.name not in views and views & set(i.operands)]
            handed = looped and all(i.root for i in read)
            found.append(Fetch(instruction.name, instruction.bytes, clock - started[before], handed, looped))
        elif not instruction.opcode.endswith("-done"):
            clock += seconds(work(module, computation, instruction), device, Efficiency())
    return found


def _seen(computation: Computation, name: str) -> set[str]:
    """A value, and it under other shapes or copied."""
    views = {name}
    for i in computation.instructions:
        if i.opcode in ("bitcast", "copy", "get-tuple-element") and views & set(i.operands):
            views.add(i.name)
    return views


def _from_host(computation: Computation, operands: tuple[str, ...]) -> bool:
    return bool(operands) and operands[0] in computation.by_name and _on_host(computation.by_name[operands[0]])


def _on_host(instruction) -> bool:
    return any(s.space == HOST_SPACE for s in instruction.shapes)
