"""How statuses flow through a program, and where totals are needed.

A partial sum that is used in any but a linear way needs its total: that is a cut, placed where the value is defined (or
at the smallest value it follows from linearly). Every use then sees the total; so the program is read again, with the
larger set of cuts, until no new one is found.

What a share has to do other than the plain program is noted in `fixes`, by key:

    ("global", op, i)   operand i: add offset * inner to a local index       -> inner
    ("first", op, i)    operand i counts in the first share only (mask)
    ("first", op, "carry", k)  the same for carry k of a loop, before it starts
    ("first", body, k)  the same for result k of a loop's or branch's body
    ("one", op, i)      operand i, a total scalar, is left out: use ones
    ("ones", op)        the result is ones (a total scalar was left out)
    ("draw", op)        a draw of the batch's shape: take the share's part of the full draw  -> dimension
    ("scale", op, i) / ("scale", var) / ("scale", body, k)   multiply the scalars in again   -> Scale
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lensjax.program.edit import is_var, shape_of
from lensjax.program.status.lattice import (
    SAME,
    ZERO,
    Again,
    Refused,
    Scale,
    Status,
    part,
    same,
    times,
    union,
    within,
)
from lensjax.program.status.paired import Body, Op, literal_status

Rule = Callable[["Interpreter", Op, list[Status]], Any]

# Linear operations through which a cut may move up to a smaller value (never above an up-cast: sums stay wide).
_MOVES = frozenset(
    "reshape transpose squeeze broadcast_in_dim slice pad rev copy copy_p neg real imag expand_dims mul div".split()
)
_SAME_SIZE = frozenset("neg mul div reshape transpose broadcast_in_dim squeeze copy".split())
# Operations of one operand that a scalar factor passes through.
_HOMOGENEOUS = frozenset(
    """reshape transpose squeeze expand_dims broadcast_in_dim slice rev copy neg convert_element_type reduce_sum cumsum
    real imag split unstack reduce_window_sum name sharding_constraint optimization_barrier""".split()
)


class Interpreter:
    """One reading of a program. `sizes`: the batch factor at both traces; `cuts`: values whose total is taken;
    `kept`: scalars that must not be left out. Numbers of cuts and scalars are positions in `numbers`."""

    def __init__(
        self,
        rules: dict[str, Rule],
        fallback: Rule,
        sizes: tuple[int, int],
        outer: int,
        cuts: dict[Any, str],
        kept: set[Any],
        numbers: dict[Any, int],
    ):
        self.rules, self.fallback = rules, fallback
        self.full, self.small, self.outer = sizes[0] // outer, sizes[1] // outer, outer
        self.cuts, self.kept, self.numbers = cuts, kept, numbers
        self.variables = list(numbers)
        self.env: dict[Any, Status] = {}
        self.home: dict[Any, Body] = {}
        self.bodies: list[Body] = []
        self.new: dict[Any, str] = {}
        self.fixes: dict[Any, Any] = {}
        self.alias: dict[Any, Any] = {}
        self.carried: set[Any] = set()
        self.made: dict[Any, tuple[Op, list[Status]]] = {}
        self.taken: dict[Any, int] = {}  # cut -> what its partial value depends on
        self.shared = 0  # cuts that work of a share depends on
        self.asked: dict[Any, Op | None] = {}  # cut -> who needs it first
        self.left_out: set[Any] = set()

    def number(self, var: Any) -> int:
        if var not in self.numbers:
            self.numbers[var] = len(self.numbers)
            self.variables.append(var)
        return self.numbers[var]

    # ---- a body -------------------------------------------------------------------------------------------------

    def body(self, body: Body, statuses: Sequence[Status]) -> list[Status]:
        """The statuses of a body's results."""
        self.bodies.append(body)
        for v, s in zip(body.invars, statuses):
            self.put(v, s, body)
        env, made = self.env, self.made
        for op in body.ops:
            ins = [env[a] if is_var(a) else literal_status(a) for a in op.invars]
            if not op.batched and all(s.kind == "R" and not s.scale for s in ins) and ins:
                deps = union(ins)
                for v in op.outvars:
                    self.put(v, same(deps), body)
                continue
            for v, s, dims in zip(op.outvars, self.equation(op, ins), op.outs, strict=True):
                if dims and s.kind in "RPM":
                    raise op.refuse(f"{op.name}: a result that has the batch from operands that do not")
                if s.kind in "BPMI":
                    self.shared |= s.deps
                if s.kind in "PM":
                    made[v] = (op, ins)
                self.put(v, s, body)
        outs = [env[a] if is_var(a) else literal_status(a) for a in body.outvars]
        if len(self.bodies) == 1:
            for k, s in enumerate(outs):
                if s.scale and s.kind == "B":
                    outs[k] = self.multiplied(("scale", body, k), s)
                if s.kind == "B":
                    self.shared |= outs[k].deps
        self.bodies.pop()
        return outs

    def put(self, var: Any, s: Status, body: Body) -> None:
        if var in self.cuts and s.kind in "PM":
            self.taken[var] = s.deps
            deps = 1 << self.number(var) | s.deps
            if s.scale:
                deps |= self.multiplied(("scale", var), s).deps
            s = same(deps)
        self.env[var] = s
        self.home[var] = body

    # ---- an equation --------------------------------------------------------------------------------------------

    def equation(self, op: Op, ins: list[Status]) -> list[Status]:
        name = op.name
        if name == "broadcast_in_dim" and len(op.outs[0]) == 1 and self.can_leave_out(op.invars[0], ins[0]):
            self.fixes["ones", op] = True
            v = op.invars[0]
            self.left_out.add(v)
            return [Status("B", op.outs[0][0], None, scale=((self.number(v), 1),))]
        if name in ("mul", "div") and op.outs[0]:
            for i in (0, 1) if name == "mul" else (1,):
                other = ins[1 - i]
                wanted = other.kind == "B" and not within(ins[i].deps, other.deps)
                if wanted and self.can_leave_out(op.invars[i], ins[i]):
                    v = op.invars[i]
                    self.fixes["one", op, i] = True
                    self.left_out.add(v)
                    ins = list(ins)
                    ins[i] = Status("R", scale=((self.number(v), 1),))
        if any(s.scale for s in ins):
            scale = None if op.bodies else self.scale_of(op, ins)
            if scale is None:
                ins = [self.multiplied(("scale", op, i), s) if s.scale else s for i, s in enumerate(ins)]
            else:
                outs = self.rule(op, [s._replace(scale=()) for s in ins])
                return [s._replace(scale=scale) if s.kind in "BP" else s for s in outs]
        return self.rule(op, ins)

    def rule(self, op: Op, ins: list[Status]) -> list[Status]:
        if op.bodies and not op.batched and any(s.kind in "PM" for s in ins):
            # A loop or branch that sees no example (the optimizer's): totals go in.
            ins = self.totals(op, ins)
        if op.bodies and not op.batched and all(s.kind in "RZ" for s in ins):
            return [same(union(ins))] * len(op.outs)
        found = self.rules.get(op.name, self.fallback)(self, op, ins)
        return found if isinstance(found, list) else [found]

    # ---- totals -------------------------------------------------------------------------------------------------

    def total(self, op: Op, i: int, s: Status) -> Status:
        """Operand i where a value of the whole batch is needed: a partial sum becomes a total, a local index the full
        one."""
        if s.kind in "PM":
            return self.need(op.invars[i], s, op)
        if s.kind == "I":
            self.fixes["global", op, i] = s.inner
            return part(s.dim, s.inner, s.deps)
        if s.kind == "C":
            raise op.refuse(f"{op.name}: indices of examples used as numbers")
        return s

    def totals(self, op: Op, ins: list[Status]) -> list[Status]:
        return [self.total(op, i, s) for i, s in enumerate(ins)]

    def need(self, atom: Any, s: Status, op: Op | None) -> Status:
        """Asks for the total of a partial value, at the smallest value that it follows from linearly."""
        var = self.outside(atom)
        while var in self.made:
            maker, ins = self.made[var]
            if maker.name not in _MOVES:
                break
            partials = [a for a, t in zip(maker.invars, ins) if t.kind in "PM"]
            if len(partials) != 1 or partials[0] in self.carried:
                break
            size, above = np.prod(shape_of(var)), np.prod(shape_of(partials[0]))
            if above > size or (above == size and maker.name not in _SAME_SIZE and partials[0] not in self.cuts):
                break
            var = partials[0]
        var = self.outside(var)
        self.new.setdefault(var, s.op or "sum")
        self.asked.setdefault(var, op)
        return same(s.deps | 1 << self.number(var))

    def outside(self, var: Any) -> Any:
        """The variable behind an argument of a loop's or branch's body that is the same in every trip."""
        while var in self.alias:
            var = self.alias[var]
        return var

    # ---- scalars that are left out ------------------------------------------------------------------------------

    def can_leave_out(self, atom: Any, s: Status) -> bool:
        """Whether it is a total scalar: a share can be computed before it is known, and multiplied by it later."""
        if s.kind != "R" or not s.deps or not is_var(atom) or shape_of(atom) or atom in self.kept:
            return False
        return np.issubdtype(atom.aval.dtype, np.inexact) or str(atom.aval.dtype) == "bfloat16"

    def scale_of(self, op: Op, ins: list[Status]) -> Scale | None:
        """The scalars left out of the result, None where they must be multiplied in before."""
        name = op.name

        def agree(statuses: Sequence[Status]) -> Scale | None:
            found = {s.scale for s in statuses if s.kind != "Z"}
            return found.pop() if len(found) == 1 else None

        if name in _HOMOGENEOUS and len(ins) == 1:
            return ins[0].scale
        if name in ("mul", "dot_general", "conv_general_dilated"):
            return times(ins[0].scale, ins[1].scale)
        if name == "div":
            return times(ins[0].scale, ins[1].scale, -1)
        if name in ("add", "sub", "add_any", "concatenate", "stack"):
            return agree(ins)
        if name == "pad" and ins[1].kind == "Z":
            return ins[0].scale
        if name == "select_n" and not ins[0].scale:
            return agree(ins[1:])
        if name in ("gather", "dynamic_slice") and not any(s.scale for s in ins[1:]):
            return ins[0].scale
        if name in ("scatter-add", "scatter_add") and not ins[1].scale:
            return agree([ins[0], ins[2]])
        if name == "dynamic_update_slice":
            return agree(ins[:2])
        return None

    def multiplied(self, key: Any, s: Status) -> Status:
        """The value with its scalars multiplied in again."""
        deps = s.deps
        for n, _ in s.scale:
            v = self.variables[n]
            if self.home.get(v) is not self.bodies[-1]:
                self.kept.add(v)
                raise Again
            deps |= self.env[v].deps
        self.fixes[key] = s.scale
        return s._replace(scale=(), deps=deps)

    # ---- helpers of the rules -------------------------------------------------------------------------------------

    def layout(self, op: Op, parts: Sequence[Status]) -> tuple[int, int | None]:
        """(dimension, inner) that all batch operands share. Raises Refused."""
        dim, inner = parts[0].dim, None
        for s in parts:
            if s.dim != dim or (s.inner is not None and inner is not None and s.inner != inner):
                raise op.refuse(f"mixes examples: {op.name} combines two batch layouts")
            inner = s.inner if s.inner is not None else inner
        return dim, inner

    def result(self, op: Op, k: int, dim: int, inner: int | None, deps: int) -> Status:
        """Result k as B(dim, inner). Raises Refused where its batch dimensions are others."""
        if op.outs[k] != (dim,):
            what = "every example with every example" if len(op.outs[k]) > 1 else "the batch in another dimension"
            raise op.refuse(f"mixes examples: {op.name} has {what} in its result")
        return part(dim, inner, deps)

    def join(self, op: Op, a: Status, b: Status) -> Status:
        """The status of a value that is either: R joins P by counting in the first share only (the caller masks)."""
        deps = a.deps | b.deps
        if a.scale != b.scale and a.kind != "Z" and b.kind != "Z":
            self.kept |= {self.variables[n] for n, _ in (*a.scale, *b.scale)}
            raise Again
        if a.kind == b.kind:
            if a.kind in "BI":
                if a.dim != b.dim or (a.inner is not None and b.inner is not None and a.inner != b.inner):
                    raise op.refuse(f"{op.name}: its outcomes have different batch layouts")
                return a._replace(inner=a.inner if a.inner is not None else b.inner, deps=deps)
            return a.on(deps)
        if a.kind == "Z":
            return b.on(deps)
        if b.kind == "Z":
            return a.on(deps)
        if {a.kind, b.kind} == {"R", "P"}:
            return Status("P", deps=deps, scale=a.scale)
        raise op.refuse(f"{op.name}: one outcome is {a}, another {b}")


__all__ = ["SAME", "ZERO", "Again", "Interpreter", "Refused", "Rule"]
