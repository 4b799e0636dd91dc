"""Why a tensor is split so: its alternatives, and what each costs."""

import pytest

from lensjax import Cluster, PlanError
from lensjax.report.explain import render, searched
from lensjax.report.explain_tensor import alternatives, explain_tensor, find
from lensjax.search.choose import choose
from tests.search.families import family


@pytest.fixture(scope="module")
def choice():
    return choose(family("mlp"), Cluster.parse("dgx-h100:1"))


def test_the_chosen_way_stands_first_and_the_others_cost_what_the_model_says(choice):
    program = choice.problem.program
    parameter = next(a.path for a in program.arguments if a.role == "parameter" and len(a.shape) == 2)
    rows = alternatives(choice, parameter)
    assert rows[0].chosen and sum(r.chosen for r in rows) == 1
    assert all(set(r.params) <= set(r.state) for r in rows)
    whole = [r for r in rows if not r.params and not r.state]
    assert len(whole) == 1, "keeping it whole is always a choice"
    text = render(explain_tensor(program, choice, parameter))
    assert parameter in text and "against the plan" in text and "the plan" in text


def test_a_moment_is_explained_with_its_parameter(choice):
    program = choice.problem.program
    moment = next(a for a in program.arguments if a.role == "optimizer")
    assert alternatives(choice, moment.path) == alternatives(choice, program.arguments[moment.follows].path)


def test_a_path_may_be_short_but_not_ambiguous_or_wrong(choice):
    program = choice.problem.program
    path = next(a.path for a in program.arguments if a.role == "parameter")
    assert program.arguments[find(program, path.partition("/")[2])].path == path
    with pytest.raises(PlanError, match="the step has no tensor 'nothing'"):
        find(program, "nothing")
    with pytest.raises(PlanError, match=r"'\*' names \d+ tensors"):
        find(program, "*")


def test_the_report_says_how_far_the_search_got(choice):
    (line,) = searched(choice)
    assert line.startswith(f"searched {choice.shapes} meshes with their rules")
    assert ("within" in line or "the best there is" in line) == (choice.gap is not None)
