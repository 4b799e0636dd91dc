"""The plan: what to do with a step on a cluster, as data.

A plan is frozen, compares by value, and round-trips through JSON. It names the user's tensors by path and holds no JAX
object, so that it can be diffed, edited, kept under version control and replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from lensjax._errors import PlanError

SCHEMA = 1

# One entry per dimension: the mesh axes that split it, major first; () where it is whole.
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A mesh axis. `tier`: the cluster tier that its groups stay inside ("" where there is only one)."""

    name: str
    size: int
    tier: str = ""


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """Axes, outermost first. `order`: device numbers row-major over the axes; None is 0, 1, 2, ..."""

    axes: tuple[Axis, ...]
    order: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return math.prod(a.size for a in self.axes)

    @property
    def shape(self) -> dict[str, int]:
        return {a.name: a.size for a in self.axes}


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axes, one set for each kind of tensor."""

    params: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    optimizer: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    grads: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    activations: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Micro:
    """Micro-batches: `count` shares of the batch (the last may be smaller), or as many of `share` examples each as it
    has: any number of them, compiled once. With both, the batch has to make as many."""

    count: int = 1
    share: int | None = None

    @property
    def any_number(self) -> bool:
        return self.share is not None and self.count == 1


@dataclasses.dataclass(frozen=True)
class Reduce:
    """How gradients cross one tier: `codec` is "exact" or a codec's name; `bucket`: bytes per bucket (None: the
    compiler's). `split`: partial gradients are kept apart along the tier's mesh axes until the whole share is done,
    then reduced at once (a codec implies it); without it the compiler reduces where it likes. `pins`: {pattern: codec}
    for single tensors, by fnmatch on the path of the parameter, first match wins. `inside`: gradients of scanned layers
    cross in the backward loop, each layer's while the next one is computed, not after it (needs `split` or a codec)."""

    codec: str = "exact"
    bucket: int | None = None
    split: bool = False
    pins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inside: bool = False


