"""All-gathers: of the whole where a share would do, hoisted out of the loop, or done twice."""

from __future__ import annotations

from collections.abc import Iterator

from lensjax.partition import Body, Node
from lensjax.verify.collectives import Collective
from lensjax.verify.facts import Facts
from lensjax.verify.finding import SMALL, Case, Finding, size
from lensjax.verify.hlo import Computation, Instruction, Module
from lensjax.verify.hlo.shapes import total_bytes
from lensjax.verify.lines import where
from lensjax.verify.traffic import mesh_axes, step_bytes

_MATMULS = ("stablehlo.dot_general", "stablehlo.convolution")
# They keep an array's elements: what comes out is still the parameter.
_SAME = frozenset(
    f"stablehlo.{n}"
    for n in "convert reshape transpose slice dynamic_slice broadcast_in_dim optimization_barrier".split()
) | {"all_slice", "all_gather", "sdy.sharding_constraint", "stablehlo.custom_call"}
_ENDS = ("stablehlo.reduce", "all_slice", "stablehlo.gather", "stablehlo.reduce_window")


def gathered_whole(case: Case) -> Iterator[Finding]:
    """A split tensor gathered along an axis that does not split the batch, and not for a matmul that needs it whole.

    Two ways: an activation (the logits) that is only reduced or sliced again afterwards, and a tensor-parallel weight.
    """
    facts = case.facts
    if facts is None:
        return
    weights = parameter_values(facts)
    for node, times, body in facts.walk():
        if node.name != "all_gather" or not node.outputs or times * 1 == 0:
            continue
        out = facts.parts.values[node.outputs[0]]
        source = facts.parts.values[node.inputs[0]]
        sent = times * (out.bytes - source.bytes)
        if sent < SMALL * case.total_sent or not _compiled(case, node):
            continue
        along = {a.partition(":")[0] for a in node.axes}
        if node.inputs[0] in facts.batch:
            dims = [d for d, (a, b) in enumerate(zip(source.spec, out.spec)) if a != b]
            if facts.data and not set(dims) & set(facts.batch[node.inputs[0]]) and only_shares(facts, body, node):
                yield _whole(node, sent, out.bytes, f"activation {list(out.shape)}", along, "pin it to stay split here")
        elif node.inputs[0] in weights and facts.data and not along & set(facts.data):
            yield _whole(
                node, sent, out.bytes, f"weight {list(out.shape)}", along,
                "it is stored split along an axis that its matmul does not use: pin its use to the same axis",
            )  # fmt: skip


def _whole(node: Node, sent: float, held: float, what: str, along: set[str], hint: str) -> Finding:
    axes = " and ".join(repr(a) for a in sorted(along))
    return Finding(
        "gathered_whole", "warning", node.source, sent,
        f"{what} is gathered whole along {axes}: {size(sent)} on the wire per step and {size(held)} of memory on each "
        "device",
        hint + ", for example jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(...)))",
    )  # fmt: skip


def _compiled(case: Case, node: Node) -> bool:
    """True when the compiled program has such a gather from that line: the partitioner's word alone is a guess."""
    along = {a.partition(":")[0] for a in node.axes}
    for c in case.found.collectives:
        if c.kind in ("all-gather", "all-to-all", "all-reduce") and set(mesh_axes(c.groups, case.mesh)) & along:
            if where(c.stack).startswith(node.source) or node.op_name == c.op_name:
                return True
    return False


def parameter_values(facts: Facts) -> set[int]:
    """Values that are a parameter (or a layer's slice of one), perhaps in another type or order."""
    found: set[int] = set()
    if facts.program is None:
        return found
    for leaf, argument in enumerate(facts.program.arguments):
        if argument.role == "parameter" and leaf in facts.kept:
            found.add(facts.parts.body.arguments[facts.kept.index(leaf)])
    _spread(facts.parts.body, found)
    return found


def _spread(body: Body, found: set[int]) -> None:
    for node in body.nodes:
        if node.name == "stablehlo.while":
            for operand, inner in zip(node.inputs, node.bodies[0].arguments):
                if operand in found:
                    found.add(inner)
        for inner in node.bodies:
            _spread(inner, found)
        if node.name in _SAME and node.inputs and node.inputs[0] in found:
            found.update(node.outputs)


