"""A plan's name and the devices, in an exported module."""

import dataclasses

import pytest

from lensjax._errors import PlanError
from lensjax.plan.export import write
from lensjax.plan.plan import Axis, MeshPlan, Micro, Plan


@pytest.mark.parametrize("form", ["python", "flax-rules"])
@pytest.mark.parametrize("name", ['q"""x', "back\\slash\\", "new\nline", "{brace}", '"', "'\""])
def test_any_name_leaves_a_module(form, name):
    plan = dataclasses.replace(Plan(MeshPlan((Axis("dp", 2),))), name=name)
    module = {}
    exec(write(plan, form), module)
    assert repr(name) in module["__doc__"] or name in module["__doc__"]


def test_another_number_of_devices_is_told():
    module = {}
    exec(write(Plan(MeshPlan((Axis("dp", 2),))), "python"), module)
    with pytest.raises(ValueError, match=r"3 devices; the mesh .* has 2"):
        module["mesh"]([1, 2, 3])


@pytest.mark.parametrize("form", ["python", "flax-rules", "json"])
def test_micro_batches_are_refused_in_every_form(form):
    plan = dataclasses.replace(Plan(MeshPlan((Axis("dp", 2),))), micro=Micro(4))
    with pytest.raises(PlanError, match="micro"):
        write(plan, form)
