"""Batch status: what every value of a step is, when each share of the batch computes on its own.

    split = analyze_status(program)      # or program.split, found when first asked for
    split.node, split.micro              # whether the step splits exactly over nodes, over micro-batches; else why not
    split.cuts                           # the partial sums that must become totals

See `lattice` for the statuses, `interpreter` for how they flow, and the rule files for each family of operations.
"""

from lensjax.program.status.analysis import Cut, Split, Verdict, analyze_status
from lensjax.program.status.lattice import Refused, Status

__all__ = ["Cut", "Refused", "Split", "Status", "Verdict", "analyze_status"]
