"""Seeded faults are found, in every way of writing the step; clean programs give no finding."""

import dataclasses
import linecache

import pytest

from lensjax.topology.cluster import Cluster
from lensjax.verify.lint import lint
from tests.gpu_compiler import needs_gpu_compiler
from tests.verify.faults import CLEAN, FAULTS, SOUND, VARIANTS, repaired

FAST = ("unconstrained carry",)  # compiled in every run; the others when asked for


def half_nodes():
    """Two nodes of four H100: small enough to compile quickly, with two tiers."""
    one, two = Cluster.parse("dgx-h100:1"), Cluster.parse("dgx-h100:2")
    nvlink, rail = (dataclasses.replace(t, size=n) for t, n in zip(two.tiers, (4, 8)))
    return dataclasses.replace(one, name="two half nodes", tiers=(nvlink, rail))


def check_fault(name, variant):
    fault = FAULTS[name]
    program = VARIANTS[variant](fault)
    made = lint(program.step, program.arguments, cluster=half_nodes())
    assert not made.unknown
    hits = [f for f in made.findings if f.kind == fault.kind]
    assert hits, [f.kind for f in made.findings]
    assert hits[0].hint and hits[0].message
    if fault.line:
        file, _, rest = hits[0].line.rpartition(":")
        assert fault.line in linecache.getline(file, int(rest.split()[0]))


def check_clean(program):
    made = lint(program.step, program.arguments, cluster=half_nodes())
    assert [f for f in made.findings if f.severity != "note"] == []
    assert not made.unknown and not made.notes


@needs_gpu_compiler
@pytest.mark.parametrize("name", FAST)
def test_a_fault_is_found(name):
    check_fault(name, "scanned")


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["experts"])
def test_a_clean_program_gives_nothing(name):
    check_clean(CLEAN[name]())


def test_fifteen_faults_each_with_its_repair_in_four_ways_of_writing():
    assert len(FAULTS) >= 15 and set(VARIANTS) == {"scanned", "renamed", "unrolled", "nnx"}
    assert all(repaired(f) in SOUND.values() and repaired(f).scheme != f.scheme for f in FAULTS.values())


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_however_it_is_written(name, variant):
    check_fault(name, variant)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", CLEAN)
def test_no_clean_program_gives_a_finding(name):
    check_clean(CLEAN[name]())


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SOUND)
def test_without_its_fault_the_same_program_gives_nothing(name, variant):
    check_clean(VARIANTS[variant](SOUND[name]))


def test_batch_and_state_faults_show_on_the_cpu_compiler_too():
    """Without the GPU compiler the same audit runs on emulated devices, and says what that does not prove."""
    program = VARIANTS["scanned"](FAULTS["unconstrained carry"])
    made = lint(program.step, program.arguments, cluster=half_nodes(), backend="cpu")
    assert "batch_lost" in [f.kind for f in made.findings]
    assert any("emulated" in n for n in made.notes)
