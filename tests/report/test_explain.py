"""What people read: no number broken from its unit, no "0.0% faster", no sign on nothing."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import lensjax
from lensjax._units import duration, size
from lensjax.plan.plan import Axis, MeshPlan, Micro, Plan, Predicted, Provenance
from lensjax.report.explain import against, in_shares, reasons
from lensjax.report.flow import Flow
from lensjax.report.units import typed
from lensjax.search.candidates import Candidate, preferred
from lensjax.search.choose import Choice


def shown(item, width):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(item)
    return out.getvalue()


@pytest.mark.parametrize("width", range(24, 60))
def test_no_line_ends_inside_a_number(width):
    text = "predicted: 12.5 ms per step; sent per device and step: process 3.00 MiB, host 2.11 MiB, [rack] 7 B"
    lines = shown(Flow(text), width).splitlines()
    assert " ".join(" ".join(lines).split()) == text
    for part in ("process 3.00 MiB,", "host 2.11 MiB,", "12.5 ms", "7 B"):
        assert any(part in line for line in lines), lines


@given(st.floats(-1e6, 1e6))
def test_a_duration_has_its_sign_once_and_nothing_has_none(s):
    text = duration(s)
    assert text.count("-") <= 1 and not text.startswith(("-0 ", "-0.0 "))
    assert text.startswith("-") == (s < 0 and text != "0 s")


def test_small_numbers():
    assert [duration(x) for x in (-1e-12, 0.0, -2.0, 4.5e-5)] == ["0 s", "0 s", "-2.00 s", "45.0 us"]
    assert size(-0.2) == "0 B"


def candidate(name, step_s, peak):
    return Candidate(name, Plan(MeshPlan((Axis("dp", 8),)), name=name, predicted=Predicted(step_s, peak, {})))


@pytest.mark.parametrize(
    "step_s, peak, text",
    [
        (1.0, 1000.0, "as fast as other, the two cost the same, and the first that was tried is kept"),
        (1.0, 3048.0, "as fast as other, and takes 2.00 KiB less memory"),
        (1.0001, 900.0, "as fast as other, by 100.0 us the faster, with 100 B more memory"),
        (1.5, 1000.0, "50.0% faster"),
        (1.5, 900.0, "50.0% faster (memory +100 B)"),
    ],
)
def test_why_a_plan_won(step_s, peak, text):
    mine, other = candidate("mine", 1.0, 1000.0), candidate("other", step_s, peak)
    assert against(mine.plan.predicted, other) == text
    choice = Choice(mine.plan, (mine, other), 1e9)
    assert reasons(choice).text == f"chosen over other: {text}"


def test_of_two_that_are_as_fast_the_named_one_is_taken():
    found, named = candidate("searched fsdp=8", 1.0, 900.0), candidate("fsdp", 1.0001, 1000.0)
    assert preferred([found, named], 1e9) is named and preferred([found, named], 950.0) is found
    assert preferred([found, candidate("fsdp", 1.001, 1000.0)], 1e9) is found
    assert preferred([found], 1.0) is None
    assert reasons(Choice(named.plan, (found, named), 1e9)).text == (
        "searched fsdp=8 is 100.0 us faster: too little to tell the two apart, and a plan that has a name is taken then"
    )


def test_types_and_splits_as_people_write_them():
    def step(params, key, x):
        noise = jax.random.normal(key, x.shape)
        return params - jax.grad(lambda p: ((x + noise) @ p).mean())(params)

    train = lensjax.parallelize(step, plan="fsdp", batch_argnums=2)
    shapes = jax.eval_shape(lambda: (jnp.zeros((64, 64)), jax.random.key(0), jnp.zeros((8, 64))))
    train.plan_for(*shapes)
    assert "key<" not in train.explain_trace() and "float32[64, 64]" in train.explain_trace()
    assert typed(shapes[1].dtype, ()) == "key" and typed(shapes[1].dtype, (4,)) == "key[4]"
    assert "[fsdp, _]" in train.explain()  # and rich took it for no markup


def test_notices_are_no_markup():
    from lensjax.report.explain import render

    assert render(Flow("the leaf [batch] is whole")) == "the leaf [batch] is whole"


def test_the_table_keeps_numbers_and_names_whole():
    from lensjax.report.explain import refused, table

    fast, slow = candidate("dp=2,fsdp:again=4", 0.0181, 1012.27 * 1024), candidate("zero1", 0.0202, 2.21 * 2**20)
    other = [Candidate("tp", None, "no axis of 3"), Candidate("tp_sp", None, "no axis of 3")]
    choice = Choice(fast.plan, (fast, slow, *other), 1e9)
    text = shown(table(choice), 56)  # too narrow for the names, which fold
    assert "1012.27 KiB" in text and "dp=2,fsdp:again=4" not in text and "…" not in text
    assert shown(refused(choice), 80) == "tp, tp_sp do not apply: no axis of 3\n"
    assert refused(Choice(fast.plan, (fast, slow), 1e9)) is None


@pytest.mark.parametrize("width", [80, 120])
def test_what_holds_memory_names_every_plan_and_the_searched_one_too(width):
    """In 80 columns names fold and numbers stay whole; the plan that was chosen is among them, however it was found."""
    from lensjax.report.explain import held, table
    from lensjax.search.build import SEARCHED

    memory = {"parameter": 3e9, "optimizer": 7e9, "activations": 2e9, "communication": 1.0, "temporaries": 5e9}
    made = [
        candidate(name, 1.0, 17e9)
        for name in (f"{SEARCHED}dp=64,fsdp=4", f"{SEARCHED}dp=1", "zero1=32,fsdp:again=8", "dp")
    ]
    made = [
        dataclasses.replace(
            c, plan=dataclasses.replace(c.plan, predicted=Predicted(1.0, 17e9, {"nvlink": 4e10}, {}, memory))
        )
        for c in made
    ]
    choice = Choice(dataclasses.replace(made[0].plan, provenance=Provenance(cluster="x")), tuple(made), 8e10)
    text = shown(held(choice), width)
    folded = "".join("".join(line[:22].split("  ")[0].split()) for line in text.splitlines())
    for name in (f"{SEARCHED}dp=64,fsdp=4", "zero1=32,fsdp:again=8"):
        assert "".join(name.split()) in folded, text
    assert "dp=1" not in text and "communication" not in text and "other" in text
    assert all(len(line) <= width for line in text.splitlines()) and text.count("1.86 GiB") == 3
    assert shown(table(choice), width).count("37.25 GiB") == 4


def test_micro_batches_are_said_after_the_batch():
    said = [in_shares(Plan(MeshPlan((Axis("dp", 8),)), micro=m)) for m in (Micro(), Micro(4), Micro(share=16))]
    assert said == ["", " in 4 micro-batches", " in micro-batches of 16, any number of them"]


def test_a_slower_plan_is_not_called_faster():
    """A codec or a plan that was asked for stands beside what would be faster."""
    mine, other = candidate("asked", 279e-6, 2**20), candidate("dp", 82.6e-6, 2**20)
    assert "237.8% slower" in against(mine.plan.predicted, other)
