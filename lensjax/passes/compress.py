"""How a plan's `reduce` field is carried out: which function reduces gradients over the slow axes, and what it keeps.

A codec's memory (residuals, low-rank factors) is a part of the plan's hidden state: arrays [devices, n], a row each.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from lensjax import comm
from lensjax._errors import CodecError, PlanError
from lensjax.passes.reduce import Arrays, Reducer, Specs, exact
from lensjax.passes.shardings import partition_spec
from lensjax.passes.share_layout import without
from lensjax.passes.share_sizes import slow_axes
from lensjax.plan.plan import Plan, Reduce, Spec


@dataclasses.dataclass(frozen=True)
class Compressed:
    """A reduction that sends codes over the slow axes. `inner`: the fast axes, innermost first: a gradient that is the
    same on all their members is cut up between them before, and gathered after, in full precision. `field`: where the
    plan says so."""

    policy: comm.Policy
    bucket: int
    inner: tuple[str, ...]
    field: str = "reduce"
    length: int = 0

    def layers(self, length: int) -> Compressed:
        """The same for single layers of stacks of `length`: a leaf has the codec that the whole stack would have."""
        return dataclasses.replace(self, length=length)

    def check(self, paths: Collection[str]) -> None:
        """Raises PlanError for a pin that matches none of the gradients' paths: a misspelt one would compress what it
        should protect."""
        try:
            self.policy.check(sorted(set(paths)))
        except CodecError as e:
            raise PlanError(f"field '{self.field}.pins' of the plan: {e.message}", hint=e.hint) from e

    def check_used(self, totals: Mapping[str, tuple[Any, Spec]], axes: tuple[str, ...]) -> None:
        """`totals`: {name: (type, spec)}. Raises PlanError for a codec that codes whole totals only, where every
        gradient that it is for stays split over `axes`: all of them would cross exactly."""
        codecs = {n: self.codec(n, x) for n, (x, _) in totals.items()}
        coded = {n for n, codec in codecs.items() if not isinstance(codec, comm.VectorCodec | comm.Exact)}
        if coded and all(comm.behind(totals[n][1], axes) is not None for n in coded):
            one = codecs[min(coded)]
            raise PlanError(
                f"field '{self.field}.codec' of the plan is {one}, which needs whole gradients; under this plan each "
                f"device keeps its part of them along {', '.join(axes)}, and they would cross exactly",
                hint="int8 or int4; or a plan whose optimizer state is whole over these axes (hsdp, dp)",
                code="codec",
            )

    def codec(self, path: str, leaf: jax.ShapeDtypeStruct) -> comm.Codec:
        """The codec of a gradient; a tensor that is used in several places may have several ("path#2")."""
        path = re.sub(r"#\d+$", "", path)
        if not self.length:
            return self.policy(path, leaf)
        codec = self.policy(path, jax.ShapeDtypeStruct((self.length, *leaf.shape), leaf.dtype))
        if isinstance(codec, comm.PowerSGD) and codec.stacked:  # one of the dimensions that it counts is the loop's
            return dataclasses.replace(codec, stacked=codec.stacked - 1)
        return codec

    def __call__(
        self, stacked: Arrays, *, mesh: Any, specs: Specs, axes: tuple[str, ...], state: Arrays
    ) -> tuple[Arrays, Arrays]:
        totals = {n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in stacked.items()}
        made: dict[str, Any] = {}
        after = dict(state)
        for kind, names in _kinds(specs, axes).items():
            tree = collections.OrderedDict((n, stacked[n]) for n in names)
            how = self._how(kind, names, mesh=mesh, specs=specs, axes=axes)
            shapes = _SHAPES[kind](collections.OrderedDict((n, totals[n]) for n in names), **how)
            held = tuple({key: state[_name(kind, i, key)] for key in row} for i, row in enumerate(shapes))
            total, rows = _RUN[kind](tree, state=held if any(held) else None, **how)
            made |= total
            after |= hidden(kind, rows or ())
        return made, after

    def state(
        self, totals: Mapping[str, jax.ShapeDtypeStruct], *, mesh: Any, specs: Specs, axes: tuple[str, ...]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """What is kept between calls, by the names that it has in `step.extra`."""
        found = {}
        for kind, names in _kinds(specs, axes).items():
            how = self._how(kind, names, mesh=mesh, specs=specs, axes=axes)
            found |= hidden(kind, _SHAPES[kind](collections.OrderedDict((n, totals[n]) for n in names), **how))
        return found

    def _how(self, kind: str, names: Collection[str], *, mesh: Any, specs: Specs, axes: tuple[str, ...]) -> Any:
        how = {"mesh": mesh, "axes": axes, "codec": self.codec, "bucket": self.bucket}
        if kind == "scatter":
            return {**how, "spec": collections.OrderedDict((n, partition_spec(specs[n])) for n in names)}
        spec = collections.OrderedDict((n, partition_spec(without(specs[n], axes))) for n in names)
        return {**how, "spec": spec, "inner": self.inner}


# A total that stays split over the slow axes needs the first of the two hops only.
_RUN = {"reduce": comm.reduce_stacked, "scatter": comm.scatter_stacked}
_SHAPES = {"reduce": comm.state_shapes, "scatter": comm.scatter_state}


def _kinds(specs: Specs, axes: tuple[str, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for n, spec in specs.items():
        found.setdefault("reduce" if comm.behind(spec, axes) is None else "scatter", []).append(n)
    return found


def hidden(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A reduction's state by the names that it has in `step.extra`."""
    return {_name(kind, i, key): x for i, row in enumerate(rows) for key, x in row.items()}


