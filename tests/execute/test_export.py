"""The way out: an exported file, in a process that cannot import lensjax, compiles to the collectives of the step.

python -m tests.execute.test_export          every family of the sample under every preset, a line for each
"""

import ast
import functools
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lensjax
from lensjax import PlanError
from lensjax.plan.plan import Axis, MeshPlan, Micro, Pipeline, Plan, Reduce
from lensjax.verify.collectives import collectives
from lensjax.verify.hlo import parse_hlo
from tests.execute.edges import data
from tests.zoo import FAMILIES

# Runs in a process without lensjax: compiles every exported module, and writes the optimised program next to it.
CHILD = """
import importlib.util, pathlib, sys
sys.modules["lensjax"] = None  # uninstalled: importing it fails
import jax
for path in map(pathlib.Path, sys.argv[1:]):
    spec = importlib.util.spec_from_file_location("exported", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = module.export.deserialize(bytearray(module.zlib.decompress(module.base64.b85decode(module.PROGRAM))))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
              for a, s in zip(program.in_avals, module.shardings().values())]
    compiled = module.flat().lower(*shapes).compile({"xla_backend_optimization_level": 0})
    path.with_suffix(".hlo").write_text(compiled.as_text())
"""


@functools.lru_cache(16)
def planned(family, plan):
    made = FAMILIES[family].make()
    step = lensjax.parallelize(made.step, plan=plan, **FAMILIES[family].options)
    step.plan_for(jax.eval_shape(made.init, jax.random.key(0)), jax.eval_shape(made.batch, jax.random.key(1)))
    return step


def sent(text):
    """Everything that is sent, once for each time: kind, groups, types and sizes."""
    found = collectives(parse_hlo(text))
    assert not found.unknown
    return sorted(
        (c.kind, c.groups.tolist(), [(s.dtype, tuple(s.dims)) for s in c.operands], c.trips) for c in found.collectives
    )


def compile_elsewhere(paths):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths)], env=env, cwd=paths[0].parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def check(tmp_path, cells):
    """Compares the exported program of each (family, plan) with the step's own. What is sent is decided before machine
    code is made, which therefore may be poor."""
    pytest.importorskip("flatbuffers")
    wanted, paths = [], []
    for i, (family, plan) in enumerate(cells):
        step = planned(family, plan)
        paths.append(tmp_path / f"cell{i}.py")
        paths[-1].write_text(step.export("python"))
        wanted.append(sent(step.lower().compile({"xla_backend_optimization_level": 0}).as_text()))
    compile_elsewhere(paths)
    for cell, path, expected in zip(cells, paths, wanted):
        assert expected, cell
        assert sent(path.with_suffix(".hlo").read_text()) == expected, cell


def test_the_same_collectives_without_lensjax(tmp_path):
    check(tmp_path, [("mlp", "dp=2,fsdp=4")])


SAMPLE = ("mlp", "gpt_scan_remat_dropout", "cnn_batchnorm", "dlrm", "lstm_scan", "vit", "gqa_rope_swiglu")
PRESETS = ("dp", "zero1", "fsdp:again", "fsdp:once", "dp=2,fsdp=4", "dp=2,tp=4", "fsdp=2,tp_sp=4")


def applies(family, plan):
    """Whether the preset does: docs/compatibility.md says where not."""
    try:
        planned(family, plan)
    except PlanError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(SAMPLE)), ids=SAMPLE)
def test_the_sample_of_families_and_presets(tmp_path, i):
    """Each family under two of the presets that apply to it, and each preset for two families or more."""
    turned = [PRESETS[(i + k) % len(PRESETS)] for k in range(len(PRESETS))]
    cells = list(itertools.islice(((SAMPLE[i], p) for p in turned if applies(SAMPLE[i], p)), 2))
    assert len(cells) == 2
    check(tmp_path, cells)


# ---- the files -----------------------------------------------------------------------------------------------------


def sgd(p, x):
    loss, grads = jax.value_and_grad(lambda p: ((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2).mean())(p)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), {"loss": loss}


def weights():
    return {"w": jnp.full((16, 64), 0.05, jnp.float32), "v": jnp.full((64, 16), 0.1, jnp.float32)}


def exported(step):
    pytest.importorskip("flatbuffers")
    space = {"__name__": "exported"}
    exec(compile(step.export("python"), "exported.py", "exec"), space)
    return space


def test_the_exported_step_runs_like_the_undecorated_one():
    step = lensjax.parallelize(sgd, plan="dp=2,fsdp=4")
    step.plan_for(weights(), data())
    space = exported(step)
    run = space["jit"](sgd)
    mine, theirs = weights(), weights()
    for _ in range(3):
        mine, metrics = run(mine, data())
        theirs, expected = sgd(theirs, data())
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    np.testing.assert_allclose(mine["w"], theirs["w"], rtol=1e-5, atol=1e-6)
    assert mine["w"].sharding == space["shardings"]()["p/w"] and list(space["SPECS"]) == ["p/v", "p/w", "x"]
    with pytest.raises(ValueError, match=r"1 arrays among the arguments; expected 3: \['p/v', 'p/w', 'x'\]"):
        run(data())


def test_constraints_are_named_by_the_line_of_the_step():
    step = lensjax.parallelize(sgd, plan="fsdp")
    step.plan_for(weights(), data())
    at = [line for line, _ in exported(step)["CONSTRAINTS"]]
    assert at and all(re.search(r"test_export\.py:\d+ float32\[", a) for a in at)


