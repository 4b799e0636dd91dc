"""The global batch from what each process loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lensjax._errors import BatchError
from lensjax.execute.processes import agree, batch_made
from lensjax.passes.shardings import named
from lensjax.plan.plan import Spec
from lensjax.program.program import Argument
from lensjax.program.trace import abstract, is_dynamic


def from_local(batch: Any, members: Sequence[tuple[Argument, Spec]], mesh: Any, agreed: set[Any]) -> Any:
    """Process-local rows -> global arrays. `members`: the batch arguments with their specs; `agreed`: shapes that all
    processes were found to bring (with their types), which are not compared again.

    Raises BatchError, on every process, when the processes bring other shapes or types than each other, or not the
    planned ones; ProcessError on the one that brings something new when another goes on as before.
    """
    flat, tree = jax.tree.flatten(batch)
    if wrong := [x for x in flat if not is_dynamic(x)]:
        raise BatchError(f"a batch is made of arrays; this one has a {type(wrong[0]).__name__}: {str(wrong[0])[:60]!r}")
    for x in flat:
        if isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and x.is_deleted()):
            what = "deleted, or donated to an earlier call" if isinstance(x, jax.Array) else "a shape only"
            raise BatchError(f"a batch is made of arrays; one of this one is {what}: {abstract(x)}")
    kinds = tuple((tuple(k.shape), str(k.dtype)) for k in map(abstract, flat))
    if kinds not in agreed:
        shapes = [shape for shape, _ in kinds]
        # The types too: where they differ, each process would trace a program of its own.
        types = [dtype for _, dtype in kinds]
        said = {"shapes of its own part of the batch": shapes, "types of its own part of the batch": types}
        mine = ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in kinds)
        passed_by = f"goes on with batches as before, and process {jax.process_index()} brings another: {mine}"
        agree("make a global batch", said, BatchError, passed_by)
        check(members, shapes)
        agreed.add(kinds)
    batch_made()
    specs = [named(mesh, spec) for _, spec in members]
    return jax.tree.unflatten(
        tree, [jax.make_array_from_process_local_data(s, np.asarray(x)) for x, s in zip(flat, specs)]
    )


def check(members: Sequence[tuple[Argument, Spec]], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises BatchError when a process's part of the batch is not its share of the planned one."""
    if len(shapes) != len(members):
        raise BatchError(
            f"the batch has {len(shapes)} leaves; the step's has {len(members)}: "
            + ", ".join(a.path for a, _ in members)
        )
    processes = jax.process_count()
    for (a, _), shape in zip(members, shapes):
        axis = a.batch_axis or 0
        wanted = tuple(n // processes if d == axis else n for d, n in enumerate(a.shape))
        if shape != wanted or a.shape[axis] % processes:
            raise BatchError(
                f"this process brings {a.path} with shape {shape}; with {processes} processes its part of the planned "
                f"{a.shape} is {wanted}",
                hint="each process passes its own rows along the batch dimension, the same number in each process",
            )
