"""Fits the collective constants to a published table and writes lensjax/topology/collectives_fitted.py.

python benchmarks/fit_collectives.py tests/data/collectives.csv lensjax/topology/collectives_fitted.py
"""

import sys

from lensjax.topology.calibrate import fit
from lensjax.topology.collectives_table import read_table

HEAD = '''"""Constants fitted to published collectives, by benchmarks/fit_collectives.py from {source}.

Made, not edited. Logarithms; see calibrate.Fit. Deviations below 0.5 % are left out.
"""

# fmt: off
'''


def main() -> None:
    table, target = sys.argv[1:3]
    found = fit(read_table(table))
    parts = {"BASE": found.base, "FAMILIES": found.families, "SYSTEMS": found.systems, "SUBSETS": found.subsets}
    with open(target, "w", encoding="utf-8") as f:
        f.write(HEAD.format(source=table))
        for name, value in parts.items():
            f.write(f"{name} = {_literal(_rounded(value))}\n")


def _literal(value, indent=0):
    """A dict of numbers as filled lines, a dict of dicts as one block a key."""
    pad = " " * (indent + 4)
    if any(isinstance(v, dict) for v in value.values()):
        lines = [f"{pad}{k!r}: {_literal(v, indent + 4)},\n" for k, v in value.items()]
        return "{\n" + "".join(lines) + " " * indent + "}"
    lines = [pad]
    for item in (f"{k!r}: {v}," for k, v in value.items()):
        if len(lines[-1]) + len(item) > 118 and lines[-1] != pad:
            lines.append(pad)
        lines[-1] += item if lines[-1] == pad else f" {item}"
    return "{\n" + "".join(f"{line}\n" for line in lines) + " " * indent + "}"


def _rounded(value):
    """Three digits; deviations below half a percent dropped (the base has none that small)."""
    if isinstance(value, dict):
        return {k: v for k, v in ((k, _rounded(v)) for k, v in value.items()) if v not in ({}, 0.0)}
    return round(value, 3) if abs(value) >= 0.005 else 0.0


if __name__ == "__main__":
    main()
