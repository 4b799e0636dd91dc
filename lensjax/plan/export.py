"""A plan as a file that needs JAX (or Flax) and nothing else: the way out.

    plan.export("json")          data: mesh, specs, rules
    plan.export("flax-rules")    logical-axis rules, as flax.linen.logical_to_mesh_sharding takes them
    plan.export("python")        a module of PartitionSpecs and shardings

A plan names the tensors that it splits. What else a step has (the batch, what stays whole, where constraints stand, the
step itself) is known to the step: `train_step.export(...)` writes that too.
"""

from __future__ import annotations

import dataclasses
import json
import pprint
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from lensjax._errors import PlanError
from lensjax.plan.levels import KEEP, parse
from lensjax.plan.plan import Micro, Plan, Spec

FORMATS = ("python", "flax-rules", "json")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a step knows beside its plan. Specs by path, in the order of its arguments and results (None: left to the
    compiler); `donated`: positions among the arguments; `constraints`: (line and type, spec) of each constraint;
    `program`: the step in jax.export's format, base-85 text; `made`: releases."""

    name: str
    arguments: Mapping[str, Spec]
    results: Sequence[tuple[str, Spec | None]]
    donated: tuple[int, ...]
    constraints: Sequence[tuple[str, Any]]
    program: str
    made: str


def write(plan: Plan, form: str, facts: Facts | None = None) -> str:
    """The text of the file. Raises PlanError for a plan that no sharding can express."""
    if form not in FORMATS:
        raise PlanError(f"export as {form!r}", hint=f"one of {', '.join(FORMATS)}")
    check(plan)
    if form == "json":
        return json.dumps(as_data(plan, facts), indent=1) + "\n"
    return flax_rules(plan) if form == "flax-rules" else python(plan, facts)


def check(plan: Plan) -> None:
    """Raises PlanError for a plan that more than shardings and constraints carry out."""
    more = {
        "layers (recompute, offload)": any(
            part.kind != KEEP.kind for level in plan.layers.values() for part in parse(level)
        ),
        "micro (micro-batches)": plan.micro != Micro(),
        "reduce (compressed or delayed reductions)": any(r.codec != "exact" or r.split for r in plan.reduce.values()),
        "secondary (copies of weights)": bool(plan.secondary),
        "chunks (the head in parts)": plan.chunks > 1,
        "host (optimizer state on the host)": bool(plan.host),
        "prefetch (weights gathered one layer ahead)": plan.prefetch,
        "pipeline (stages)": plan.pipeline is not None,
    }
    if wrong := [k for k, v in more.items() if v]:
        raise PlanError(
            f"the plan {plan.name!r} has {', '.join(wrong)}: these rewrite the step, and no sharding says so",
            hint="export a plan of shardings only, as parallelize(plan='fsdp') makes them",
        )


def as_data(plan: Plan, facts: Facts | None) -> dict[str, Any]:
    kinds = ("params", "optimizer", "grads", "activations")
    out: dict[str, Any] = {
        "plan": plan.name,
        "mesh": {"axes": plan.mesh.shape, "order": plan.mesh.order},
        "leaves": {p: _spec(s) for p, s in plan.leaves.items()},
        "rules": {k: {n: list(axes) for n, axes in getattr(plan.rules, k).items()} for k in kinds},
    }
    if facts is not None:
        out |= {
            "arguments": {p: _spec(s) for p, s in facts.arguments.items()},
            "results": [{"path": p, "spec": _spec(s) if s is not None else None} for p, s in facts.results],
            "donated": list(facts.donated),
            "constraints": [{"at": line, "spec": str(spec)} for line, spec in facts.constraints],
        }
    return out


def _spec(spec: Spec) -> list[Any]:
    return [list(axes) or None for axes in spec]


def code(spec: Any) -> str:
    """A plan's spec, a PartitionSpec or None as Python (how one prints changes from release to release)."""
    if spec is None:
        return "None"
    if isinstance(spec, PartitionSpec):
        entries = list(spec)
    else:
        entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec]
    say = lambda e: "PartitionSpec.UNCONSTRAINED" if e is PartitionSpec.UNCONSTRAINED else repr(e)
    return f"PartitionSpec({', '.join(map(say, entries))})"


def _quoted(name: str) -> str:
    """A name inside a module's docstring, which no name may end."""
    return repr(name).replace('"', '\\"')


def flax_rules(plan: Plan) -> str:
    """Rules for linen's logical axes, and the leaves that they do not describe."""
    rules: dict[str, Any] = {}
    for kind in ("activations", "params"):
        rules.update({k: tuple(v) or None for k, v in getattr(plan.rules, kind).items()})
    listed = [(k, v[0] if v and len(v) == 1 else v) for k, v in rules.items()]
    text = f'''
    """Logical-axis rules of the lensjax plan {_quoted(plan.name)}, mesh {plan.mesh.shape}.

    Where a model names its axes as these rules do (nn.with_logical_partitioning, nn.with_logical_constraint), they
    shard it as the plan does. Axes are named after a tensor that has them. LEAVES are the plan's own shardings, for
    tensors that no rule describes.
    """

    from jax.sharding import PartitionSpec

    MESH = {plan.mesh.shape}
    RULES = @RULES@
    LEAVES = @LEAVES@
    '''
    out = textwrap.dedent(text).lstrip()
    leaves = _table(plan.leaves.items())
    return out.replace("@RULES@", pprint.pformat(listed, width=110)).replace("@LEAVES@", leaves)


