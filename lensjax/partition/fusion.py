"""Which values exist in memory: a model of XLA's fusion, on data.

XLA computes chains of element-wise, broadcasting, slicing and reducing operations in one pass over memory, and repeats
a cheap producer inside each consumer rather than storing it. So a value is *stored* when an operation that needs a real
buffer reads it (a matmul, a collective, a loop), when it leaves its body, when a reduction made it, or when several
consumers would each have to repeat more reading than its own size (XLA's priority fusion weighs exactly that:
xla/service/gpu/transforms/priority_fusion.cc).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from lensjax.partition.data import Body, Node, Value
from lensjax.partition.simplify import COLLECTIVES
from lensjax.partition.text import integers

# The result is the operand's buffer, read differently.
ALIASES = frozenset(
    ["stablehlo.reshape", "stablehlo.optimization_barrier", "stablehlo.bitcast_convert", "stablehlo.get_tuple_element",
     "stablehlo.tuple", "stablehlo.create_token", "stablehlo.after_all"]
)  # fmt: skip
# Made where needed, never read from memory.
FREE = frozenset(["stablehlo.constant", "stablehlo.iota", "stablehlo.partition_id", "stablehlo.replica_id"])
# Operations that read and write real buffers; everything else fuses.
KERNELS = frozenset(
    ["stablehlo.dot_general", "stablehlo.convolution", "stablehlo.custom_call", "stablehlo.scatter", "stablehlo.sort",
     "stablehlo.fft", "stablehlo.rng_bit_generator", "stablehlo.reduce_window", "stablehlo.select_and_scatter",
     "stablehlo.cholesky", "stablehlo.triangular_solve", "stablehlo.while", "stablehlo.case", "stablehlo.if",
     "stablehlo.rng", "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv",
     "sdy.manual_computation", "stablehlo.dynamic_update_slice", "stablehlo.composite", "chlo.top_k",
     "chlo.ragged_dot", "stablehlo.batch_norm_training", "stablehlo.batch_norm_grad", *COLLECTIVES]
)  # fmt: skip
# These read only as much of their first operand as they return.
SLICING = frozenset(["stablehlo.slice", "stablehlo.dynamic_slice", "stablehlo.gather", "all_slice"])


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Where values of a body live: `root` follows aliases, `stored` are roots with a buffer, `maker` their node,
    `users` the positions of the nodes that read them. `generated` values come from constants alone: whoever can fuse
    them makes them again, so only an operation that needs a buffer reads one. `rows`: values that come out of a kernel
    over whole rows (see `_row_kernels`). `read`: what `sources` found, by the identity of the node."""

    root: dict[int, int]
    stored: Set[int]
    maker: dict[int, Node]
    users: dict[int, list[int]]
    generated: frozenset[int]
    rows: frozenset[int] = frozenset()
    read: dict[int, Mapping[int, float]] = dataclasses.field(default_factory=dict, repr=False)

    def buffer(self, value: int) -> int:
        return self.root.get(value, value)


class Fusions:
    """`fuse` of the bodies of one program (`body` and those inside it), each looked at once: its schedule and its
    memory both ask."""

    def __init__(self, values: tuple[Value, ...], body: Body):
        self.values = values
        self.generated = frozenset(_generated(body, set()))
        self._found: dict[int, tuple[Body, Fusion]] = {}  # by identity: bodies are large, and kept here

    def __call__(self, body: Body) -> Fusion:
        if id(body) not in self._found:
            self._found[id(body)] = body, fuse(body, self.values, self.generated)
        return self._found[id(body)][1]


def _generated(body: Body, known: set[int]) -> set[int]:
    """Values of a body and of those inside it that come from constants alone, where `known` do."""
    for node in body.nodes:
        if node.name in FREE or (node.inputs and node.name not in KERNELS and known.issuperset(node.inputs)):
            known.update(node.outputs)
        for inner in node.bodies:
            _generated(inner, known)
    return known


def fuse(body: Body, values: Sequence[Value], generated: frozenset[int]) -> Fusion:
    """The fusion model of one body; nested bodies have their own, and read outer values as stored ones, except those
    that constants make (`generated`, of the whole program)."""
    root, maker, copied = _roots(body, values)
    users: dict[int, list[int]] = defaultdict(list)
    needed = {root.get(v, v) for v in body.results} | {v for v in copied if v in maker}
    for position, node in enumerate(body.nodes):
        if root.get(node.outputs[0] if node.outputs else -1) is not None:
            continue
        inputs = [root.get(v, v) for v in node.inputs]
        for value in inputs:
            users[value].append(position)
        inside = {root.get(v, v) for inner in node.bodies for v in captured(inner)}
        for value in inside:
            users[value].append(position)
        if node.name in KERNELS:
            needed.update(inputs[:1] if node.name == "stablehlo.dynamic_update_slice" else inputs)
        needed.update(inside - generated)  # XLA sinks what constants make into the loop that reads it
    stored = {v for v in maker if _is_stored(v, maker, needed, users)}
    model = Fusion(root, frozenset(stored), maker, users, generated)
    model = dataclasses.replace(model, stored=stored | _worth_storing(body, values, model), read={})
    return dataclasses.replace(model, rows=_row_kernels(values, model))


