"""A step with fewer of its equal layers: what it takes grows by one and the same amount with each layer.

The repeats in the middle of a stack that is written out one after the other (`unrolled`) are taken out, forward and
backward: what the next repeat read of them it reads of the last one before, which plays the same part. Their parameters
go, and with them everything that is made of these alone: casts, the update of the optimizer, a term of a sum over all
layers. Where anything else reads what is gone, the step cannot be shortened (None): the caller then has the whole step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lensjax import _jax
from lensjax.program.edit import is_var, shape_of
from lensjax.program.flow import dependencies
from lensjax.program.program import Program
from lensjax.program.unrolled import Repeat, Unrolled

# Operations on scalars that combine the terms of all layers (the square norm of all gradients): without a term, it is
# the rest.
_SUMS = frozenset({"add", "add_any", "max", "min", "and", "or"})


@dataclasses.dataclass(frozen=True)
class Short:
    """`program`: the step without the layers that were taken out, `count` of them. `kept`: of each of its arguments,
    the argument of the whole step; `like`: argument that was taken out -> the one that is left and plays its part, in
    the layer before; `equations`: those that are left, by position in the whole step."""

    program: Program
    count: int
    kept: tuple[int, ...]
    like: Mapping[int, int]
    equations: frozenset[int]


def stack_of(program: Program) -> Unrolled | None:
    """The stack of the step itself with the most equations, as far as its repeats have a forward and a backward: the
    first one's backward may differ, as nothing needs its input's gradient."""
    found = []
    for u in program.unrolled:
        able = [k for k, r in enumerate(u.repeats) if r.backward and r.parameters]
        if able and not u.body and able == list(range(able[0], able[-1] + 1)):
            found.append(dataclasses.replace(u, repeats=u.repeats[able[0] : able[-1] + 1]))
    return max(found, key=lambda u: sum(len(r.forward) + len(r.backward) for r in u.repeats), default=None)


def shorten(program: Program, stack: Unrolled, left: int) -> Short | None:
    """The step with `left` of the stack's repeats (at least two): the first ones, and the last. None where it cannot
    be."""
    first = left - left // 2
    return _Shortener(program, stack.repeats, range(first, stack.count - left // 2)).make()


class _Shortener:
    def __init__(self, program: Program, repeats: Sequence[Repeat], out: range):
        self.program, self.repeats, self.out = program, repeats, out
        self.inner = _jax.open_jaxpr(program.jaxpr)
        self.gone: set[Any] = set()  # values that are no more
        self.now: dict[Any, Any] = {}  # value -> what is read in its stead
        self.inside = {i for r in repeats for span in (r.forward, r.backward) for i in span}
        self.dropped = {i for r in out for span in (repeats[r].forward, repeats[r].backward) for i in span}

    def make(self) -> Short | None:
        like = self._arguments()
        if like is None:
            return None
        self.gone |= {self.inner.invars[i] for i in like}
        self._stand_ins()
        kept = self._equations()
        results = self._results(like) if kept is not None else None
        if kept is None or results is None:
            return None
        used = self._used(kept, results)
        alone = self._alone(like)
        if any(self.program.arguments[i].shape for i in alone):
            return None  # frozen weights: nothing says whose part of the plan they share
        return self._short([i for i in kept if i in used], results, {*like, *alone}, like)

    def read(self, a: Any) -> Any:
        while is_var(a) and a in self.now:
            a = self.now[a]
        return a

    def _arguments(self) -> dict[int, int] | None:
        """Argument that goes -> the one that plays its part: parameters of repeats, and what follows these."""
        before, like = self.repeats[self.out.start - 1], dict[int, int]()
        arguments = self.program.arguments
        for r in self.out:
            mine = self.repeats[r].parameters
            alike = [(arguments[i].shape, arguments[i].dtype) for i in mine]
            if alike != [(arguments[i].shape, arguments[i].dtype) for i in before.parameters]:
                return None
            like.update(zip(mine, before.parameters))
        followers: dict[int, list[int]] = {}
        for i, a in enumerate(arguments):
            if a.follows is not None:
                followers.setdefault(a.follows, []).append(i)
        for gone, stays in list(like.items()):
            theirs, ours = followers.get(gone, []), followers.get(stays, [])
            if len(theirs) != len(ours):
                return None
            like.update(zip(theirs, ours))
        return like

    def _stand_ins(self) -> None:
        """What each value of a repeat that goes is read as: forward that of the repeat before, backward (which runs
        from the last to the first) that of the one after."""
        for r in self.out:
            for side, other in (("forward", self.out.start - 1), ("backward", self.out.stop)):
                for i, j in zip(getattr(self.repeats[r], side), getattr(self.repeats[other], side)):
                    self.now.update(zip(self.inner.eqns[i].outvars, self.inner.eqns[j].outvars))

    def _equations(self) -> list[int] | None:
        """The equations that stay, in order; None where one of a repeat that stays reads what is gone."""
        made = {v for i in self.dropped for v in self.inner.eqns[i].outvars}
        kept = []
        for i, eqn in enumerate(self.inner.eqns):
            if i in self.dropped:
                continue
            if i in self.inside:
                if any(is_var(a) and self.read(a) in self.gone for a in eqn.invars):
                    return None
                kept.append(i)
                continue
            # Outside of the repeats nothing stands in: what a layer's gradient is made into goes with it.
            lost = [k for k, a in enumerate(eqn.invars) if is_var(a) and (a in self.gone or a in made)]
            if not lost:
                kept.append(i)
                continue
            rest = [a for k, a in enumerate(eqn.invars) if k not in lost]
            scalars = not any(map(shape_of, (*eqn.invars, *eqn.outvars)))
            if eqn.primitive.name in _SUMS and len(rest) == 1 and scalars:
                self.now[eqn.outvars[0]] = rest[0]
            else:
                self.gone.update(eqn.outvars)
        self.gone |= made
        return kept

    def _results(self, like: Mapping[int, int]) -> list[int] | None:
        """The results that stay: not the next values of what goes, nor scalars made of it (a layer's metrics). None
        where something else of the size of a tensor is gone."""
        program = self.program
        theirs = {program.arguments[i].result for i in like} | {
            r for i, r in program.gradients.items() if i in like
        }  # fmt: skip
        stay = []
        for r, a in enumerate(self.inner.outvars):
            if r in theirs:
                continue
            if not is_var(a) or self.read(a) not in self.gone:
                stay.append(r)
            elif shape_of(a) or any(x.result == r for x in program.arguments):
                return None
        return stay

    def _used(self, kept: Sequence[int], results: Sequence[int]) -> set[int]:
        eqns = self.inner.eqns
        needed = {self.read(self.inner.outvars[r]) for r in results if is_var(self.inner.outvars[r])}
        used = set()
        for i in reversed(kept):
            if eqns[i].effects or not needed.isdisjoint(eqns[i].outvars):
                used.add(i)
                needed.update(self.read(a) for a in eqns[i].invars if is_var(a))
        self.needed = needed
        return used

    def _alone(self, like: Mapping[int, int]) -> set[int]:
        """Other arguments that only the layers that are gone have read."""
        inner = self.inner
        read = {a for e in inner.eqns for a in e.invars if is_var(a)} | {a for a in inner.outvars if is_var(a)}
        alone = {i for i, v in enumerate(inner.invars) if v in read and v not in self.needed}
        return alone - set(self.program.batch.axes) - set(like)

    def _short(self, kept: Sequence[int], results: Sequence[int], gone: set[int], like: Mapping[int, int]) -> Short:
        p, inner = self.program, self.inner
        stay = [i for i in range(len(inner.invars)) if i not in gone]
        at, to = {i: k for k, i in enumerate(stay)}, {r: k for k, r in enumerate(results)}
        eqns = [inner.eqns[i].replace(invars=[self.read(a) for a in inner.eqns[i].invars]) for i in kept]
        jaxpr = _jax.rebuild(
            p.jaxpr,
            invars=[inner.invars[i] for i in stay],
            eqns=eqns,
            outvars=[self.read(inner.outvars[r]) for r in results],
        )
        arguments = tuple(
            dataclasses.replace(
                a,
                follows=at.get(a.follows) if a.follows is not None else None,
                result=to.get(a.result) if a.result is not None else None,
            )
            for a in (p.arguments[i] for i in stay)
        )
        short = dataclasses.replace(
            p,
            jaxpr=jaxpr,
            arguments=arguments,
            result_paths=tuple(p.result_paths[r] for r in results),
            batch=dataclasses.replace(
                p.batch, axes={at[i]: d for i, d in p.batch.axes.items() if i in at}, second=None
            ),
            layers=tuple(
                dataclasses.replace(x, parameters=tuple(at[i] for i in x.parameters if i in at)) for x in p.layers
            ),
            gradients={at[i]: to[r] for i, r in p.gradients.items() if i in at and r in to},
            depends=dependencies(jaxpr),
        )
        return Short(short, len(self.out), tuple(stay), like, frozenset(kept))
