"""Rules of random numbers: a share takes its part of the draw that the full batch makes.

With jax's partitionable threefry element j of a draw depends on the key and on j alone, so the part is drawn by itself,
bit for bit the same. Other generators make the whole draw or nothing: a draw of the batch's shape is refused.
"""

from __future__ import annotations

from typing import Any

import jax

from lensjax.program.edit import shape_of
from lensjax.program.status.interpreter import Interpreter, Rule
from lensjax.program.status.lattice import Status, part, same
from lensjax.program.status.paired import Op


def draw(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    """`random_bits` and `random_split`."""
    s = an.total(op, 0, ins[0])
    dims = op.outs[0]
    if s.kind == "B":
        return an.result(op, 0, s.dim, s.inner, s.deps)
    if not dims:
        return same(s.deps)
    if len(dims) > 1:
        raise op.refuse("a random draw with two batch dimensions")
    if an.outer > 1:
        raise op.refuse("a random draw for a batch that the step itself splits")
    config: Any = jax.config
    generator = str(op.invars[0].aval.dtype)
    if generator != "key<fry>" or not config.jax_threefry_partitionable:
        off = "" if config.jax_threefry_partitionable else ", jax_threefry_partitionable off"
        raise op.refuse(
            f"a random draw of the batch's shape ({generator}{off}): only partitionable threefry draws a part by itself"
        )
    d = dims[0]
    an.fixes["draw", op] = d
    return part(d, shape_of(op.outvars[0])[d] // an.full, s.deps)


def wrap(an: Interpreter, op: Op, ins: list[Status]) -> Status:
    s = an.total(op, 0, ins[0])
    return s if s.kind == "B" else same(s.deps)


RULES: dict[str, Rule] = {
    "random_bits": draw,
    "random_split": draw,
    "random_wrap": wrap,
    "random_unwrap": wrap,
    "random_clone": wrap,
}
