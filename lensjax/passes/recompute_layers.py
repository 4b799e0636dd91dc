"""Recompute on layers that are written out: drop what the backward needs from a segment, make it again when it is due.

The slice of equations that makes the dropped values is emitted again before the first backward equation that reads one,
behind a *gate*: one barrier over what the slice reads and over what the backward has made so far. Without it XLA is
free to run the slice early, or to postpone the weight gradients that hold it alive, and memory does not fall.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from jax import numpy as jnp

from lensjax import _jax
from lensjax.passes.recompute_copy import DEVICE, HOST, Copies, Writer
from lensjax.plan.levels import KEEP, Level
from lensjax.program.boundary import BackwardPass
from lensjax.program.edit import is_var
from lensjax.program.segments import Forward, Segment, forward_of, stored_values
from lensjax.program.values import Table, is_solid, nbytes, reads_memory, results, table

REMAT = ("remat2", "checkpoint")
OFFLOADED = 2**16  # values below this many bytes are not worth a copy to the host


@dataclasses.dataclass(frozen=True)
class Gates:
    """How gates tie. `held`: variables that never pass one (split weights, which the pin pass gathers where they are
    used). `late`: weight gradients pass one gate later than the cotangents, so that their reduction has a layer's time
    to hide behind. `batched(v)`: whether a value has a batch dimension (a weight gradient has none)."""

    held: Set[Any]
    late: bool
    batched: Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer (of `count` equal ones, in a scan) keeps at its level: `kept` and `host` values of one layer,
    `dropped` ones that are made again by the equations `again`; `work`: the equations of its forward."""

    name: str
    count: int
    kept: tuple[Any, ...]
    dropped: tuple[Any, ...]
    again: tuple[Any, ...]
    host: tuple[Any, ...]
    work: tuple[Any, ...]


@dataclasses.dataclass
class _Part:
    """A segment with what becomes of its values."""

    segment: Segment
    kept: set[Any]
    dropped: list[Any]
    host: list[Any]
    slice: list[Any]
    inputs: list[Any]


def keeps(level: Level, eqn: Any) -> bool:
    """Whether a level keeps the results of an equation."""
    name = eqn.primitive.name
    if level.kind == "keep":
        return True
    if level.kind == "named":
        return name == "name" and (not level.names or eqn.params["name"] in level.names)
    if level.kind == "dots":
        if name == "dot_general":
            return not eqn.params["dimension_numbers"][1][0]
        return name in ("conv_general_dilated", "ragged_dot", "ragged_dot_general", "pallas_call", "ffi_call")
    return False


def all_but_scores(eqns: Sequence[Any]) -> set[Any]:
    """What XLA has in memory anyway, without attention's scores: results of matmuls that are larger than both operands
    (queries against keys), and what is made of them up to the next matmul."""
    read = {a for e in eqns if reads_memory(e) for a in e.invars if is_var(a)}
    scores: set[Any] = set()
    kept: set[Any] = set()
    for eqn in eqns:
        made = results(eqn)
        if eqn.primitive.name == "dot_general" and all(nbytes(v) > max(map(nbytes, eqn.invars)) for v in made):
            scores.update(made)
        elif not reads_memory(eqn) and any(a in scores for a in eqn.invars if is_var(a)):
            kept.update(v for v in made if v in read)
            scores.update(v for v in made if v not in read)
        else:
            kept.update(v for v in made if is_solid(eqn) or v in read)
    return kept


def kept_by(level: Level, eqns: Sequence[Any]) -> set[Any]:
    """Values that a level keeps whatever reads them. Of a named value what was given the name is kept: the two are one,
    and the backward may read either. Results of effects are made once, and those of the user's own remat are not put
    into another."""
    found = all_but_scores(eqns) if level.kind == "scores" else set[Any]()
    for eqn in eqns:
        if eqn.effects or eqn.primitive.name in REMAT or keeps(level, eqn):
            named = eqn.primitive.name == "name"
            found.update(a for a in (eqn.invars if named else results(eqn)) if is_var(a))
    return found


