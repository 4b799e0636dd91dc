"""A step that is known by two shorter ones: with L equal layers written out, it takes what the longer of the two takes,
and for every further layer what the two differ by."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from lensjax import _jax
from lensjax.program.program import Program, once
from lensjax.program.shorten import Short, shorten, stack_of
from lensjax.program.unrolled import Unrolled

# A stack is worth folding from so many layers on: two steps are then priced instead of one.
LAYERS = 16


class Apart(NamedTuple):
    """Layers that the shorter of two steps has at least, and the layers between the two."""

    least: int
    between: int


# Compilers take turns (a buffer for the even layers, one for the odd), and combine what many layers send. Where only
# the batch is split there is nothing between layers that they could treat so.
TURNS, PLAIN = Apart(3, 2), Apart(3, 1)


@dataclasses.dataclass(frozen=True)
class Folded:
    """`program` has `further` times as many layers more than `longer` as `longer` has more than `shorter`."""

    program: Program
    stack: Unrolled
    longer: Short
    shorter: Short
    further: int

    def tagged(self, forward: str, backward: str, outside: str) -> Program:
        """The longer step with these tags in the names of what the shorter one lacks: operations of the forward and the
        backward of its layers, and others (the update of their parameters)."""
        side = {i: forward for r in self.stack.repeats for i in r.forward}
        side.update((i, backward) for r in self.stack.repeats for i in r.backward)
        program, new = self.longer.program, []
        for i, eqn in zip(sorted(self.longer.equations), _jax.open_jaxpr(program.jaxpr).eqns):
            if i not in self.shorter.equations:
                info = eqn.source_info
                stack = info.name_stack.extend(side.get(i, outside))
                eqn = eqn.replace(source_info=info.replace(name_stack=stack))
            new.append(eqn)
        return dataclasses.replace(program, jaxpr=_jax.rebuild(program.jaxpr, eqns=new))

    @functools.cached_property
    def like(self) -> dict[int, int]:
        """Argument of the whole step that the longer one lacks -> the argument of the longer one that plays its
        part."""
        at = {i: k for k, i in enumerate(self.longer.kept)}
        return {gone: at[i] for gone, i in self.longer.like.items()}

    @functools.cached_property
    def alike(self) -> dict[int, list[int]]:
        """Argument of the longer step -> those of the whole step that it stands for."""
        found = {k: [i] for k, i in enumerate(self.longer.kept)}
        for gone, k in self.like.items():
            found[k].append(gone)
        return {k: sorted(v) for k, v in found.items()}


def folded(program: Program, apart: Apart = TURNS) -> Folded | None:
    """The step by two shorter ones; None where it has no stack of enough equal layers, or they cannot be taken out."""
    return _folded(program, apart)


@once
def _folded(program: Program, apart: Apart) -> Folded | None:
    stack = stack_of(program)
    if stack is None or stack.count < LAYERS:
        return None
    left = apart.least + (stack.count - apart.least) % apart.between
    shorter = shorten(program, stack, left)
    longer = shorten(program, stack, left + apart.between) if shorter is not None else None
    if shorter is None or longer is None:
        return None
    return Folded(program, stack, longer, shorter, (stack.count - left) // apart.between - 1)
