"""What is known to be right comes out of the search, and nothing here asks for it."""

import pytest

from lensjax import Cluster
from lensjax.search.choose import choose
from tests.search.families import model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eight():
    """Llama-3-8B on one node of eight H100s."""
    return choose(model("llama3-8b", 16, 4096), Cluster.parse("dgx-h100:1"))


def test_a_node_of_eight_takes_fsdp_alone_for_an_8b(eight):
    """Gathering 16 GB of weights over NVLink hides behind the matmuls of two sequences a device; tensor parallelism
    would stand in the way of each of them, and the state of plain data parallelism does not fit."""
    assert {a.name for a in eight.plan.mesh.axes} == {"fsdp"}
    assert eight.plan.rules.activations == {"batch": ("fsdp",)}


def test_the_handful_agrees_with_the_partitioner(eight):
    """Quick tables and re-scored price: within 5 % on what the search proposed."""
    proposed = [c for c in eight.candidates if c.searched and c.plan is not None]
    assert proposed
    for c in proposed:
        assert c.inner_s == pytest.approx(c.step_s, rel=0.05), c.name


def test_the_certified_gap_is_small(eight):
    assert eight.gap is not None and eight.gap <= 0.03 and eight.complete


def test_what_would_be_faster_in_memory_but_does_not_fit_is_not_chosen(eight):
    assert eight.plan.predicted.peak_bytes <= eight.memory
    whole = next(c for c in eight.candidates if c.name == "dp")
    assert not whole.fits(eight.memory), "the whole state of an 8B is 96 GB in float32"


def test_a_recommender_splits_its_large_tables_by_rows_over_the_devices_that_split_the_batch():
    """96 GB of tables fit no device, and gathering one moves gigabytes for a few rows; a lookup of each device's own
    rows moves the rows alone. The MLPs are small: they stay data parallel over the same devices."""
    choice = choose(model("dlrm", 65_536, None), Cluster.parse("dgx-h100:2"))
    rules = choice.plan.rules.activations
    rows = {name: mesh for name, mesh in rules.items() if name.startswith("params/table_")}
    assert len(rows) >= 4, rules
    assert all(mesh and set(mesh) <= set(rules["batch"]) for mesh in rows.values())
    assert choice.plan.leaves["state/params/table_0/embedding"][0], "split by rows"
    assert "state/params/top_0/kernel" not in choice.plan.leaves or choice.plan.gather
