"""Which arguments are the batch, and which dimension of every value is: two-point tracing.

The step is traced at two batch sizes. The two programs have the same structure and differ only in shapes, so the
dimension that differs is the batch. Nothing is assumed about names or positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax

from lensjax import _jax
from lensjax._errors import BatchError, PartitionError, TraceError, UnsupportedJax
from lensjax.program.edit import bodies, is_var
from lensjax.program.logical import logical_axes
from lensjax.program.trace import Traced, abstract, trace_call


@dataclasses.dataclass(frozen=True)
class Batch:
    """The batch of a step.

    `size`: N; `axes`: {argument index: dimension}; `dims`: {variable: dimensions whose size depends on N}, at every
    depth; `small`: the size of the second trace; `reason`: why there is none, and where `dims` come from then;
    `second`: the program of the second trace, equation by equation the same; `doubt`: what was tried before this batch
    was found, where that may be the batch as well.
    """

    size: int
    axes: dict[int, int]
    dims: dict[Any, tuple[int, ...]]
    small: int | None = None
    reason: str = ""
    second: Any = dataclasses.field(default=None, repr=False, compare=False)
    doubt: str = ""

    def plain(self, var: Any) -> tuple[int, ...]:
        """Dimensions of `var` that are exactly the batch (not merged with another dimension)."""
        return tuple(d for d in self.dims.get(var, ()) if var.aval.shape[d] == self.size)


def second_size(n: int) -> int:
    """The largest proper divisor that is at least 2, so that assertions on the size mostly hold; 2n where there is
    none."""
    return next((n // f for f in range(2, n) if n % f == 0 and n // f >= 2), 2 * n)


def find_batch(
    fn: Callable,
    traced: Traced,
    candidates: Sequence[int],
    unused: Set[int] = frozenset(),
    axes: dict[int, int] | None = None,
    accept: Callable[[Batch], bool] = lambda batch: True,
) -> Batch:
    """Finds the batch among the argument leaves `candidates` (indices), or takes `axes` as told.

    Leaves in `unused` play no part in the results (labels of a loss whose gradient does not need them): they are
    resized with their group, but are no batch of their own.

    `accept(batch)` has the last word on a group that could be resized.

    Groups of equal size along axis 0 are tried first, then along axis 1, each alone. Raises BatchError, saying what was
    seen, when none or more than one group can be resized.
    """
    if axes is not None:
        return _told(fn, traced, axes)
    tried: list[str] = []
    for axis in (0, 1):
        groups: dict[int, list[int]] = {}
        for i in candidates:
            shape = abstract(traced.call.leaves[i]).shape
            if len(shape) > axis:
                groups.setdefault(shape[axis], []).append(i)
        found = []
        for size, members in groups.items():
            if size == 0 or all(i in unused for i in members):
                continue
            attempt = {i: axis for i in members}
            try:
                one = _attempt(fn, traced, attempt, size)
                if not accept(one):
                    raise _Mismatch("the step loops over it, and computes nothing with it as a whole")
                found.append(one)
            except _Mismatch as e:
                names = ", ".join(traced.call.paths[i] for i in members)
                tried.append(f"  axis {axis}, size {size} ({names}): {e}")
        if len(found) == 1:
            return dataclasses.replace(found[0], doubt=_doubt(traced, found[0], tried) if axis else "")
        if len(found) > 1:
            seen = "; ".join(f"{b.size} along axis {axis} of {_names(traced, b.axes)}" for b in found)
            raise BatchError(
                f"more than one group of arguments could be the batch: {seen}",
                hint="name the batch: parallelize(batch_argnums=..., batch_axes=...), the positions of the batch "
                "arguments and the batch dimension of their leaves (None for a leaf that has none)",
            )
    hint = "name the batch: parallelize(batch_argnums=..., batch_axes=...)"
    if not tried:
        hint = "a step needs an argument with its batch: one that it draws from its state, draw outside and hand over"
    listed = "\n".join(tried) or "  no array argument is left that is not state or a key"
    raise BatchError(
        f"no argument was found whose leading size the step leaves free; tried:\n{listed}", hint=hint, code="no_batch"
    )


def _doubt(traced: Traced, batch: Batch, tried: Sequence[str]) -> str:
    """For a batch found along a later dimension: a step that keeps something for each example in its state, or is
    written for one size, hides the first one."""
    if not tried:
        return ""
    axis = next(iter(batch.axes.values()))
    return (
        f"dimension {axis} of {_names(traced, batch.axes)} is taken for the batch ({batch.size}), since the step "
        f"leaves no leading size free; tried:\n{chr(10).join(tried)}\nif one of these is the batch, name it: "
        "parallelize(batch_argnums=..., batch_axes=...)"
    )


def _told(fn: Callable, traced: Traced, axes: dict[int, int]) -> Batch:
    sizes = {abstract(traced.call.leaves[i]).shape[a] for i, a in axes.items()}
    if len(sizes) != 1:
        raise BatchError(
            f"the batch arguments disagree on the batch size: {sorted(sizes)} ({_names(traced, axes)})",
            hint="one size is split: name the arguments of that size alone, or give batch_axes a None for the leaves "
            "of another; those are whole on every device",
        )
    size = sizes.pop()
    try:
        return _attempt(fn, traced, axes, size)
    except _Mismatch as e:
        why = f"the step could not be traced at a second batch size: {e}"
        try:
            dims = dims_by_rules(traced, axes)
        except (PartitionError, UnsupportedJax) as other:
            return Batch(size, dict(axes), {}, None, f"{why}; and the partitioner cannot follow it: {other.message}")
        return Batch(size, dict(axes), dims, None, f"{why}; the partitioner's rules follow it through the step instead")


def dims_by_rules(traced: Traced, axes: Mapping[int, int]) -> dict[Any, tuple[int, ...]]:
    """{variable: its batch dimensions} without a second trace: those that Shardy's rule for some operation ties to the
    batch dimension of an argument.

    It knows less than two traces: a dimension of another argument that is tied to the batch (a weight per example) is
    left out, and a size that depends on the batch in another way is not seen.
    """
    inner = _jax.open_jaxpr(traced.jaxpr)
    paths = [*traced.call.paths, *(f"captured/{i}" for i in range(len(traced.captured)))]
    logical = logical_axes(traced.jaxpr, paths, axes)
    batch = {i for i, name in enumerate(logical.names) if name == "batch"}
    others = {v for i, v in enumerate(inner.invars) if i not in axes}
    found = {
        v: tuple(d for d, dimension in enumerate(dimensions) if batch.intersection(dimension))
        for v, dimensions in logical.dims.items()
        if v not in others
    }
    return {v: dims for v, dims in found.items() if dims}


def _names(traced: Traced, axes: dict[int, int]) -> str:
    return ", ".join(traced.call.paths[i] for i in axes)


class _Mismatch(Exception):
    """The second trace failed or has another structure."""


def _attempt(fn: Callable, traced: Traced, axes: dict[int, int], size: int) -> Batch:
    small = second_size(size)
    avals = [abstract(leaf) for leaf in traced.call.leaves]
    for i, axis in axes.items():
        shape = list(avals[i].shape)
        shape[axis] = small
        avals[i] = jax.ShapeDtypeStruct(tuple(shape), avals[i].dtype, weak_type=avals[i].weak_type)
    try:
        other = trace_call(fn, traced.call, avals)
    except TraceError as e:
        raise _Mismatch(e.message) from e
    except Exception as e:  # the user's own code refused the size: any exception of theirs means "not the batch"
        raise _Mismatch(str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__) from e
    dims: dict[Any, tuple[int, ...]] = {}
    _compare(_jax.open_jaxpr(traced.jaxpr), _jax.open_jaxpr(other.jaxpr), dims)
    return Batch(size, dict(axes), dims, small, second=other.jaxpr)


def _compare(a: Any, b: Any, dims: dict[Any, tuple[int, ...]]) -> None:
    """Walks two programs in step and records the dimensions in which their variables differ."""
    if len(a.eqns) != len(b.eqns) or len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
        raise _Mismatch(f"the program has {len(b.eqns)} instead of {len(a.eqns)} equations at another size")
    for x, y in zip(a.invars, b.invars):
        _differ(x, y, dims)
    for e, f in zip(a.eqns, b.eqns):
        if e.primitive.name != f.primitive.name or len(e.outvars) != len(f.outvars):
            raise _Mismatch(f"{e.primitive.name} became {f.primitive.name} at another size ({_jax.user_line(e)})")
        for x, y in zip(e.outvars, f.outvars):
            _differ(x, y, dims)
        for p, q in zip(bodies(e), bodies(f)):
            _compare(_jax.open_jaxpr(p), _jax.open_jaxpr(q), dims)


def _differ(x: Any, y: Any, dims: dict[Any, tuple[int, ...]]) -> None:
    if not (is_var(x) and is_var(y)):
        return
    s, t = getattr(x.aval, "shape", ()), getattr(y.aval, "shape", ())
    if len(s) != len(t):
        raise _Mismatch(f"a value has rank {len(t)} instead of {len(s)} at another size")
    if differing := tuple(d for d in range(len(s)) if s[d] != t[d]):
        dims[x] = differing
