"""What a strategy gets: made once, whatever the memory."""

from lensjax import Cluster
from lensjax.search.problem import Problem
from tests.search.families import family


def test_other_memory_keeps_what_was_made():
    problem = Problem(family("mlp"), Cluster.parse("cpu:4"), 1e9)
    tables, model = problem.tables, problem.model
    other = problem.with_memory(2e9)
    assert other.memory == 2e9 and problem.memory == 1e9
    assert other.tables is tables and other.model is model


def test_groups_hold_every_parameter_once():
    program = family("mlp")
    groups = Problem(program, Cluster.parse("cpu:4"), 1e9).tables.groups
    assert sorted(i for g in groups for i in g.leaves) == sorted(program.parameters)


def test_kernels_shrink_with_the_batch():
    """On twice the devices that split the batch a matmul takes half the arithmetic, and no kernel takes longer."""
    problem = Problem(family("mlp"), Cluster.parse("cpu:4"), 1e9)
    (pattern,) = {s.pattern for s in problem.shapes if s.pattern.roles == ("data",)}
    seconds = [problem.model.fixed_parts(pattern, (n,))[0].sum() for n in (1, 2, 4)]
    assert seconds[0] > seconds[1] > seconds[2]