@dataclasses.dataclass(frozen=True)
class Pipeline:
    stages: int
    schedule: str
    sizes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What the planner expects. Seconds and bytes per step; `tiers`: bytes sent per device, by tier; `detail`: seconds
    by part. `findings`: what a reader should know (values that could not be split, and why)."""

    step_s: float
    peak_bytes: float
    tiers: Mapping[str, float]
    detail: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    findings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What the plan was made for and with. `cluster` is a cluster's name; `x64` and `prng` are JAX's settings."""

    program: str = ""
    cluster: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    x64: bool = False
    prng: str = "threefry2x32"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A complete plan, schema 1.

    mesh      the axes and the device order
    rules     logical axis -> mesh axes
    leaves    {path: spec}: tensors whose sharding is given one by one (state leaves; what is not listed is whole)
    gather    {layer: "once" | "again"}: whether split weights are gathered once, or again in the backward ("*": the
    rest)
    layers    {layer: level}: what each layer keeps for its backward. Levels: "keep" (everything), "scores" (all but
              attention's scores), "dots" (results of matmuls without batch dimensions, convolutions and kernels),
              "named" or "named:a,b" (values that the user named with checkpoint_name), "inputs" (what the layer is
              given), "recompute" (as inputs, several layers as one where that holds less), "offload" (as inputs, in the
              host's memory). A stack of scanned layers may have several, in forward order: "recompute*28+keep*4".
              Layers are named by the common path of their parameters; patterns match (fnmatch), "*" stands for all
    micro     micro-batches
    reduce    {tier: Reduce}
    chunks    in how many parts the head is computed: logits, loss and their gradients, some positions at a time, so
              that only a part of the logits is ever held (1: whole)
    host      patterns (fnmatch) on paths of the state: optimizer state that waits in the host's memory between steps,
              is fetched for its update and sent back
    prefetch  gathered weights of scanned layers (those that are gathered `again`) travel one layer ahead, forward and
              backward, for the memory of one more gathered layer
    secondary {tier: codec}: weights that are split over the tier cross it once a step, by this codec ("exact": in their
              own precision); forward and backward read the copy, which is split over the other axes only
    pipeline  stages, or None
    flags     compiler and transport flags
    """

    mesh: MeshPlan
    name: str = ""
    rules: Rules = Rules()
    leaves: Mapping[str, Spec] = dataclasses.field(default_factory=dict)
    gather: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    micro: Micro = Micro()
    reduce: Mapping[str, Reduce] = dataclasses.field(default_factory=dict)
    secondary: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chunks: int = 1
    host: tuple[str, ...] = ()
    prefetch: bool = False
    pipeline: Pipeline | None = None
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    predicted: Predicted | None = None
    provenance: Provenance = Provenance()
    schema: int = SCHEMA

    def replace(self, **changes: Any) -> Plan:
        """A plan with other fields. The prediction is dropped unless given: it was for the old fields."""
        changes.setdefault("predicted", None)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return _encode(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the plan as JSON. A file that is there keeps what it has until the new one is whole. Raises PlanError
        where it cannot be written."""
        target = pathlib.Path(path).resolve()
        if target.is_dir():
            raise PlanError(f"cannot write the plan to {target}: it is a folder", hint=f"as in {target / 'plan.json'}")
        whole = target.exists() and not target.is_file()  # a pipe or a terminal takes it as it comes
        part = target if whole else target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text(self.to_json() + "\n", encoding="utf-8")
            if not whole:
                part.replace(target)
        except OSError as e:
            if not whole:
                with contextlib.suppress(OSError):
                    part.unlink()
            raise PlanError(
                f"cannot write the plan to {target}: {e.strerror or e}", hint="name a folder that is there and yours"
            ) from e

    def export(self, form: str) -> str:
        """The plan for a world without lensjax, as the text of a file: "python" (PartitionSpecs), "flax-rules" or
        "json". `train_step.export` also writes the step's constraints and the step. Raises PlanError."""
        from lensjax.plan.export import write

        return write(self, form)

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """Raises PlanError naming the field that is newer, unknown, missing or of another type."""
        if not isinstance(data, dict):
            raise PlanError(f"a plan is a JSON object, found {type(data).__name__}")
        schema = data.get("schema")
        if schema != SCHEMA:
            raise PlanError(
                f"field 'schema' of the plan is {schema!r}; this lensjax reads schema {SCHEMA}",
                hint="the plan was written by another version: upgrade lensjax, or plan again",
            )
        return _decode(Plan, data, "plan")

    @staticmethod
    def from_json(text: str) -> Plan:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as e:
            raise PlanError(f"the plan is not JSON: {e}") from e
        return Plan.from_dict(data)

    @staticmethod
    def load(path: str | pathlib.Path) -> Plan:
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except OSError as e:
            raise PlanError(f"the plan file {path} cannot be read: {e.strerror}") from e
        except UnicodeDecodeError as e:
            raise PlanError(
                f"the plan file {path} is not text in UTF-8 (byte {e.start})",
                hint="give the file that plan.save(...) or lensjax plan --out wrote",
            ) from e
        return Plan.from_json(text)


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as `kind`, a type annotation of this module; raises PlanError naming `where`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _decode(next(a for a in args if a is not type(None)), value, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin in (Mapping, typing.get_origin(Mapping[str, int])):
        _expect(isinstance(value, dict), value, "an object", where)
        return {str(k): _decode(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple:
        _expect(isinstance(value, list), value, "a list", where)
        return tuple(_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if kind is float:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), value, "a number", where)
        return float(value)
    if kind is int:
        _expect(isinstance(value, int) and not isinstance(value, bool), value, "a whole number", where)
        return value
    _expect(isinstance(value, kind), value, f"a {kind.__name__}", where)
    return value


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), value, "an object", where)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(value) - set(fields)):
        raise PlanError(f"{where} has a field that this lensjax does not know: {unknown[0]!r}")
    required = dataclasses.MISSING
    missing = [
        n for n, f in fields.items() if n not in value and f.default is required and f.default_factory is required
    ]
    if missing:
        raise PlanError(f"{where} lacks the field {missing[0]!r}")
    return kind(**{n: _decode(hints[n], v, f"{where}.{n}") for n, v in value.items()})


def _expect(ok: bool, value: Any, wanted: str, where: str) -> None:
    if not ok:
        raise PlanError(f"field '{where}' is {value!r}; expected {wanted}")
