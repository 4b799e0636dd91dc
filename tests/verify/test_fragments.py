"""Traces from XLA's buffer assignment: who is asked for what, in which order, and what to set."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensjax.verify.allocator import replay
from lensjax.verify.artifact import Artifact, Memory
from lensjax.verify.assignment import Life, Placed, allocations, lives, values
from lensjax.verify.fragments import advice, buffer_events, fragmentation, step_events
from tests.gpu_compiler import needs_gpu_compiler

ASSIGNMENT = """BufferAssignment:
allocation 0: size 1024, parameter 0, shape |f32[256]| at ShapeIndex {}, maybe-live-out:
 value: <1 w @0> (size=1024,offset=0): f32[256]{0}
allocation 1: size 512, parameter 1, shape |f32[128]| at ShapeIndex {}:
 value: <2 x @0> (size=512,offset=0): f32[128]{0}
allocation 2: size 4, maybe-live-out:
 value: <3 loss @0> (size=4,offset=0): f32[]
allocation 3: size 2, thread-local:
 value: <4 inner @0> (size=2,offset=0): bf16[]
allocation 4: size 3072, preallocated-temp:
 value: <5 a @0> (size=1024,offset=0): f32[256]{0}
 value: <6 b @0> (size=1024,offset=0): f32[256]{0}
 value: <7 c @0> (size=2048,offset=1024): f32[512]{0}
 value: <8 d{} @0> (size=512,offset=0): f32[128]{0}
"""
LIVENESS = """HloLiveRange (max 9):
  InstructionSequence:
    0:w
    1:x
    2:a
    3:b
    4:c
    5:d
    6:loss
  BufferLiveRange:
    a{}:2-3
    b{}:3-4
    c{}:4-5
    d{}:5-6
"""
MEMORY = Memory(arguments=1536, outputs=1028, aliased=1024, temporaries=3072, peak=4612)


def artifact(**changes):
    made = Artifact("cuda", "h100-80gb", 1, "", MEMORY, ASSIGNMENT, LIVENESS)
    return dataclasses.replace(made, **changes)


def test_allocations_say_what_is_donated():
    found = allocations(ASSIGNMENT)
    assert [(a.bytes, a.kind, a.kept) for a in found] == [
        (1024, "argument", True), (512, "argument", False), (4, "output", True), (3072, "temporary", False)
    ]  # fmt: skip


def test_a_result_written_over_its_operand_is_one_buffer():
    found = fragmentation(artifact())
    assert found is not None
    assert (found.block, found.live) == (3072, 3072)  # a and b are one buffer of 1024, with c of 2048
    assert found.buffers.need == 3072  # d finds the place of a and b


def test_the_carry_of_a_loop_is_a_value_too():
    text = ASSIGNMENT.replace("<7 c @0>", "<7 loop{1} (phi) @0>")
    assert ("loop{1}", 2048, 1024) in [(v.name, v.bytes, v.offset) for v in values(text)]


def test_a_donating_step_asks_for_its_block_its_batch_and_its_loss():
    made = replay(step_events(allocations(ASSIGNMENT), steps=3))
    assert [n for _, n in made.places[:5]] == [1024, 512, 256, 3072, 512]
    assert len(made.places) == 2 + 3 * 3 and made.peak == 1024 + 2 * 512 + 2 * 256 + 3072


def test_a_step_that_does_not_donate_holds_two_states():
    text = ASSIGNMENT.replace("{}, maybe-live-out", "{}").replace("allocation 2: size 4,", "allocation 2: size 1024,")
    events = list(step_events(allocations(text), steps=3))
    made = replay(events)
    assert made.peak == 2 * 1024 + 2 * 512 + 3072
    held = {e.name for e in events if e.bytes is not None} - {e.name for e in events if e.bytes is None}
    assert held == {(2, "made", 2), (1, "batch", 3)}  # the last state, and the batch after it


def test_only_gpus_have_such_an_allocator():
    assert fragmentation(artifact(backend="tpu")) is None
    assert fragmentation(artifact(assignment="")) is None


@pytest.mark.parametrize(
    "memory, said",
    [
        (100_000, "nothing to set"),
        (7_000, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.86"),
        (6_000, "does not fit"),
    ],
)
def test_advice(memory, said):
    found = fragmentation(artifact())
    assert found is not None and found.steps.need == 5888
    assert said in advice(found, memory)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(0, 20), st.integers(1, 10)), max_size=20))
def test_merged_buffers_cover_every_value_and_use_no_more_than_the_block(found):
    placed = [Placed(str(i), n, at, "", 0, "temporary") for i, (_, _, at, n) in enumerate(found)]
    when = {str(i): (first, first + more) for i, (first, more, _, _) in enumerate(found)}
    made = lives(placed, when)
    end = max((v.offset + v.bytes for v in placed), default=0)
    for t in range(42):
        used = sum(x.bytes for x in made if x.first <= t <= x.last)
        touched = {
            b for v in placed if when[v.name][0] <= t <= when[v.name][1] for b in range(v.offset, v.offset + v.bytes)
        }
        assert len(touched) <= used <= max(end, 1) * (used > 0)


def test_the_trace_takes_before_it_returns():
    made = replay(buffer_events([Life(256, 0, 2), Life(256, 2, 3)]))
    assert made.peak == 512


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("scan", [True, False])
def test_a_compiled_step(scan):
    from lensjax.commands.verify import to_json
    from lensjax.models.targets import target
    from lensjax.program.program import analyze
    from lensjax.search.presets import preset
    from lensjax.topology.cluster import Cluster
    from lensjax.verify.page import page
    from lensjax.verify.proof import prove

    step, *arguments = target("llama3-tiny", 64, 256, scan=scan)
    program = analyze(step, tuple(arguments))
    proof = prove(program, preset("fsdp", program, 8), Cluster.parse("dgx-h100:1"))
    found, memory = proof.audit.fragmentation, proof.audit.artifact.memory
    assert found is not None
    assert found.block <= memory.temporaries and 0.8 * found.block < found.live <= found.block
    # Nothing but the next batch and the last loss is held beside what the compiler says.
    assert 1 <= found.steps.ratio < 1.01 and memory.peak <= found.steps.peak < 1.05 * memory.peak
    assert found.live <= found.buffers.peak < 1.01 * found.live
    assert to_json(proof)["allocator"]["advice"].startswith("nothing to set")
    assert "allocator: 4 steps ask for" in str(proof) and "allocator: 4 steps" in page(proof)
