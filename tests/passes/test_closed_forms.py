"""What presets send, against the closed forms of ring collectives, in compiled programs.

Per device, with n devices: FSDP `once` gathers each split weight once and reduce-scatters its gradient, 2(n-1)/n of
the bytes; `again` gathers layer weights a second time in the backward, 3(n-1)/n (ZeRO stage 3; Rajbhandari et al.
2020, section 7).
"""

import collections

import jax.numpy as jnp
import pytest

from lensjax.models.targets import target
from lensjax.partition import partition
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from lensjax.verify import target_devices
from lensjax.verify.collectives import collectives
from lensjax.verify.hlo.parse import parse_hlo
from lensjax.verify.traffic import sent_bytes
from tests.closed_forms import CLUSTER, fsdp_bytes, mesh_on, split_and_whole
from tests.gpu_compiler import needs_gpu_compiler

DECODER = dict(dtype=jnp.float32, width=128, mlp=512, vocab=512, layers=4)


def program():
    step, state, batch = target("llama3-tiny", 16, 64, **DECODER)
    return analyze(step, (state, batch))


def compiled_traffic(plan, program, platform):
    mesh = mesh_on(plan, platform)
    text = lower(emit(program, plan, mesh), platform).compile().as_text()
    found = collections.Counter()
    for c in collectives(parse_hlo(text)).collectives:
        found[c.kind] += sent_bytes(c.kind, c.payload, c.members) * c.trips
    return found


@pytest.mark.few(1)
@needs_gpu_compiler
@pytest.mark.parametrize("gather", ["once", "again"])
def test_fsdp_compiled_for_h100_sends_the_closed_form(gather):
    p = program()
    plan = preset(f"fsdp:{gather}", p, 8)
    found = compiled_traffic(plan, p, "cuda")
    expected = fsdp_bytes(p, plan, gather, 8)
    assert sum(found.values()) == pytest.approx(expected, rel=0.02), (found, expected)
    split, _ = split_and_whole(p, plan)
    assert found["reduce-scatter"] == pytest.approx(7 / 8 * split, rel=0.02)


@pytest.mark.few(1)
@pytest.mark.parametrize("gather", ["once", "again"])
def test_fsdp_compiled_for_cpu_gathers_and_reduces_the_same(gather):
    """XLA:CPU never makes a reduce-scatter: gradients are all-reduced (twice the bytes) and sliced."""
    p = program()
    plan = preset(f"fsdp:{gather}", p, 8)
    found = compiled_traffic(plan, p, "cpu")
    split, whole = split_and_whole(p, plan)
    expected = fsdp_bytes(p, plan, gather, 8)
    gathers = expected - 7 / 8 * split - 2 * 7 / 8 * whole
    assert found["all-gather"] == pytest.approx(gathers, rel=0.02)
    assert found["all-reduce"] == pytest.approx(2 * 7 / 8 * (split + whole), rel=0.02)


@pytest.mark.few(3)
@pytest.mark.parametrize("text", ["dp", "zero1", "fsdp:once", "fsdp:again", "dp=2,fsdp=4"])
def test_the_partitioner_expects_the_closed_form(text):
    p = program()
    plan = preset(text, p, 8)
    sent = collections.Counter()
    ring = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
    for c in partition(lower(emit(p, plan, abstract_mesh(plan)), "cpu")).collectives:
        sent[c.op] += ring[c.op] * (c.group - 1) / c.group * c.bytes * c.trips
    split, whole = split_and_whole(p, plan)
    total = sum(p.arguments[i].nbytes for i in p.parameters)
    if text == "dp":
        expected = 2 * 7 / 8 * total
    elif text == "zero1":
        expected = 2 * 7 / 8 * total
    elif text == "dp=2,fsdp=4":
        expected = fsdp_bytes(p, plan, "again", 4) + 2 * 1 / 2 * (split / 4 + whole)
    else:
        expected = fsdp_bytes(p, plan, text.partition(":")[2], 8)
    assert sum(sent.values()) == pytest.approx(expected, rel=0.02), sent


@needs_gpu_compiler
def test_the_target_cluster_is_two_nodes_of_four():
    assert len(target_devices(CLUSTER)) == 8


@needs_gpu_compiler
def test_tensor_parallelism_compiled_for_h100_sends_the_closed_form():
    """Two all-reduces a layer in each direction (Shoeybi et al. 2019, figure 4), one each for the vocabulary's lookup
    and its gradient's input, and the gradients of each part over the other axis."""
    step, state, batch = target("llama3-tiny", 16, 64, remat="none", **DECODER)
    p = analyze(step, (state, batch))
    plan = preset("tp=4", p, 8)
    found = compiled_traffic(plan, p, "cuda")
    activation = 16 / 2 * 64 * DECODER["width"] * 4
    gradients = (
        2 * 1 / 2 * sum(p.arguments[i].nbytes / (4 if p.arguments[i].path in plan.leaves else 1) for i in p.parameters)
    )
    expected = (4 * DECODER["layers"] + 2) * 2 * 3 / 4 * activation + gradients
    assert found["all-reduce"] == pytest.approx(expected, rel=0.02)
    assert sum(found.values()) == pytest.approx(expected, rel=0.02)


