"""Every operation with a known rule that a plan leaves whole along a mesh axis has its line in `explain()`."""

import re

import jax
import pytest

import lensjax
from lensjax import PlanError
from lensjax.partition import partition
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.report.alike import alike
from lensjax.search.presets import preset
from tests.search.test_lost_batch import program_of
from tests.zoo import FAMILIES

PLANS = ("dp=2,fsdp=4", "fsdp=2,tp=4", "dp=2,fsdp=2,tp_sp=2", "dp=2,ep=4")
COLLECTIVES = ("all_gather", "all_slice", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
NO_RULE = ("constant", "iota", "while", "case", "optimization_barrier", "custom_call", "reshape", "broadcast_in_dim")


def left_whole(parts, axis):
    """Counted from the partitioner's own account, node by node."""
    count, todo = 0, [parts.body]
    while todo:
        body = todo.pop()
        for node in body.nodes:
            todo += node.bodies
            values = [parts.values[v] for v in (*node.inputs, *node.outputs)]
            named = {a.split(":")[0] for v in values for axes in v.spec for a in axes}
            moved = node.name in COLLECTIVES
            if node.outputs and any(v.shape for v in values) and axis not in named and not moved:
                count += not any(node.name.endswith(n) for n in NO_RULE)
    return count


def check(name, text):
    program = program_of(name)
    try:
        plan = preset(text, program, 8)
    except PlanError:
        plan = preset("dp=2,fsdp=4", program, 8)
    parts = partition(lower(emit(program, plan, abstract_mesh(plan)), "cpu"))
    said = {a.axis: a for a in alike(program, plan)}
    for axis in parts.mesh:
        count = left_whole(parts, axis)
        assert count == (said[axis].operations if axis in said else 0), (name, text, axis)
        if count:
            assert re.search(rf"on all {parts.mesh[axis]} devices along '{axis}'.*: {count} operation", str(said[axis]))


@pytest.mark.parametrize("name, plan", [("mlp", "dp=2,fsdp=4")])
def test_what_is_left_whole_is_told(name, plan):
    check(name, plan)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(FAMILIES)))
def test_what_is_left_whole_is_told_for_every_family(index):
    check(list(FAMILIES)[index], PLANS[index % len(PLANS)])


def test_explain_has_the_lines():
    made = FAMILIES["mlp"].make()
    step = lensjax.parallelize(made.step, plan="dp", cluster="cpu:8")
    step.plan_for(jax.eval_shape(made.init, jax.random.key(0)), jax.eval_shape(made.batch, jax.random.key(1)))
    text = " ".join(step.explain().split())
    for entry in alike(step.program, step.plan):
        assert f"{entry.operations} operations" in text and entry.lines and "mlp.py:" in str(entry)
