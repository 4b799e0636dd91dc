"""Seconds that levels take: choosing them for 126 layers, and carrying them out on a program of 10,000 equations.

    python benchmarks/recompute_speed.py [--json]

The choice is the dynamic program over 126 layers of which no two are alike, each with five levels of random costs, at
budgets from tight to loose. The program is a GPT whose layers are written out, as many as give 10,000 equations.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.recompute_models import gpt
from lensjax import _jax
from lensjax.cost.levels import Option
from lensjax.passes.recompute import recompute
from lensjax.passes.shardings import resolve
from lensjax.program.program import analyze
from lensjax.search.levels import cheapest
from lensjax.search.presets import preset

LAYERS, LEVELS, EQUATIONS = 126, 5, 10_000


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def choice() -> float:
    """The slowest of five budgets."""
    rng = np.random.default_rng(0)
    layers = []
    for _ in range(LAYERS):
        keep = float(rng.uniform(50, 100))
        options = [Option("keep", keep, keep, 0.0)]
        for _ in range(LEVELS - 1):
            kept = float(rng.uniform(0, keep))
            options.append(Option("other", kept, kept + float(rng.uniform(0, keep)), float(rng.random())))
        layers.append(options)
    whole = sum(options[0].kept for options in layers)
    return max(seconds(lambda b=b: cheapest(layers, b * whole)) for b in (0.2, 0.4, 0.6, 0.8, 0.95))


def passes() -> tuple[int, dict[str, float]]:
    """Equations of the program, and {level: seconds}."""
    few, more = (_program(n) for n in (4, 8))
    each = (_equations(more) - _equations(few)) / 4
    program = _program(8 + int(-(-(EQUATIONS - _equations(more)) // each)))
    plan = preset("dp", program, 8)
    shardings = resolve(program, plan)
    found = {}
    for level in ("scores", "dots", "inputs", "recompute", "offload"):
        made = plan.replace(layers={"*": level})
        found[level] = seconds(lambda made=made: recompute(program, made, shardings))
    return _equations(program), found


def _program(layers: int) -> Any:
    step, *arguments = gpt(layers=layers)
    return analyze(step, tuple(arguments))


def _equations(program: Any) -> int:
    return len(_jax.open_jaxpr(program.jaxpr).eqns)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chosen = choice()
    equations, took = passes()
    if args.json:
        print(json.dumps({"schema": 1, "choice_s": chosen, "equations": equations, "passes_s": took}))
        return
    print(f"choice for {LAYERS} layers, {LEVELS} levels each: {chosen:.2f} s")
    for level, s in took.items():
        print(f"pass, {equations:,} equations, {level:9} {s:.2f} s")


if __name__ == "__main__":
    main()
