"""Cost tables of a step: what every operation and buffer takes before anything is split, and along which logical axes.

Made once for a program from its unsplit reading (`lensjax.partition.whole`). Under any mesh and any rules the seconds
of a kernel, the bytes of a buffer and what a matmul must send follow by arithmetic (`inner`), a few thousand times
faster than asking the partitioner.

Values come in three kinds: *activations* carry an axis of the batch's arguments; *weights in use* (what a matmul reads,
what its backward makes) are whole along the axes that split the batch; *stored* tensors (parameters, gradients and
moments between the backward and the next step) are split as the plan stores them. Parameters that are stored and used
alike (one layer stack, the same sizes) form one *group*: an unrolled network has as many groups as a scanned one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import numpy as np

from lensjax.cost.compute import multiplies, rate
from lensjax.cost.heap import Buffer
from lensjax.cost.memory import habits_of, temporaries
from lensjax.partition.axes import Dimension
from lensjax.partition.data import Body, Node, Partitioned, Region, Value, element_bytes
from lensjax.partition.flops import flops
from lensjax.partition.fusion import ALIASES, FREE, Fusion, Fusions, sources
from lensjax.partition.whole import Whole
from lensjax.partition.work import Worker
from lensjax.program.program import Program
from lensjax.search.moments import Tags, alive
from lensjax.search.sums import MATMULS, MOVED, NOT_PASSING, SUMS, Contraction, Dims
from lensjax.topology.cluster import Device

# Operands that are less than this part of what a kernel moves say nothing about what it works on.
SMALL = 0.01
# What leaves a parameter the parameter that it is.
PASSING = frozenset(
    [*ALIASES, "stablehlo.convert", "stablehlo.transpose", "stablehlo.dynamic_slice", "stablehlo.slice"]
)

ACTIVATION, USE, STORED, OTHER = range(4)


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that one choice of storage is made for.

    layer: index of their layer stack, None outside of one. leaves: argument indices. elements: of all leaves;
    wire: bytes of an element as matmuls read it; forward, backward: regions where it is read first and last.
    """

    name: str
    layer: int | None
    leaves: tuple[int, ...]
    wire: float
    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Tables:
    """Everything the inner model knows of a program on one kind of device. Classes are distinct (kind, dimensions) of
    values; `classes[c]` describes class c, `owner[c]` is its group if it is stored, else -1.

    regions:   trips of each region; 0 is what is outside of loops.
    kernel_*:  one row per kernel: region, how often a step runs it (`trips`), arithmetic seconds unsplit, dimensions
               that it runs over, launch, `node` of the step's body that it is in; `kernel_bytes`: [kernels, classes]
               bytes moved, unsplit.
    stored_bytes: [groups] bytes that the optimizer moves, unsplit.
    alive:     [moments, classes] bytes alive at each moment, unsplit.
    fixed_bytes: of counters, keys and the like; batch_arguments: (class, bytes) of each.
    value_dims, argument_dims: logical axes of values and arguments; sizes: of the axes; inputs: those of the batch's
               arguments.
    """

    values: tuple[Value, ...]
    classes: tuple[tuple[int, Dims], ...]
    owner: tuple[int, ...]
    regions: tuple[int, ...]
    kernel_region: np.ndarray
    kernel_trips: np.ndarray
    kernel_seconds: np.ndarray
    kernel_axes: tuple[Dims, ...]
    kernel_launch: np.ndarray
    kernel_node: np.ndarray
    kernel_bytes: np.ndarray
    contractions: tuple[Contraction, ...]
    groups: tuple[Group, ...]
    stored_bytes: np.ndarray
    alive: np.ndarray
    fixed_bytes: float
    batch_arguments: tuple[tuple[int, float], ...]
    bandwidth: float
    value_dims: tuple[Dims, ...]
    argument_dims: tuple[Dims, ...]
    sizes: tuple[int, ...]
    inputs: frozenset[int]


def tables(
    program: Program, unsplit: Whole, device: Device, bandwidth: float, launch: float, tags: Tags | None = None
) -> Tables:
    """The tables of a program. `bandwidth`: bytes/s that kernels reach; `launch`: seconds between kernels; `tags`: of a
    folded step, what stands for many layers."""
    return _Maker(program, unsplit, device, bandwidth, launch, tags).make()


