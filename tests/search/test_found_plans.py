"""Plans of the search run, and compute what one device computes: every role of a mesh axis, every way to store."""

import pytest

from lensjax.search.problem import Problem
from lensjax.search.solve import Solution
from lensjax.search.space import Shape
from lensjax.search.storage import Storage
from lensjax.search.strategies import nearest
from lensjax.topology.cluster import Cluster
from tests.same_numbers import compare
from tests.search.families import family

CLUSTER = Cluster.parse("cpu:8")


def plan_of(problem: Problem, shape: Shape, storage: Storage, again: bool = True):
    """The plan of a shape in which every group that can is stored so."""
    case = problem.model.case(shape.pattern, shape.sizes, again)
    chosen = tuple(nearest(options, storage) for options in case.options)
    return problem.plan(Solution(case, chosen, case.seconds(list(chosen)), case.bytes(list(chosen))))


def shape_with(problem: Problem, roles: tuple[str, ...], sizes: tuple[int, ...]) -> Shape:
    """The shape of these roles and sizes that rules the most axes."""
    found = [s for s in problem.shapes if s.pattern.roles == roles and s.sizes == sizes]
    assert found, {s.pattern.roles for s in problem.shapes}
    return max(found, key=lambda s: len(s.pattern.rules))


# family, roles, sizes, (axes of parameters, axes of state)
FAST = [
    ("gqa_rope_swiglu", ("data", "tensor"), (4, 2), ((0,), (0,))),
]
SLOW = [
    ("moe_dense", ("data", "expert"), (2, 4), ((0, 1), (0, 1))),
    ("gqa_rope_swiglu", ("data", "data"), (2, 4), ((1,), (0, 1))),
    ("gqa_rope_swiglu", ("data", "data", "tensor"), (2, 2, 2), ((0,), (0, 1))),
    ("gpt_scan_remat_dropout", ("tensor", "data"), (2, 4), ((1,), (1,))),
    ("dlrm", ("data", "tensor"), (2, 4), ((), (0,))),
    ("encoder_decoder", ("data", "tensor"), (4, 2), ((), (0,))),
    ("unet", ("data", "tensor"), (4, 2), ((0,), (0,))),
]


@pytest.mark.slow
@pytest.mark.parametrize("stored", [((), ()), ((0,), (0,))])
def test_a_plan_in_micro_batches_of_one_example_with_rules_equals_one_device(stored):
    """A share of one example has no batch axis, the update no sequence: rules for both are for other parts."""
    problem = Problem(family("gqa_rope_swiglu"), CLUSTER, CLUSTER.device.memory)
    local = problem.program.batch.size // 4
    pieces = problem.in_micro_batches(local)
    plan = plan_of(pieces, shape_with(pieces, ("data", "tensor"), (4, 2)), Storage(*stored))
    assert plan.micro.count == local and any(name != "batch" for name in plan.rules.activations)
    compare("gqa_rope_swiglu", plan, "cpu:8")


def check(name, roles, sizes, stored):
    problem = Problem(family(name), CLUSTER, CLUSTER.device.memory)
    plan = plan_of(problem, shape_with(problem, roles, sizes), Storage(*stored))
    assert {a.size for a in plan.mesh.axes} == set(sizes)
    compare(name, plan, "cpu:8")


@pytest.mark.slow
@pytest.mark.parametrize("name, roles, sizes, stored", FAST)
def test_a_found_plan_equals_one_device(name, roles, sizes, stored):
    check(name, roles, sizes, stored)


@pytest.mark.slow
@pytest.mark.parametrize("name, roles, sizes, stored", SLOW)
def test_every_found_plan_equals_one_device(name, roles, sizes, stored):
    check(name, roles, sizes, stored)
