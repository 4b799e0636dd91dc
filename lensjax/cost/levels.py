"""What each level of each layer would hold and take, read from the program.

For one layer, at one level: the bytes kept from its forward to its backward, the bytes that are there while its
backward runs, and the seconds that it adds. Everything is per device under the plan's mesh. These are the search's
inner figures; what it chooses is priced whole, by `lensjax.cost.price`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from lensjax.cost.compute import MEMORY_EFFICIENCY
from lensjax.passes.pin import activation_rules
from lensjax.passes.recompute import layers_at
from lensjax.passes.recompute_layers import Layer
from lensjax.passes.shardings import batch_axes, resolve, ways
from lensjax.plan.plan import Plan
from lensjax.program.edit import all_equations
from lensjax.program.program import Program
from lensjax.program.values import is_solid, multiplications, nbytes
from lensjax.topology.cluster import Cluster, Device


@dataclasses.dataclass(frozen=True)
class Option:
    """A way to treat a group of layers. `level`: as the plan spells it. Bytes per device: `kept` from the end of the
    group's forward to the start of its backward, `need` at most during its backward (what was kept before it not
    included). `seconds` per step that it adds; `host`: bytes in host memory."""

    level: str
    kept: float
    need: float
    seconds: float
    host: float = 0.0


@dataclasses.dataclass(frozen=True)
class Group:
    """A layer, or a stack of `count` scanned ones, with its options; the first is always "keep"."""

    name: str
    count: int
    options: tuple[Option, ...]


def groups(program: Program, plan: Plan, cluster: Cluster) -> tuple[Group, ...]:
    """The groups of layers whose level the plan may choose, in forward order; empty where there is none (the step has
    no layers, or recomputes them itself)."""
    shardings = resolve(program, plan)
    named = any(e.primitive.name == "name" for e in all_equations(program.jaxpr))
    kinds = ["inputs", "dots", "scores", *(["named"] if named else []), "offload"]
    at = lambda kind: _merged(layers_at(program, plan.replace(layers={"*": kind}), shardings))
    tables = {"inputs": at("inputs")}
    if not any(name and layer.again for name, layer in tables["inputs"].items()):
        return ()
    tables |= {kind: at(kind) for kind in kinds[1:]}
    whole = _merged(layers_at(program, plan.replace(layers={"*": "keep"}), shardings))
    share = share_of(program, plan)
    found = []
    for name, first in tables["inputs"].items():
        if not first.again or not name:
            continue
        keep = _keep(first, whole.get(name), share)
        options = [keep]
        for kind in kinds:
            layer = tables[kind].get(name)
            if layer is not None and layer.again and (kind != "offload" or layer.host):
                option = _option(kind, layer, share, cluster.device)
                if option is not None:
                    options.append(option)
        found.append(Group(name, first.count, tuple(options)))
    return tuple(found)


def kept(program: Program, plan: Plan) -> dict[str, float]:
    """Bytes per device that one layer of each group keeps for its backward, at the level that the plan gives it."""
    share = share_of(program, plan)
    layers = _merged(layers_at(program, plan, resolve(program, plan)))
    return {name: sum(map(share, layer.kept)) for name, layer in layers.items()}


def _merged(layers: Sequence[Layer]) -> dict[str, Layer]:
    """Parts of one name as one layer."""
    found: dict[str, Layer] = {}
    for x in layers:
        if x.name in found and found[x.name].count == x.count:
            y = found[x.name]
            pairs = {f: getattr(y, f) + getattr(x, f) for f in ("kept", "dropped", "again", "host", "work")}
            found[x.name] = dataclasses.replace(y, **pairs)
        else:
            found.setdefault(x.name, x)
    return found


def share_of(program: Program, plan: Plan) -> Callable[[Any], float]:
    """Bytes of a value on one device, as far as the plan's rules for activations say."""
    parts, rules = ways(plan, batch_axes(plan)), activation_rules(program, plan)
    if not rules:
        return lambda v: nbytes(v) / (parts if v in program.batch.dims else 1)
    logical = program.logical

    def share(v: Any) -> float:
        split: set[str] = set()  # a mesh axis splits one dimension of a value, as in the pin pass
        for axis, mesh in rules:
            for d, n in enumerate(getattr(v.aval, "shape", ())):
                free = tuple(a for a in mesh if a not in split)
                if free and logical.major(v, d) == axis and n % ways(plan, free) == 0:
                    split.update(free)
        return nbytes(v) / ways(plan, tuple(split))

    return share