def test_nothing_of_ours_is_imported():
    pytest.importorskip("flatbuffers")
    step = lensjax.parallelize(sgd, plan="fsdp")
    step.plan_for(weights(), data())
    for text in (step.export("python"), step.export("flax-rules"), step.plan.export("python")):
        tree = ast.parse(text)
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert {n.split(".")[0] for n in names} <= {"jax", "numpy", "base64", "zlib"}


def test_flax_takes_the_rules():
    import flax.linen as nn

    step = planned("gpt_scan_remat_dropout", "dp=2,tp=4")
    space = {}
    exec(step.export("flax-rules"), space)
    mesh = jax.make_mesh(tuple(space["MESH"].values()), tuple(space["MESH"]))
    axis, split = next((a, m) for a, m in space["RULES"] if m == "tp")
    logical = {"w": jax.sharding.PartitionSpec(None, axis)}
    found = nn.logical_to_mesh_sharding(logical, mesh, space["RULES"])
    assert found["w"].spec == jax.sharding.PartitionSpec(None, split)
    assert dict(space["RULES"])["batch"] == "dp"


def test_json_is_data_and_a_plan_alone_knows_its_leaves():
    step = lensjax.parallelize(sgd, plan="fsdp")
    plan = step.plan_for(weights(), data())
    found = json.loads(step.export("json"))
    assert found["arguments"] == {"p/v": [["fsdp"], None], "p/w": [None, ["fsdp"]], "x": [["fsdp"], None]}
    assert json.loads(plan.export("json"))["leaves"] == {"p/v": [["fsdp"], None], "p/w": [None, ["fsdp"]]}
    space = {}
    exec(plan.export("python"), space)
    assert space["shardings"]()["p/w"].spec == jax.sharding.PartitionSpec(None, "fsdp")


@pytest.mark.parametrize("form", ["python", "flax-rules", "json"])
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"layers": {"blocks": "keep", "head": "dots"}}, r"layers \(recompute, offload\)"),
        ({"layers": {"*": "inputs*3+keep*1"}}, r"layers \(recompute, offload\)"),
        ({"layers": {"*": "offload"}}, r"layers \(recompute, offload\)"),
        ({"micro": Micro(count=4)}, r"micro \(micro-batches\)"),
        ({"micro": Micro(share=4)}, r"micro \(micro-batches\)"),
        ({"reduce": {"rail": Reduce("int8")}}, r"reduce \(compressed or delayed reductions\)"),
        ({"reduce": {"rail": Reduce(split=True)}}, r"reduce \(compressed or delayed reductions\)"),
        ({"secondary": {"rail": "bf16"}}, r"secondary \(copies of weights\)"),
        ({"pipeline": Pipeline(2, "1f1b")}, r"pipeline \(stages\)"),
        ({"micro": Micro(count=2), "secondary": {"rail": "int8"}}, r"micro .*, secondary "),
    ],
)
def test_a_plan_that_rewrites_the_step_is_not_exported(field, said, form):
    with pytest.raises(PlanError, match=rf"{said}.*: these rewrite the step") as e:
        Plan(MeshPlan((Axis("dp", 8),)), name="mine", **field).export(form)
    assert "'mine'" in str(e.value) and "shardings only" in e.value.hint


def test_fields_that_change_nothing_do_not_keep_a_plan_from_being_exported():
    plan = Plan(MeshPlan((Axis("dp", 8),)), layers={"*": "keep", "blocks": "keep*4"}, reduce={"rail": Reduce()})
    assert json.loads(plan.export("json"))["mesh"]["axes"] == {"dp": 8}


def test_what_cannot_be_exported_says_why():
    with pytest.raises(PlanError, match="export as 'yaml'"):
        Plan(MeshPlan((Axis("dp", 8),))).export("yaml")
    table = jnp.ones((16, 16))
    closed = lensjax.parallelize(lambda p, x: sgd(p, x @ table), plan="dp")
    closed.plan_for(weights(), data())
    with pytest.raises(PlanError, match="closes over 1 arrays"):
        closed.export("python")

    def printing(p, x):
        jax.debug.print("{}", x.sum())
        return sgd(p, x)

    chatty = lensjax.parallelize(printing, plan="dp")
    chatty.plan_for(weights(), data())
    with pytest.raises(PlanError, match="cannot be written to a file"):
        chatty.export("python")

    def in_place(model, x):
        model.w[...] = model.w[...] - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(model.w[...])

    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((16, 64)))

    modules = lensjax.parallelize(in_place, plan="fsdp")
    modules.plan_for(Net(), data())
    with pytest.raises(PlanError, match="updates modules in place"):
        modules.export("python")
    assert json.loads(modules.export("json"))["arguments"]["model/w"] == [None, ["fsdp"]]


def main(families) -> int:
    """Every family under every preset, a line each; the number of cells that differ."""
    differ = 0
    for family, plan in itertools.product(families, PRESETS):
        if not applies(family, plan):
            print(f"{family} {plan}: does not apply", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(pathlib.Path(folder), [(family, plan)])
            except Exception as e:
                differ += 1
                print(f"{family} {plan}: DIFFERS: {type(e).__name__}: {str(e)[:2000]}", flush=True)
                continue
        print(f"{family} {plan}: the same collectives", flush=True)
    return differ


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  (eight emulated devices, before the first use of JAX)

    sys.exit(min(main(sys.argv[1:] or SAMPLE), 1))