def _name(kind: str, bucket: int, key: str) -> str:
    return f"{kind}/{bucket}/{key}"


def reducer(plan: Plan) -> Reducer:
    """The reduction that the plan names for its slow axes. Raises PlanError for a codec that does not exist, or several
    for what is one exchange."""
    slow = slow_axes(plan)
    tiers = dict.fromkeys(a.tier for a in plan.mesh.axes if a.name in slow)
    how = {tier: plan.reduce[tier] for tier in tiers}
    kinds = {(r.codec, r.bucket, tuple(r.pins.items()), r.inside) for r in how.values()}
    if len(kinds) > 1:
        codecs = ", ".join(r.codec for r in how.values())
        raise PlanError(
            f"fields {' and '.join(f'reduce.{t}' for t in how)} differ ({codecs}); the mesh axes "
            f"{', '.join(slow)} are reduced in one exchange",
            hint="give these tiers the same codec, bucket, pins and inside, or leave the faster out: it is then exact",
        )
    chosen = next(iter(how.values()), Reduce())
    if chosen.codec == "exact":
        return exact
    tier = next(iter(how))
    for field, codec in {"codec": chosen.codec, **{f"pins.{p}": c for p, c in chosen.pins.items()}}.items():
        codec_in(f"reduce.{tier}.{field}", codec)
    policy = comm.Policy(chosen.codec, pins=chosen.pins)
    fast = tuple(a.name for a in reversed(plan.mesh.axes) if a.name not in slow and a.size > 1)
    return Compressed(policy, chosen.bucket or comm.BUCKET, fast, f"reduce.{tier}")


def codec_in(field: str, name: str) -> comm.Codec:
    """The codec that a field of a plan names. Raises PlanError naming the field."""
    try:
        return comm.parse_codec(name)
    except CodecError as e:
        raise PlanError(f"field '{field}' of the plan is {name!r}: {e.message}", hint=e.hint) from e


def describe(plan: Plan) -> str:
    """How gradients are rounded under a plan with a codec; empty under any other."""
    found = next(((tier, r) for tier, r in plan.reduce.items() if r.codec != "exact"), None)
    if found is None:
        return ""
    tier, codec = found[0], comm.parse_codec(found[1].codec)
    own = "".join(f", {pattern} as {name}" for pattern, name in found[1].pins.items())
    return (
        f"gradients cross {tier!r} as {codec} (small leaves, norms, biases and routers as bf16{own}): rounded twice, "
        f"each time by {codec.precision}"
    )
