"""What each temporary buffer of a step is for.

"gradients":     what the new parameters and optimizer state are made of, element by element, back to the operations
                 that sum over the batch; partial sums, and the updates made from them, included.
"activations":   made in a forward pass, read in a backward (or by what makes a forward anew for one). The two are told
                 apart by the names that JAX gives its operations (`jvp(...)`, `transpose(jvp(...))`).
"communication": what collectives returned, above all gathered weights; none of the above.
"temporaries":   everything else: what is made and read in one pass, scratch, copies of parameters in another type.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lensjax.cost.schedule import Step
from lensjax.partition.data import Body, Node, Partitioned
from lensjax.partition.fusion import KERNELS, Fusion, Fusions
from lensjax.partition.simplify import COLLECTIVES
from lensjax.passes.recompute_copy import AGAIN

STATE = ("parameter", "optimizer")
# Results that are (slices of) their operands, put together differently.
_PIECES = frozenset(["stablehlo.slice", "stablehlo.dynamic_slice", "stablehlo.concatenate", "stablehlo.pad",
                     "stablehlo.dynamic_update_slice"])  # fmt: skip


class Purposes:
    """What the buffers of a partitioned step are for. `roles`: of its arguments, in order (as `Argument.role`); without
    them every argument with a donated result counts as state."""

    def __init__(self, p: Partitioned, fusions: Fusions, roles: Sequence[str] | None = None):
        self.fusions = fusions
        known = roles or ()
        state = {i for i in range(len(p.arguments)) if (known[i] in STATE if i < len(known) else i in p.donated)}
        self.gradients: set[int] = set()
        for i in state:
            if i in p.donated:
                self._back(p.body, p.body.results[p.donated[i]])
        self.varying = {v for i, v in enumerate(p.body.arguments) if i not in state}
        _spread(p.body, self.varying)

    def _back(self, body: Body, result: int) -> None:
        """Marks what a result is made of element by element."""
        model = self.fusions(body)
        todo = [model.buffer(result)]
        while todo:
            value = todo.pop()
            node = model.maker.get(value)
            if node is None or value in self.gradients:
                continue
            self.gradients.add(value)
            if node.bodies:
                at = node.outputs.index(value)
                for inner in node.bodies:
                    self._back(inner, inner.results[at])
                if node.name == "stablehlo.while":
                    todo.append(model.buffer(node.inputs[at]))
            else:
                todo += [model.buffer(v) for v in self._same(node, value)]

    def _same(self, node: Node, value: int) -> Sequence[int]:
        """The operands of a node that its result is made of element by element."""
        if node.name in COLLECTIVES or node.name in _PIECES:
            return node.inputs[:2] if node.name == "stablehlo.dynamic_update_slice" else node.inputs
        if node.name in KERNELS:
            return ()
        shape = self.fusions.values[value].shape
        return [v for v in node.inputs if self.fusions.values[v].shape == shape]

    def of(self, body: Body, steps: Sequence[Step], model: Fusion) -> dict[int, str]:
        """Value -> purpose, of the values that the steps of a body write."""
        kept = {v for step in steps if _is_backward(step.node) for v in step.reads}
        return {v: self._purpose(v, v in kept, model.maker.get(v, s.node)) for s in steps for v in s.writes}

    def _purpose(self, value: int, kept: bool, maker: Node) -> str:
        if value in self.gradients and value in self.varying:
            return "gradients"
        if kept and value in self.varying and not _is_backward(maker):
            return "activations"
        return "communication" if maker.name in COLLECTIVES else "temporaries"


def _is_backward(node: Node) -> bool:
    return "transpose(" in node.op_name or AGAIN in node.op_name


def _spread(body: Body, varying: set[int]) -> None:
    """Adds every value that depends on one of `varying`."""
    for node in body.nodes:
        if not node.bodies:
            if not varying.isdisjoint(node.inputs):
                varying.update(node.outputs)
            continue
        for inner in node.bodies:
            _through(node, inner, varying)


def _through(node: Node, inner: Body, varying: set[int]) -> None:
    varying.update(_paired(node.inputs, inner.arguments, varying))
    before = -1
    while before != len(varying):
        before = len(varying)
        _spread(inner, varying)
        if node.name == "stablehlo.while":
            varying.update(_paired(inner.results, inner.arguments, varying))
    varying.update(_paired(inner.results, node.outputs, varying))
    if node.name in ("stablehlo.case", "stablehlo.if") and node.inputs[0] in varying:
        varying.update(node.outputs)


def _paired(source: Collection[int], target: Collection[int], varying: set[int]) -> list[int]:
    """The members of `target` whose partner in `source` varies."""
    return [t for s, t in zip(source, target) if s in varying]
