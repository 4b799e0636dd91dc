"""Fits the collective constants to a published table and writes lensjax/topology/collectives_fitted.py.

    python benchmarks/fit_collectives.py tests/data/collectives.csv lensjax/topology/collectives_fitted.py
"""

import pprint
import sys

from lensjax.topology.calibrate import fit
from lensjax.topology.collectives_table import read_table

HEAD = '''"""Constants fitted to published collectives: made by benchmarks/fit_collectives.py from {source}, not edited.

Logarithms; see calibrate.Fit. Deviations below 0.5 % are left out.
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
            f.write(f"{name} = {pprint.pformat(_rounded(value), width=118)}\n")


def _rounded(value):
    """Three digits, small deviations dropped (the base has none that small)."""
    if isinstance(value, dict):
        return {k: v for k, v in ((k, _rounded(v)) for k, v in value.items()) if v not in ({}, 0.0)}
    return round(value, 3) if abs(value) >= 0.005 else 0.0


if __name__ == "__main__":
    main()
