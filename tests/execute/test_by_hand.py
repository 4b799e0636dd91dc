"""The decorated step is the hand-written one: with calls inlined and common subexpressions merged, its operations are
those of `jax.jit` with the same shardings, plus sharding constraints (which compile to nothing)."""

import collections

import jax
import pytest

from lensjax import _jax
from lensjax.partition.inline import inline_calls, main_function, walk
from lensjax.passes.emit import abstract_mesh, emit, lower, shapes
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from tests.zoo import FAMILIES


def operations(lowered):
    module = lowered.compiler_ir("stablehlo").operation.clone()
    with module.context:
        inline_calls(module)
    _jax.run_passes(module, "cse", "canonicalize", "cse")
    found = collections.Counter(op.name for op in walk(main_function(module)))
    del found["sdy.sharding_constraint"]
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ["mlp", "cnn_batchnorm", "gpt_unrolled", "gpt_scan_remat_dropout", "dlrm"])
@pytest.mark.parametrize("text", ["dp", "fsdp:once"])
def test_operations_are_the_hand_written_ones_plus_constraints(family, text):
    made = FAMILIES[family].make()
    state = jax.eval_shape(made.init, jax.random.key(0))
    batch = jax.eval_shape(made.batch, jax.random.key(1))
    program = analyze(made.step, (state, batch))
    plan = preset(text, program, 8)
    emitted = emit(program, plan, abstract_mesh(plan))
    ours = operations(lower(emitted, "cpu", donate=False))
    args, _ = program.call.rebuild(shapes(emitted))
    specs, _ = program.call.rebuild(emitted.arguments)
    hand = jax.jit(made.step, in_shardings=specs, keep_unused=True)
    theirs = operations(hand.trace(*args).lower(lowering_platforms=("cpu",)))

    cheap = {f"stablehlo.{n}" for n in ("broadcast_in_dim", "convert", "constant", "subtract", "multiply", "add")}
    assert {k: n for k, n in ours.items() if k not in cheap} == {k: n for k, n in theirs.items() if k not in cheap}
    # A constraint between two uses of a value keeps a few scalar-like operations from being merged.
    assert (ours - theirs).total() <= 0.002 * theirs.total()
