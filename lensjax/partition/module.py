"""A lowered step as a template: lowered once, partitioned as often as there are candidates.

Lowering a large step takes a fraction of a second, and a search asks about many plans. So the arguments, the results
and every *mark* (a `with_sharding_constraint` that was traced under `jax.named_scope("lensjax.mark.<n>")`) are slots:
a candidate writes its shardings, and its mesh, into the attributes of a clone, which takes under a millisecond.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from lensjax import _jax
from lensjax._errors import PartitionError
from lensjax.partition.data import Spec
from lensjax.partition.inline import inline_calls, main_function, symbol, walk
from lensjax.partition.loops import capture_invariants, reshape_unit_broadcasts
from lensjax.partition.text import tensor_type

MARK = re.compile(r"lensjax\.mark\.(\d+)")
MESH = "mesh"


@dataclasses.dataclass(frozen=True)
class Template:
    """A step's module with its calls inlined, before any sharding was decided.

    `arguments`, `results`: global shapes, in the order of the flattened tree. `marks`: number -> global shape.
    `mesh`: the mesh that the step was lowered with ({} when it names none). Holds MLIR; what is made from it is data.
    `whole`: the module before its loops were made ready, with everything that may still be taken out. `places`: what
    its locations say, filled as they are read.
    """

    module: Any
    whole: Any
    arguments: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    marks: Mapping[int, tuple[int, ...]]
    mesh: Mapping[str, int]
    places: dict[Any, tuple[str, str]] = dataclasses.field(default_factory=dict, compare=False, repr=False)


def template(lowered: Any) -> Template:
    """The template of a `jax.stages.Lowered`, which is left as it is.

    Raises PartitionError for a step without Shardy shardings or with more than one mesh.
    """
    _jax.mlir()
    module = lowered.compiler_ir("stablehlo").operation.clone()
    _name_mesh(module)
    inline_calls(module)
    return _ready(module)


def without(source: Template, dropped: Collection[int]) -> Template:
    """A template of the step as if these marks had never been made: each is the identity."""
    module = source.whole.clone()
    for op, mark in _marks(module):
        if mark in dropped:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return dataclasses.replace(_ready(module), places=source.places)


def _ready(whole: Any) -> Template:
    """The template of a module without calls, which is left as it is."""
    module = whole.clone()
    capture_invariants(module)
    reshape_unit_broadcasts(module)
    _jax.run_passes(module, "cse", verify=False)  # as JAX lowered it; what a plan writes into it is verified
    main = main_function(module)
    block = main.regions[0].blocks[0]
    results = [op.operation for op in block][-1].operands
    marks = {mark: tensor_type(str(op.results[0].type))[0] for op, mark in _marks(module)}
    return Template(
        module=module,
        whole=whole,
        arguments=tuple(tensor_type(str(a.type))[0] for a in block.arguments),
        results=tuple(tensor_type(str(r.type))[0] for r in results),
        marks=marks,
        mesh=_mesh_of(module),
    )


def _marks(module: Any) -> list[tuple[Any, int]]:
    found = []
    for op in walk(main_function(module)):
        if op.name == "sdy.sharding_constraint" and (name := MARK.search(str(op.location))):
            found.append((op, int(name[1])))
    return found


def mesh_operations(module: Any) -> list[Any]:
    return [op.operation for op in module.regions[0].blocks[0] if op.operation.name == "sdy.mesh"]


def _name_mesh(module: Any) -> None:
    """A step without any sharding names no mesh; give it one of a single device for candidates to write over."""
    m = _jax.mlir()
    if any(symbol(op.attributes["sym_name"]) == MESH for op in mesh_operations(module)):
        return
    with module.context, m.ir.Location.unknown(module.context):
        alone = m.sdy.MeshAttr.get([m.sdy.MeshAxisAttr.get("one", 1)])
        name = m.ir.StringAttr.get(MESH)
        start = m.ir.InsertionPoint.at_block_begin(module.regions[0].blocks[0])
        m.ir.Operation.create("sdy.mesh", attributes={"sym_name": name, "mesh": alone}, ip=start)


def _mesh_of(module: Any) -> dict[str, int]:
    found = {}
    for op in mesh_operations(module):
        axes = dict(re.findall(r'"([^"]+)"=(\d+)', str(op.attributes["mesh"])))
        if axes and found and axes != found:
            raise PartitionError(
                f"the step names two meshes: {found} and {axes}",
                hint="lower every sharding of a step with the same mesh",
            )
        found = axes or found
    return {name: int(size) for name, size in found.items()}


def instantiate(
    source: Template,
    mesh: Mapping[str, int] | None = None,
    arguments: Mapping[int, Spec] | None = None,
    results: Mapping[int, Spec] | None = None,
    marks: Mapping[int, Spec | None] | None = None,
) -> Any:
    """A clone of the template's module with these shardings written in; what is not named stays as it was lowered.

    A mark that maps to None is left open (Shardy decides), and so is a dimension of one whose entry is None.
    Raises PartitionError for a slot that does not exist, a spec
    of the wrong rank, or an axis that the mesh does not have.
    """
    module = source.module.clone()
    sizes = dict(mesh if mesh is not None else source.mesh)
    with module.context, _jax.mlir().ir.Location.unknown(module.context):
        write = _Writer(sizes)
        if mesh is not None:
            write.meshes(module)
        main = main_function(module)
        write.function(main, "arg_attrs", arguments or {}, source.arguments)
        write.function(main, "res_attrs", results or {}, source.results)
        if marks:
            unknown = sorted(set(marks) - set(source.marks))
            if unknown:
                raise PartitionError(f"no marks {unknown[:5]} in this program", hint="marks are numbered when traced")
            for op, mark in _marks(module):
                if mark in marks:
                    op.attributes["sharding"] = write.sharding(marks[mark], source.marks[mark])
    return module


class _Writer:
    """Builds sharding attributes for one mesh in the current MLIR context."""

    def __init__(self, mesh: Mapping[str, int]):
        m = _jax.mlir()
        self.ir, self.sdy, self.mesh = m.ir, m.sdy, mesh
        self.sharding = functools.cache(self._sharding)

    def _sharding(self, spec: Spec | None, shape: tuple[int, ...]) -> Any:
        sdy = self.sdy
        if spec is None:
            dims = [sdy.DimensionShardingAttr.get([], is_closed=False) for _ in shape]
            return sdy.TensorShardingAttr.get(MESH, dims)
        if len(spec) != len(shape):
            raise PartitionError(f"spec {spec} has {len(spec)} entries for a value of shape {shape}")
        unknown = {axis for axes in spec if axes is not None for axis in axes} - set(self.mesh)
        if unknown:
            raise PartitionError(f"spec {spec} names {sorted(unknown)}; the mesh has {dict(self.mesh)}")
        dims = [
            sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(a) for a in axes or ()], is_closed=axes is not None)
            for axes in spec
        ]
        return sdy.TensorShardingAttr.get(MESH, dims)

    def meshes(self, module: Any) -> None:
        attribute = self.sdy.MeshAttr.get([self.sdy.MeshAxisAttr.get(n, s) for n, s in self.mesh.items()])
        for op in mesh_operations(module):
            if '"' in str(op.attributes["mesh"]):
                op.attributes["mesh"] = attribute

    def function(self, main: Any, key: str, specs: Mapping[int, Spec], shapes: tuple[tuple[int, ...], ...]) -> None:
        if not specs:
            return
        present = list(main.attributes[key]) if key in main.attributes else [self.ir.DictAttr.get({}) for _ in shapes]
        for i, spec in specs.items():
            if i >= len(present):
                raise PartitionError(f"{key} {i} of {len(present)} does not exist")
            entries = {named.name: named.attr for named in present[i]}
            present[i] = self.ir.DictAttr.get({**entries, "sdy.sharding": self.sharding(spec, shapes[i])})
        main.attributes[key] = self.ir.ArrayAttr.get(present)