def compiled_collectives(plan, program):
    text = lower(emit(program, plan, mesh_on(plan, "cuda")), "cuda").compile().as_text()
    return collectives(parse_hlo(text)).collectives


def sent(found):
    return sum(sent_bytes(c.kind, c.payload, c.members) * c.trips for c in found)


@needs_gpu_compiler
@pytest.mark.slow
def test_sequence_parallelism_compiled_for_h100_sends_the_closed_form():
    """In each layer two pairs of gather and scatter forward and two backward, and what was gathered gathered again for
    the weights' gradients rather than kept (Korthikanti et al. 2022, section 4.2.2): six gathers and four scatters."""
    step, state, batch = target("llama3-tiny", 16, 64, remat="none", **DECODER)
    p = analyze(step, (state, batch))
    found = compiled_collectives(preset("tp_sp=4", p, 8), p)
    activation = 3 / 4 * (16 / 2 * 64 * DECODER["width"] * 4)
    inside = [c for c in found if c.trips == DECODER["layers"]]
    kinds = {k: sent(c for c in inside if c.kind == k) for k in ("all-gather", "reduce-scatter", "all-reduce")}
    assert sent(inside) == pytest.approx(sum(kinds.values()))
    assert kinds["all-gather"] == pytest.approx(6 * DECODER["layers"] * activation, rel=0.02)
    assert kinds["reduce-scatter"] == pytest.approx(4 * DECODER["layers"] * activation, rel=0.02)
    in_layers = {i for layer in p.layers for i in layer.parameters}
    matrices = sum(p.arguments[i].nbytes for i in in_layers if len(p.arguments[i].shape) > 2)
    assert kinds["all-reduce"] == pytest.approx(2 * 1 / 2 * matrices / 4, rel=0.02)
    # The vocabulary, a table of `table` bytes, and the norms. Head: its input gathered and that one's gradient
    # scattered. Lookup: what each part of the table found is summed, and its gradient gathered. Both gradients over
    # the nodes.
    table = DECODER["vocab"] * DECODER["width"] * 4
    norms = sum(a.nbytes for a in map(p.arguments.__getitem__, p.parameters)) - matrices - 2 * table
    head, lookup = 2 * activation, 3 * activation
    total = sum(kinds.values()) + head + lookup + 2 * (2 * 1 / 2 * table / 4) + 2 * 7 / 8 * norms
    assert sent(found) == pytest.approx(total, rel=0.02)


@needs_gpu_compiler
@pytest.mark.slow
def test_hsdp_compiled_for_h100_reduces_in_the_node_and_the_shard_across():
    """Gathers and reduce-scatters of ZeRO-3 over the four devices of a node, and only a shard's all-reduce between the
    two nodes."""
    p = program()
    plan = preset("hsdp=4", p, 8)
    found = compiled_collectives(plan, p)
    node = lambda c: all(len({d // 4 for d in group}) == 1 for group in c.groups.tolist())
    split, whole = split_and_whole(p, plan)
    layers = sum(p.arguments[i].nbytes for x in p.layers for i in x.parameters if p.arguments[i].path in plan.leaves)
    inside, across = [c for c in found if node(c)], [c for c in found if not node(c)]
    assert {c.kind for c in across} == {"all-reduce"}
    assert sent(c for c in inside if c.kind == "all-gather") == pytest.approx(3 / 4 * (split + layers), rel=0.02)
    looped = [c for c in found if c.trips == DECODER["layers"]]
    assert sent(c for c in looped if c.kind == "reduce-scatter") == pytest.approx(3 / 4 * layers, rel=0.02)
    assert sent(c for c in looped if c in across) == pytest.approx(2 * 1 / 2 * layers / 4, rel=0.02)
    expected = fsdp_bytes(p, plan, "again", 4) + 2 * 1 / 2 * (split / 4 + whole)
    assert sent(found) == pytest.approx(expected, rel=0.02)


@pytest.mark.few(1)
@needs_gpu_compiler
@pytest.mark.parametrize("gather", ["once", "again"])
def test_weights_travel_in_the_type_they_are_computed_in(gather):
    """float32 parameters, bfloat16 arithmetic: matrices are gathered, and their gradients reduced, in two bytes."""
    step, state, batch = target("llama3-tiny", 16, 64, **{**DECODER, "dtype": jnp.bfloat16})
    p = analyze(step, (state, batch))
    plan = preset(f"fsdp:{gather}", p, 8)
    assert sum(compiled_traffic(plan, p, "cuda").values()) == pytest.approx(
        fsdp_bytes(p, plan, gather, 8) / 2, rel=0.02
    )