def only_shares(facts: Facts, body: Body, gather: Node) -> bool:
    """True when no matmul reads a gathered value whole: all its readers reduce it or slice it again."""
    readers: dict[int, list[Node]] = {}
    for node in body.nodes:
        for v in node.inputs:
            readers.setdefault(v, []).append(node)
    shape = facts.parts.values[gather.outputs[0]].shape
    todo, seen, read = [gather.outputs[0]], set(), False
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        for node in readers.get(value, ()):
            read = True
            if node.name in _MATMULS or node.bodies:
                return False
            if node.name in _ENDS:
                continue
            todo.extend(v for v in node.outputs if facts.parts.values[v].shape == shape)
    return read


def gather_hoisted(case: Case) -> Iterator[Finding]:
    """All layers' weights gathered at once before a loop that uses one layer at a time."""
    total, worst, most = 0.0, None, 0.0
    for computation in case.module.computations.values():
        loops = [i for i in computation.instructions if i.opcode == "while" and (i.trip_count or 0) > 1]
        if not loops:
            continue
        # A body may run several layers (scan's `unroll`): the stack is then a small multiple of the loop's runs.
        trips = {(loop.trip_count or 0) * layers for loop in loops for layers in range(1, 9)}
        for c in case.found.collectives:
            if c.kind != "all-gather" or c.computation != computation.name:
                continue
            stacked = [s for s in c.operands if s.dims and s.dims[0] in trips and len(s.dims) > 1]
            held = total_bytes(tuple(stacked)) * c.members
            if not held or not reaches_loop(computation, computation.by_name[c.name]):
                continue
            total += held
            if held > most:
                worst, most = c, held
    if worst is not None and total > SMALL * case.peak:
        yield Finding(
            "gather_hoisted", "warning", where(worst.stack), total,
            f"the weights of all layers are gathered at once before the loop over the layers: {size(total)} of memory "
            "on each device where one layer's would do",
            "gather (or constrain) each layer's weights inside the loop's body",
        )  # fmt: skip


def reaches_loop(computation: Computation, start: Instruction) -> bool:
    """True when a value goes into a loop, itself or moved or converted."""
    moves = ("tuple", "bitcast", "copy", "get-tuple-element", "convert", "reshape", "transpose")
    todo, seen = [start], {start.name}
    while todo:
        at = todo.pop()
        for user in computation.users.get(at.name, ()):
            if user.opcode == "while":
                return True
            keeps = user.opcode == "fusion" and _elements(user) == _elements(at)
            if user.name not in seen and (user.opcode in moves or keeps or user.opcode.endswith("-done")):
                seen.add(user.name)
                todo.append(user)
    return False


def _elements(instruction: Instruction) -> int:
    return sum(s.elements for s in instruction.shapes)


def gathered_twice(case: Case) -> Iterator[Finding]:
    """The same stored value gathered more than once by the same part of the step."""
    groups: dict[tuple, list[Collective]] = {}
    for c in case.found.collectives:
        if c.kind != "all-gather" or len(c.operands) != 1:
            continue
        computation = case.module.computations[c.computation]
        source = stored(case.module, computation, next(computation.operands(computation.by_name[c.name]), None))
        if source:
            groups.setdefault((c.computation, source, c.groups.tobytes(), c.operands[0].elements), []).append(c)
    again = [cs for cs in groups.values() if len(cs) > 1]
    total = sum(step_bytes(c) for cs in again for c in cs[1:])
    if total > SMALL * max(case.total_sent, 1.0):
        worst = max(again, key=lambda cs: step_bytes(cs[0]))
        yield Finding(
            "gathered_twice", "warning", where(worst[-1].stack), total,
            f"the same value is gathered {len(worst)} times in one pass: {size(total)} per step on each device for "
            "nothing",
            "gather it once and use it twice (a barrier or a second constraint keeps the compiler from it)",
        )  # fmt: skip


def stored(module: Module, computation: Computation, at: Instruction | None) -> str:
    """The name of the value that a moved or converted value comes from."""
    for _ in range(12):
        if at is None:
            return ""
        single = [o for o in computation.operands(at) if o.shapes and o.shapes[0].dims]
        moving = at.opcode in ("bitcast", "copy", "convert", "reshape", "transpose", "dynamic-slice")
        if not moving and not (at.opcode == "fusion" and len(single) == 1):
            return at.name if at.opcode in ("parameter", "get-tuple-element", "while") else ""
        at = single[0] if single else None
    return ""