def _table(specs: Any) -> str:
    rows = "".join(f"    {path!r}: {code(spec)},\n" for path, spec in specs)
    return "{\n" + rows + "}" if rows else "{}"


def python(plan: Plan, facts: Facts | None) -> str:
    """A module of plain PartitionSpecs; with the step's facts, also the step."""
    known = facts.arguments if facts is not None else plan.leaves
    common = {
        "plan": _quoted(plan.name),
        "axes": plan.mesh.shape,
        "order": plan.mesh.order,
        "specs": _table(known.items()),
    }
    if facts is None:
        return (_HEAD_OF_A_PLAN + _MESH).format(**common)
    results = "".join(f"    {code(s)},\n" for _, s in facts.results)
    more = {
        "name": _quoted(facts.name),
        "made": facts.made,
        "results": f"[\n{results}]",
        "donated": facts.donated,
        "constraints": "[\n" + "".join(f"    ({at!r}, {code(spec)}),\n" for at, spec in facts.constraints) + "]",
        "program": facts.program,
    }
    return (_HEAD_OF_A_STEP + _MESH + _STEP).format(**common, **more)


_HEAD_OF_A_STEP = '''\
"""The step {name} under the lensjax plan {plan}, without lensjax: mesh {axes}.

    step = jit(train_step)              # the undecorated step; its arguments are placed, its state is given up
    state, metrics = step(state, batch)

{made}. SPECS are the shardings of every argument, in order; RESULTS those of every result (None: the compiler's
choice); CONSTRAINTS says at which lines of the step jax.lax.with_sharding_constraint stands, for who writes them by
hand; PROGRAM is the step with these constraints in place (jax.export).
"""

import base64
import zlib

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH = {axes}
ORDER = {order}  # device numbers, row-major over the mesh; None: JAX's own order
SPECS = {specs}
RESULTS = {results}
DONATED = {donated}  # positions in SPECS of what a call gives up
CONSTRAINTS = {constraints}


'''

_HEAD_OF_A_PLAN = '''\
"""The lensjax plan {plan} without lensjax: mesh {axes}. SPECS are the shardings of what it splits; what is not listed
is whole on every device.

They are jit's in_shardings and out_shardings for the state. A step has constraints inside as well, which the plan alone
does not know: train_step.export("python") writes those too, and the step.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH = {axes}
ORDER = {order}  # device numbers, row-major over the mesh; None: JAX's own order
SPECS = {specs}


'''

_MESH = '''\
def mesh(devices=None):
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) != np.prod(list(MESH.values()), dtype=int):
        raise ValueError(f"{{len(devices)}} devices; the mesh {{MESH}} has {{np.prod(list(MESH.values()), dtype=int)}}")
    order = range(len(devices)) if ORDER is None else ORDER
    grid = np.array([devices[i] for i in order], dtype=object).reshape(list(MESH.values()))
    return Mesh(grid, tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH))


def shardings(devices=None):
    """Path of an argument's leaf -> its NamedSharding."""
    on = mesh(devices)
    return {{path: NamedSharding(on, spec) for path, spec in SPECS.items()}}
'''

_STEP = '''

def flat(devices=None):
    """The step as a jitted function from the leaves of its arguments to the leaves of its results."""
    on = mesh(devices)
    program = export.deserialize(bytearray(zlib.decompress(base64.b85decode(PROGRAM))))
    named = lambda spec: None if spec is None else NamedSharding(on, spec)
    return jax.jit(
        lambda *leaves: program.call(*leaves),
        in_shardings=[named(s) for s in SPECS.values()],
        out_shardings=[named(s) for s in RESULTS],
        donate_argnums=DONATED,
        keep_unused=True,
    )


def jit(step, devices=None):
    """`step`, compiled as planned. Call it like the undecorated step."""
    run, tree = flat(devices), []

    def call(*args):
        leaves = jax.tree.leaves(args)
        if len(leaves) != len(SPECS):
            raise ValueError(f"{{len(leaves)}} arrays among the arguments; expected {{len(SPECS)}}: {{list(SPECS)}}")
        if not tree:
            tree.append(jax.tree.structure(jax.eval_shape(step, *args)))
            leaves = [jax.device_put(x, s) for x, s in zip(leaves, shardings(devices).values())]
        return jax.tree.unflatten(tree[0], run(*leaves))

    return call


PROGRAM = r"""{program}"""
'''
