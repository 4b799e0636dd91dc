"""How each family of the model zoo splits: the table of docs/split.md.

    JAX_PLATFORMS=cpu python -m benchmarks.split_table [FAMILY ...]

Two traces and the analysis; nothing is computed or compiled.
"""

from __future__ import annotations

import sys

import jax

from lensjax.execute.in_place import InPlace
from lensjax.program.program import Program, analyze
from tests.zoo import FAMILIES


def program(name: str) -> Program:
    """The program of a family's step."""
    family = FAMILIES[name]
    case = family.make()
    state, batch = case.init(jax.random.key(0)), case.batch(jax.random.key(1))
    args = (state, batch) if family.form == "state" else (*state, batch)
    if family.form != "modules":
        return analyze(case.step, args, **family.options)
    pure = InPlace(case.step)
    taken, named = pure.take(args, {}).tree
    return analyze(pure.pure, taken, named, **family.options)


def row(name: str) -> str:
    split = program(name).split
    if not split.node:
        return f"| {name} | - | - | refused: {split.node.reason} | refused |"
    early = sum(c.early for c in split.cuts)
    micro = (
        f"exact, {split.passes} pass{'es' * (split.passes > 1)}" if split.micro else f"refused: {split.micro.reason}"
    )
    return f"| {name} | {len(split.cuts)} | {early} | exact | {micro} |"


def main(names: list[str]) -> None:
    print("| family | cuts | needed before a share is done | over nodes | in micro-batches |")
    print("|---|---|---|---|---|")
    for name in names or FAMILIES:
        print(row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