class _Maker:
    def __init__(
        self, program: Program, unsplit: Whole, device: Device, bandwidth: float, launch: float, tags: Tags | None
    ):
        self.program, self.whole, self.device = program, unsplit, device
        self.bandwidth, self.launch, self.tags = bandwidth, launch, tags
        self.values = unsplit.values
        self.fusions = Fusions(self.values, unsplit.body)
        self.dims = self._padded()
        invars = unsplit.body.arguments
        self.inputs = frozenset(
            a for i, x in enumerate(program.arguments) if x.role == "batch" for d in self.dims[invars[i]] for a in d
        )
        self.signature: dict[tuple, int] = {}
        self.alike: dict[tuple, list[int]] = defaultdict(list)
        self.groups = self._groups()
        # Which group's parameters a value is, cast or cut out of a stack: layers of two stacks may have equal sizes.
        self.origin = {invars[i]: g for g, (_, _, leaves) in enumerate(self.groups) for i in leaves}
        self.unclear: list[tuple[int, int, int]] = []  # (value, region, group by its sizes) of weights of no origin
        self.classes: dict[tuple, int] = {}
        self.owner: list[int] = []
        self.regions: list[int] = [1]
        self.kernels: list[tuple] = []
        self.node = 0  # of the step's body, that is looked at
        self.contractions: list[Contraction] = []
        self.stored = defaultdict(float)
        self.read_in: dict[int, list[int]] = defaultdict(list)
        self.wire: dict[int, float] = {}
        self.used: set[int] = set()
        self.sums: set[int] = set()  # results of matmuls, and sums of these alone
        self.total: dict[int, int] = {}  # of these the ones that go into a sum alone -> the sum

    def _padded(self) -> list[Dims]:
        known = list(self.whole.dims)
        return known + [((),) * len(v.shape) for v in self.values[len(known) :]]

    # ---- groups -------------------------------------------------------------------------------------------------

    def _groups(self) -> list[tuple[str, int | None, list[int]]]:
        stack = {p: n for n, layer in enumerate(self.program.layers) for p in layer.parameters}
        found: dict[tuple, list[int]] = {}
        for i in self.program.parameters:
            a = self.program.arguments[i]
            shape = a.shape[1:] if i in stack else a.shape
            found.setdefault((stack.get(i), tuple(sorted(n for n in shape if n > 1)), str(a.dtype)), []).append(i)
        groups = []
        for (layer, shape, _), leaves in found.items():
            number = len(groups)
            self.signature.setdefault((layer is not None, shape), number)
            groups.append((self.program.arguments[leaves[0]].path, layer, leaves))
            self.alike[layer is not None, shape].append(number)
            if layer is None:
                self.signature.setdefault(("plain", shape), number)
            else:
                self.signature.setdefault(("slice", shape), number)
                self.signature.setdefault(("stack", shape, self.program.layers[layer].count), number)
        return groups

    def group_of(self, v: int, inside: bool) -> int | None:
        """The group of a value without batch axes: whose parameters it is, or else whose it looks like, by its sizes:
        in a loop a slice of a stack first, outside a whole stack."""
        if v in self.origin:
            return self.origin[v]
        shape = tuple(n for n in self.values[v].shape if n > 1)
        if not shape:
            return None
        slice_, plain = ("slice", tuple(sorted(shape))), ("plain", tuple(sorted(shape)))
        keys = (slice_, plain) if inside else (self._stack(shape), plain, slice_)
        return next((self.signature[k] for k in keys if k in self.signature), None)

    @staticmethod
    def _stack(shape: tuple[int, ...]) -> tuple:
        return "stack", tuple(sorted(shape[1:])), shape[0]

    # ---- classes ------------------------------------------------------------------------------------------------

    def classify(self, v: int, inside: bool, stored: bool) -> int:
        dims = self.dims[v]
        if any(a in self.inputs for d in dims for a in d):
            key: tuple = (ACTIVATION, dims)
            group = -1
        else:
            found = self.group_of(v, inside)
            shape = tuple(n for n in self.values[v].shape if n > 1)
            if inside and found is None and shape:  # a loop carries whole stacks as they are stored
                found = self.signature.get(self._stack(shape))
                stored |= found is not None
            group = -1 if found is None else found
            key = (OTHER, dims) if found is None else (STORED, group) if stored else (USE, dims)
        if key not in self.classes:
            self.classes[key] = len(self.classes)
            self.owner.append(group if key[0] == STORED else -1)
        return self.classes[key]

    # ---- walking ------------------------------------------------------------------------------------------------

    def make(self) -> Tables:
        body = self.whole.body
        self.body(body, 0)
        p = Partitioned({}, self.values, body, Region(1, ()), {}, 0, self.fusions)
        moments = self.liveness(p)
        self._settle()
        rows = [np.zeros(len(self.classes)) for _ in self.kernels]
        for row, k in zip(rows, self.kernels):
            for c, n in k[4].items():
                row[c] += n
        groups = []
        for g, (name, layer, leaves) in enumerate(self.groups):
            regions = self.read_in.get(g) or [0]
            if layer is not None:  # what reads a whole stack (its norm) is not the layer
                regions = [r for r in regions if r] or regions
            wire = self.wire.get(g) or float(np.dtype(self.program.arguments[leaves[0]].dtype).itemsize)
            groups.append(Group(name, layer, tuple(leaves), wire, min(regions), max(regions)))
        invars = body.arguments
        batch = tuple(
            (self.classify(invars[i], False, False), self.values[invars[i]].bytes)
            for i, a in enumerate(self.program.arguments) if a.role == "batch"
        )  # fmt: skip
        fixed = sum(a.nbytes for a in self.program.arguments if a.role in ("other", "key"))
        width = len(self.classes)
        return Tables(
            values=tuple(self.values),
            classes=tuple((k[0], k[1] if k[0] != STORED else ()) for k in self.classes),
            owner=tuple(self.owner),
            regions=tuple(self.regions),
            kernel_region=np.array([k[0] for k in self.kernels], int),
            kernel_trips=np.array([k[6] for k in self.kernels], float),
            kernel_seconds=np.array([k[1] for k in self.kernels], float),
            kernel_axes=tuple(k[2] for k in self.kernels),
            kernel_launch=np.array([k[3] for k in self.kernels], float),
            kernel_node=np.array([k[5] for k in self.kernels], int),
            kernel_bytes=np.array([np.pad(r, (0, width - len(r))) for r in rows]).reshape(len(rows), width),
            contractions=tuple(dataclasses.replace(c, total=self._total(c.result)) for c in self.contractions),
            groups=tuple(groups),
            stored_bytes=np.array([self.stored[g] for g in range(len(groups))], float),
            alive=np.pad(moments, ((0, 0), (0, width - moments.shape[1]))),
            fixed_bytes=float(fixed),
            batch_arguments=batch,
            bandwidth=self.bandwidth,
            value_dims=tuple(self.dims),
            argument_dims=tuple(self.dims[v] for v in invars),
            sizes=self.whole.sizes,
            inputs=self.inputs,
        )

    def body(self, body: Body, region: int) -> None:
        model = self.fusions(body)
        inside = region > 0
        uses = Counter(v for node in body.nodes for v in node.inputs) + Counter(body.results)
        for at, node in enumerate(body.nodes):
            self.node = self.node if inside else at
            self._follow(node)
            if node.bodies:
                for inner in node.bodies:
                    self.regions.append(self.regions[region] * (node.trips or 1))
                    self.body(inner, len(self.regions) - 1)
                continue
            self.passing(node, region)
            self.contraction(node, region, inside)
            if node.name == "stablehlo.add" and all(uses[v] == 1 and v in self.sums for v in node.inputs):
                self.total.update(dict.fromkeys(node.inputs, node.outputs[0]))
                self.sums.add(node.outputs[0])
            if node.name in ALIASES or node.name in FREE:
                continue
            if node.outputs and not any(v in model.stored for v in node.outputs):
                continue
            self.kernel(node, model, region, inside)

    def _follow(self, node: Node) -> None:
        for inner in node.bodies:
            if len(inner.arguments) == len(node.inputs):
                self.origin.update(
                    (a, self.origin[v]) for a, v in zip(inner.arguments, node.inputs) if v in self.origin
                )
        if node.name in PASSING and node.inputs[0] in self.origin:
            self.origin[node.outputs[0]] = self.origin[node.inputs[0]]

    def times(self, node: Node) -> int:
        return self.tags.times(node) if self.tags is not None else 1

    def kernel(self, node: Node, model: Fusion, region: int, inside: bool) -> None:
        op, trips = Worker(self.fusions, ()).operation(node, model, 1), self.regions[region] * self.times(node)
        computes = multiplies(op) or node.name in ("stablehlo.gather", "stablehlo.scatter")
        moved = dict(sources(node, self.values, model))
        for v in node.outputs:
            moved[v] = moved.get(v, 0.0) + self.values[v].bytes
        total = sum(moved.values())
        scale = op.bytes / total if total else 0.0
        by_class: dict[int, float] = defaultdict(float)
        for v, n in moved.items():
            # Casts, slices and updates of weights work on what is stored, also inside of loops.
            by_class[self.classify(v, inside, not computes)] += n * scale
        owners = {self.owner[c]: n for c, n in by_class.items() if n > SMALL * op.bytes}
        if not computes and owners and min(owners) >= 0:
            self.stored[max(owners, key=lambda g: owners[g])] += op.bytes * trips
            self.kernels.append((region, 0.0, (), self.launch, {}, self.node, trips))
            return
        axes: list[Dimension] = list(self.dims[node.outputs[0]]) if node.outputs else []
        met = SUMS[node.name](node, self.values, self.dims) if node.name in MATMULS else None
        if met is not None:
            (first, *_), _, (summed, *_) = met
            axes += [self.dims[first][d] for d in summed]
        seconds = flops(node, self.values) / rate(op, self.device) if multiplies(op) else 0.0
        self.kernels.append((region, seconds, tuple(axes), self.launch, dict(by_class), self.node, trips))

    # ---- what meets what ----------------------------------------------------------------------------------------

    def contraction(self, node: Node, region: int, inside: bool) -> None:
        maker = SUMS.get(node.name)
        found = maker(node, self.values, self.dims) if maker is not None else None
        if found is None:
            return
        operands, pairs, summed = found
        result = node.outputs[0]
        self.sums |= {result} if node.name in MATMULS else set()
        weight = self._is_weight(result, inside)
        for v in operands if node.name != "stablehlo.reduce" else ():
            if self._is_weight(v, inside):
                self._note_use(v, region, inside)
        if weight:
            self._note_use(result, region, inside)
        self.contractions.append(Contraction(operands, result, pairs, summed, region, weight, times=self.times(node)))

    def _total(self, v: int) -> int:
        while v in self.total:
            v = self.total[v]
        return v

    def passing(self, node: Node, region: int) -> None:
        """Notes an operation that is no sum in which a dimension of an operand ends or begins: what is split along it
        has to move."""
        if node.name in NOT_PASSING or len(node.outputs) != 1:
            return
        result = self.dims[node.outputs[0]]
        majors = [dim[0] if dim else None for dim in result]
        for v in node.inputs:
            own = [dim[0] if dim else None for dim in self.dims[v]]
            if not any(a in self.inputs for a in own) or {*own} <= {*majors} or self.values[v].bytes < MOVED:
                continue
            pairs = {d: majors.index(a) for d, a in enumerate(own) if a is not None and a in majors}
            times = self.times(node)
            self.contractions.append(
                Contraction((v,), node.outputs[0], (pairs,), ((),), region, False, True, times=times)
            )

    def _is_weight(self, v: int, inside: bool) -> bool:
        active = any(a in self.inputs for d in self.dims[v] for a in d)
        return not active and self.group_of(v, inside) is not None

    def _note_use(self, v: int, region: int, inside: bool) -> None:
        group = self.group_of(v, inside)
        if group is None:
            return
        self.used.add(v)
        if v in self.origin:
            self._use(group, v, region)
        else:
            self.unclear.append((v, region, group))

    def _use(self, group: int, v: int, region: int) -> None:
        self.read_in[group].append(region)
        own = element_bytes(self.values[v].dtype)
        self.wire[group] = min(self.wire.get(group, own), own)

    def _settle(self) -> None:
        """Gradients go to the group of their sizes whose weights are read in the same loop, where there are several."""
        read = {g: set(regions) for g, regions in self.read_in.items()}
        shape_of = {g: key for key, groups in self.alike.items() for g in groups}
        for v, region, group in self.unclear:
            here = [g for g in self.alike[shape_of[group]] if region in read.get(g, ())]
            self._use(here[0] if here and group not in here else group, v, region)

    # ---- memory -------------------------------------------------------------------------------------------------

    def liveness(self, p: Partitioned) -> np.ndarray:
        def classify(b: Buffer) -> int:
            return self.classify(b.value, b.depth > 0, b.depth == 0 and b.value not in self.used)

        maker = self.fusions(p.body).maker
        buffers = temporaries(p, habits_of(self.device))
        return alive(buffers, classify, lambda: len(self.classes), maker.get, self.tags)