def _keep(first: Layer, whole: Layer | None, share: Callable[[Any], float]) -> Option:
    values = whole.kept if whole is not None else (*first.kept, *first.dropped)
    held = sum(map(share, values))
    return Option("keep", held, held, 0.0)


def _option(kind: str, layer: Layer, share: Callable[[Any], float], device: Device) -> Option | None:
    held, dropped = sum(map(share, layer.kept)), sum(map(share, layer.dropped))
    # What is made again in passing (element-wise) costs at least one more pass over it.
    again = work_seconds(layer.again, share, device) + dropped / (device.memory_bandwidth * MEMORY_EFFICIENCY)
    host = sum(map(share, layer.host))
    if host:
        forward = work_seconds(layer.work, share, device)
        if not hidden(host, forward, again, device):
            return None
    # An offloaded input is there while its own layer and the one after it run backwards: it is fetched one ahead.
    return Option(kind, held, held + dropped + 2 * host, again, host)


def hidden(host: float, forward: float, again: float, device: Device) -> bool:
    """Whether a layer's copy to the host takes no longer than its forward, and the copy back no longer than its
    backward (twice the forward, and what is made again). `host`: bytes; `forward`, `again`: seconds."""
    if not device.host_bandwidth or device.platform == "cpu":
        return False
    seconds = host / device.host_bandwidth
    return seconds <= forward and seconds <= 2 * forward + again


def work_seconds(eqns: Sequence[Any], share: Callable[[Any], float], device: Device) -> float:
    """Seconds of equations on one device: each that stores its result takes as long as its arithmetic or its memory
    traffic, whichever is longer."""
    total = 0.0
    for eqn in eqns:
        if not is_solid(eqn):
            continue
        traffic = sum(share(a) for a in (*eqn.invars, *eqn.outvars) if hasattr(a.aval, "shape"))
        size = sum(map(nbytes, eqn.outvars))
        part = sum(map(share, eqn.outvars)) / size if size else 1.0
        dtype = str(eqn.outvars[0].aval.dtype) if eqn.outvars else "float32"
        rate = device.achievable_flops(dtype if dtype in device.peak else "float32")
        total += max(multiplications(eqn) * part / rate, traffic / (device.memory_bandwidth * MEMORY_EFFICIENCY))
    return total


def stacked(group: Group, parts: int = 2) -> Group:
    """A stack's options with those that give its layers two levels: the first `n` one, the rest another. A group of
    one layer is what it was."""
    single = [_times(o, group.count) for o in group.options]
    if group.count == 1 or parts < 2:
        return dataclasses.replace(group, options=tuple(single))
    mixed = []
    for a in group.options:
        for b in group.options:
            if a is b or a.kept >= b.kept:
                continue  # what is held longest comes first in the backward: the later layers keep more
            for n in range(1, group.count):
                first, rest = _times(a, n), _times(b, group.count - n)
                level = f"{a.level}*{n}+{b.level}*{group.count - n}"
                need = max(first.need, first.kept + rest.need)
                held, seconds = first.kept + rest.kept, first.seconds + rest.seconds
                mixed.append(Option(level, held, need, seconds, first.host + rest.host))
    return dataclasses.replace(group, options=(*single, *mixed))


def _times(option: Option, count: int) -> Option:
    """`count` equal layers at one level, one after the other."""
    return Option(
        option.level,
        option.kept * count,
        option.kept * (count - 1) + option.need,
        option.seconds * count,
        option.host * count,
    )
