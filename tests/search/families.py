"""Programs of the zoo and of built-in models, analysed once for all tests of the search."""

import functools

import jax

from lensjax.models.targets import target
from lensjax.program.program import analyze
from tests.zoo import FAMILIES


@functools.cache
def family(name: str):
    """The program of a family of the zoo."""
    step, init, batch = FAMILIES[name].make()
    state = (
        jax.eval_shape(lambda: init(jax.random.key(0))) if FAMILIES[name].form == "state" else init(jax.random.key(0))
    )
    data = jax.eval_shape(lambda: batch(jax.random.key(1)))
    return analyze(step, (state, data), **FAMILIES[name].options)


@functools.cache
def model(name: str, batch: int, seq: int | None, **changes):
    """The program of a built-in model."""
    step, *arguments = target(name, batch, seq, **changes)
    return analyze(step, tuple(arguments))