def _roots(body: Body, values: Sequence[Value]) -> tuple[dict[int, int], dict[int, Node], set[int]]:
    """Alias -> buffer; buffer -> the node that makes it; values that are copied as their layout does not match.

    A transpose is a layout of the same buffer (XLA's layout assignment) until an element-wise operation meets operands
    of different layouts: then one of them is copied.
    """
    root: dict[int, int] = {}
    maker: dict[int, Node] = {}
    order: dict[int, tuple[int, ...]] = {}  # value -> the dimension of its buffer that each dimension is; else any
    copied: set[int] = set()
    for node in body.nodes:
        inputs = [root.get(v, v) for v in node.inputs]
        if node.name in ALIASES and len(node.outputs) == len(inputs):
            root.update(zip(node.outputs, inputs))
            continue
        if node.name == "stablehlo.transpose":
            permutation = integers(node.attributes["permutation"])
            before = order.get(node.inputs[0]) or tuple(range(len(permutation)))
            order[node.outputs[0]] = tuple(before[d] for d in permutation)
            root[node.outputs[0]] = inputs[0]
            continue
        maker.update((v, node) for v in node.outputs)
        shape = values[node.outputs[0]].shape if node.outputs else ()
        same = [v for v in node.inputs if values[v].shape == shape]
        if node.name in KERNELS:
            order.update((v, tuple(range(len(values[v].shape)))) for v in node.outputs)
        elif same and node.name != "stablehlo.broadcast_in_dim":
            known = [(v, order[v]) for v in same if v in order]
            if known:
                order[node.outputs[0]] = known[0][1]
                copied.update(v for v, o in known[1:] if o != known[0][1])
    return root, maker, copied


def _is_stored(value: int, maker: dict[int, Node], needed: set[int], users: dict[int, list[int]]) -> bool:
    node = maker[value]
    if node.name in FREE:
        return False
    return value in needed or node.name in KERNELS or (node.name == "stablehlo.reduce" and bool(users[value]))


def _row_kernels(values: Sequence[Value], model: Fusion) -> frozenset[int]:
    """Stored values made from whole rows and from sums over the same rows: a softmax, a norm, their backward.

    XLA makes each in one kernel that is tiled by rows (xla/service/gpu/transforms/softmax_rewriter_triton.cc), which
    reads a row again after its sum is known, and so never writes over what it reads.
    """
    found = set()
    for value in model.stored:
        node = model.maker[value]
        if node.name in KERNELS or node.name == "stablehlo.reduce":
            continue
        read = sources(node, values, model)
        rows = {v for v in read if values[v].size >= values[value].size}
        sums = [v for v in read if v in model.maker and model.maker[v].name == "stablehlo.reduce"]
        if any(rows & set(sources(model.maker[v], values, model)) for v in sums):
            found.add(value)
    return frozenset(found)


def _worth_storing(body: Body, values: Sequence[Value], model: Fusion) -> set[int]:
    """Fused values with several users that would each read more than the value itself to make it again."""
    more: set[int] = set()
    stored = set(model.stored)  # with what was found so far
    current = dataclasses.replace(model, stored=stored, read={})
    for node in body.nodes:
        for value in node.outputs:
            if value in stored or node.name in FREE or node.name in ALIASES or len(set(model.users[value])) < 2:
                continue
            if sum(_sources(node, values, current).values()) > values[value].bytes * RECOMPUTE_LIMIT:
                more.add(value)
                stored.add(value)
    return more


# A repeated chain may read this many times the bytes of the value that it saves. 1 would be the break-even of one extra
# consumer (read the inputs again, against one write and one more read of the value).
RECOMPUTE_LIMIT = 2.0


def sources(node: Node, values: Sequence[Value], model: Fusion) -> Mapping[int, float]:
    """Stored buffers that computing a node reads, through the chain fused into it, and the bytes read of each. The node
    is one of the model's body: what was found is kept there, since the schedule and the memory both ask."""
    found = model.read.get(id(node))
    if found is None:
        found = model.read[id(node)] = _sources(node, values, model)
    return found


def _sources(node: Node, values: Sequence[Value], model: Fusion) -> dict[int, float]:
    found: dict[int, float] = {}
    todo = [(node, float("inf"))]
    visited: set[int] = set()
    while todo:
        current, limit = todo.pop()
        slicing = current.name in SLICING
        for i, value in enumerate(current.inputs):
            buffer = model.buffer(value)
            made = model.maker.get(buffer)
            size = min(limit, values[buffer].bytes)
            if slicing and i == 0:
                size = min(size, sum(values[v].bytes for v in current.outputs))
            if buffer in model.generated and current.name not in KERNELS:
                continue
            if made is None or buffer in model.stored:
                found[buffer] = max(found.get(buffer, 0.0), size)
            elif made.name not in FREE and id(made) not in visited:
                visited.add(id(made))
                todo.append((made, size if slicing and i == 0 else float("inf")))
    return found


def captured(body: Body) -> set[int]:
    """Values that a body uses from outside of it."""
    inside = set(body.arguments)
    used: set[int] = set(body.results)
    for node in body.nodes:
        used.update(node.inputs)
        for inner in node.bodies:
            used |= captured(inner)
        inside.update(node.outputs)
    return used - inside