def aliases(eqns: Sequence[Any]) -> set[Any]:
    """Values that are another one under a name: no memory, and nothing to make."""
    return {v for e in eqns if e.primitive.name == "name" for v in results(e)}


def recompute_layers(
    jaxpr: Any,
    work: Sequence[tuple[BackwardPass, Sequence[tuple[Segment, Level]]]],
    pinned: Set[int],
    copies: Copies,
    gates: Gates,
    record: list[Layer] | None = None,
) -> Any:
    """The body with its layers' values kept, made again or moved as their levels say. `record` receives what each
    layer keeps.

    `work`: for each differentiation its segments with their levels; `pinned`: positions of equations that are never
    repeated (stacks of scanned layers).
    """
    inner = _jax.open_jaxpr(jaxpr)
    values = table(jaxpr)
    emitter = _Emitter(inner, values, copies, gates)
    for span, segments in work:
        facts = forward_of(jaxpr, span, values)
        emitter.plan(facts, segments, pinned)
        if record is not None:
            record.extend(emitter.layers(facts, segments, pinned))
    return _jax.rebuild(jaxpr, eqns=emitter.run(), outvars=emitter.b.read_all(inner.outvars))


class _Emitter:
    def __init__(self, inner: Any, values: Table, copies: Copies, gates: Gates):
        self.inner, self.values, self.gates = inner, values, gates
        self.b = Writer(copies)
        self.parts: list[_Part] = []
        self.spans: list[BackwardPass] = []
        self.home: dict[Any, int] = {}  # dropped value -> its part
        self.to_host: set[Any] = set()
        self.after: dict[Any, int] = {}  # value -> the position from which a reader is a backward reader
        self.again: dict[Any, Any] = {}  # dropped or moved value -> its copy on the device
        self.host: dict[Any, Any] = {}  # moved value -> its copy on the host
        self.moving: list[Any] = []
        self.gated: set[int] = set()
        self.made: list[Any] = []  # backward values since the last gate
        self.postponed: list[Any] = []
        self.gates_at: Sequence[int] = ()  # where the gates come, in order
        self.waiting: dict[Any, int] = {}  # result -> position of its equation, which waits for the next gate

    # ---- what becomes of each value -------------------------------------------------------------------------------

    def plan(self, facts: Forward, segments: Sequence[tuple[Segment, Level]], pinned: Set[int]) -> None:
        self.spans.append(facts.span)
        for n, (segment, level) in enumerate(segments):
            last = n == len(segments) - 1
            if last or level.kind == KEEP.kind or any(segment.start <= i < segment.stop for i in pinned):
                continue
            part = self._part(facts, segment, level)
            if not part.dropped:
                continue
            number = len(self.parts)
            self.parts.append(part)
            self.home.update((v, number) for v in part.dropped)
            # What the backward begins with would be fetched as soon as it is away: it stays.
            if level.kind == "offload" and any(other.kind != KEEP.kind for _, other in segments[n + 1 : -1]):
                part.host = [v for v in part.inputs if self._movable(v, facts)]
                self.to_host.update(part.host)
            for v in (*part.dropped, *part.host):
                self.after[v] = facts.span.split

    def layers(self, facts: Forward, segments: Sequence[tuple[Segment, Level]], pinned: Set[int]) -> list[Layer]:
        """What each segment keeps, for whoever prices it."""
        parts = {p.segment: p for p in self.parts}
        stored = stored_values(self.inner, facts)
        wanted = {v for p in parts.values() for v in p.inputs} | set(facts.backward)
        moved = {v for p in parts.values() for v in p.host}
        found = []
        for segment, level in segments:
            eqns = tuple(self.inner.eqns[segment.start : segment.stop])
            made = [v for e in eqns for v in results(e)]
            part = parts.get(segment)
            if any(segment.start <= i < segment.stop for i in pinned) or (level.kind == KEEP.kind and not segment.name):
                continue
            if part is None:
                found.append(Layer(segment.name, 1, tuple(v for v in made if v in stored), (), (), (), eqns))
                continue
            named = aliases(eqns)
            gone = tuple(v for v in made if v in stored and v not in part.kept and v not in named)
            kept = tuple(v for v in made if v in part.kept and v in wanted and v not in moved)
            host = tuple(v for v in made if v in moved)
            found.append(Layer(segment.name, 1, kept, gone, tuple(part.slice), host, eqns))
        return found

    def _part(self, facts: Forward, segment: Segment, level: Level) -> _Part:
        kept: set[Any] = set()
        dropped: list[Any] = []
        eqns = self.inner.eqns[segment.start : segment.stop]
        stays = kept_by(level, eqns)
        for eqn in eqns:
            for v in results(eqn):
                if v in stays or facts.forward.get(v, -1) >= segment.stop or v in self.gates.held:
                    kept.add(v)
                elif v in facts.backward:
                    dropped.append(v)
        need, again = set(dropped), []
        for eqn in reversed(eqns):
            if any(v in need for v in results(eqn)):
                again.append(eqn)
                need |= {a for a in eqn.invars if is_var(a) and a not in kept}
        again.reverse()
        made = {v for e in again for v in results(e)} - kept
        inputs = list(dict.fromkeys(a for e in again for a in e.invars if is_var(a) and a not in made))
        return _Part(segment, kept, dropped, [], again, inputs)

    def _movable(self, v: Any, facts: Forward) -> bool:
        """Worth moving to the host: a large float activation made in this forward."""
        return (
            self.values.made.get(v, -1) >= facts.span.start
            and nbytes(v) >= OFFLOADED
            and jnp.issubdtype(v.aval.dtype, np.inexact)
            and self.gates.batched(v)
            and v not in self.home
        )

    # ---- emission -------------------------------------------------------------------------------------------------

    def run(self) -> list[Any]:
        first = min((self.after[v] for v in self.after), default=len(self.inner.eqns))
        self.gates_at = self._places()
        for i, eqn in enumerate(self.inner.eqns):
            if i < first:
                self.b.copy(eqn)
            elif self._waits(i, eqn):
                self.waiting.update((v, i) for v in results(eqn))
            else:
                self._backward(i, eqn)
            for v in results(eqn):
                if v in self.to_host:
                    self._away(v, eqn)
        return self.b.eqns

    def _backward(self, i: int, eqn: Any) -> None:
        due = [a for a in eqn.invars if is_var(a) and i >= self.after.get(a, i + 1)]
        for n in sorted({self.home[a] for a in due if a in self.home and a not in self.again}, reverse=True):
            if n not in self.gated:
                self._gate(n, i, eqn)
        if i in self.gates_at or any(is_var(a) and a in self.waiting for a in eqn.invars):
            self._release()
        for a in due:
            if a in self.host and a not in self.again:
                self._fetch([a], i, eqn)
        ins = [self.again[a] if is_var(a) and a in due and a in self.again else self.b.read(a) for a in eqn.invars]
        self.b.emit(eqn.replace(invars=ins))
        if any(s.split <= i < s.stop for s in self.spans):
            self.made.extend(results(eqn))

    def _places(self) -> list[int]:
        """Positions of the first backward reader of each part."""
        found: dict[int, int] = {}
        for i, eqn in enumerate(self.inner.eqns):
            for a in eqn.invars:
                if is_var(a) and a in self.home and i >= self.after[a]:
                    found.setdefault(self.home[a], i)
        return sorted(found.values())

    def _waits(self, i: int, eqn: Any) -> bool:
        """Whether an equation waits for the last gate of its backward: one that makes a weight gradient (a bias's) of
        nothing but cotangents that pass that gate. No later gate ties it, so XLA would reduce it over the devices
        together with the gradients of the layer before, which then are late for this one."""
        nth = bisect.bisect_left(self.gates_at, i)
        span = next((s for s in self.spans if s.split <= i < s.stop), None)
        if not self.gates.late or eqn.effects or span is None or nth == len(self.gates_at):
            return False
        gate, *later = self.gates_at[nth:]
        operands = [a for a in eqn.invars if is_var(a)]
        return (
            i < gate < span.stop
            and not (later and later[0] < span.stop)
            and bool(operands)
            and not any(map(self.gates.batched, results(eqn)))
            and all(a in self.waiting or self._passes(a, span.split, gate) for a in operands)
        )

    def _release(self) -> None:
        """Emits the equations that wait."""
        positions, self.waiting = sorted(set(self.waiting.values())), {}
        for i in positions:
            self._backward(i, self.inner.eqns[i])

    def _passes(self, v: Any, split: int, gate: int) -> bool:
        made = self.values.made.get(v, -1)
        return made >= split and self.gates.batched(v) and self.values.last.get(v, -1) >= gate

    def _gate(self, n: int, at: int, like: Any) -> None:
        part = self.parts[n]
        self.gated.add(n)
        env = {v: self.again[v] for v in part.inputs if v in self.again}
        late = [v for v in part.inputs if v in self.host and v not in env]
        through = [v for v in part.inputs if v not in env and v not in late and v not in self.gates.held]
        ahead = self._ahead(n)
        alive = self._alive(at)
        atoms = [self.host[v] for v in (*late, *ahead)] + [self._now(v) for v in through]
        outs = self.b.tie([*atoms, *self.b.read_all(alive)], like)
        env.update(zip(through, outs[len(late) + len(ahead) :]))
        self.b.env.update(zip(alive, outs[len(atoms) :]))
        for v, atom in zip((*late, *ahead), outs):
            self.again[v] = self.b.put(atom, DEVICE, like)
            if v in late:
                env[v] = self.again[v]
        for eqn in part.slice:
            self.b.clone(eqn, env)
        self.again.update((v, env[v]) for v in part.dropped)

    def _now(self, v: Any) -> Any:
        """A kept value that another segment dropped is made again there; everything else is as it is."""
        return self.again.get(v, self.b.read(v))

    def _alive(self, at: int) -> list[Any]:
        """Backward values that this gate ties: made since the last gate and still to be read."""
        alive = [v for v in self.made if self.values.last.get(v, -1) >= at]
        self.made = []
        if not self.gates.late:
            return alive
        now = [v for v in alive if self.gates.batched(v)]
        before = [v for v in self.postponed if self.values.last.get(v, -1) >= at]
        self.postponed = [v for v in alive if not self.gates.batched(v)]
        return now + before

    # ---- host memory ------------------------------------------------------------------------------------------------

    def _away(self, v: Any, like: Any) -> None:
        """Copies a value to the host where it is made. The copy before it must have left the device first: else XLA
        keeps them all and copies at the end."""
        if self.moving:
            *done, self.b.env[v] = self.b.tie([*(self.host[m] for m in self.moving), self.b.read(v)], like)
            self.host.update(zip(self.moving, done))
        self.host[v] = self.b.put(self.b.read(v), HOST, like)
        self.moving = [v]

    def _ahead(self, n: int) -> list[Any]:
        """Values on the host that the next gate will need: their way back starts one layer ahead."""
        for part in reversed(self.parts[:n]):
            if part.host:
                return [v for v in part.host if v not in self.again and v in self.host]
        return []

    def _fetch(self, values: list[Any], at: int, like: Any) -> None:
        """A value that is read before its layer's gate. It comes back behind a barrier: else XLA sees the copy to the
        host and back as nothing, and deletes both."""
        alive = self._alive(at)
        outs = self.b.tie([*(self.host[v] for v in values), *self.b.read_all(alive)], like)
        self.b.env.update(zip(alive, outs[len(values) :]))
        for v, atom in zip(values, outs):
            self.again[v] = self.b.put(atom, DEVICE, like)
