"""Rules of loops, branches and recomputed regions.

A loop's carry takes the smallest status that holds in every trip. What its body reads that is the same in every trip
stands for the variable outside, so that a total asked for inside is taken outside, once.
"""

from __future__ import annotations

from typing import Any

from lensjax import _jax
from lensjax.program.edit import is_var
from lensjax.program.status.interpreter import Interpreter, Rule
from lensjax.program.status.lattice import Status, part, union
from lensjax.program.status.paired import Body, Op

_TRIPS = 12  # a status can only rise Z < R < P: the fixed point comes long before


def _alias(an: Interpreter, inside: Any, outside: Any) -> None:
    an.alias.update((v, a) for v, a in zip(inside, outside) if is_var(a))


def _plain(an: Interpreter, op: Op, ins: list[Status]) -> list[Status]:
    """Local indices as full ones, left-out scalars are in already."""
    return [an.total(op, i, s) if s.kind in "IC" else s for i, s in enumerate(ins)]


def _loop(
    an: Interpreter, op: Op, body: Body, consts: list[Status], carry: list[Status], xs: list[Status]
) -> tuple[list[Status], list[Status]]:
    """(statuses of the carry, of the other results). Only what the last reading of the body noted may stay."""
    count, now = len(carry), list(carry)
    notes = ("new", "fixes", "asked", "taken", "left_out")
    before = {n: getattr(an, n).copy() for n in notes}
    shared = an.shared
    for _ in range(_TRIPS):
        for n in notes:
            setattr(an, n, before[n].copy())
        an.shared = shared
        outs = an.body(body, [*consts, *now, *xs])
        after = []
        for k, (a, b) in enumerate(zip(now, outs[:count], strict=True)):
            if a.kind in "RZ" and b.kind == "M":
                raise op.refuse(f"{op.name}: a running {b.op} over the batch")
            joined = an.join(op, a, b)
            if b.kind == "R" and joined.kind == "P":
                an.fixes["first", body, k] = True
            after.append(joined)
        if after == now:
            break
        now = after
    else:
        raise op.refuse(f"{op.name}: the batch moves on in every trip")
    for k, (a, b) in enumerate(zip(carry, now)):
        if a.kind == "R" and b.kind == "P":
            an.fixes["first", op, "carry", k] = True
    return now, outs[count:]


def scan(an: Interpreter, op: Op, ins: list[Status]) -> list[Status]:
    consts, carry = _jax.scan_split(op.eqn)
    if op.params["length"] != op.small["length"]:
        raise op.refuse("a loop over the examples of the batch")
    body = op.bodies[0]
    ins = _plain(an, op, ins)
    xs = []
    for s in ins[consts + carry :]:
        if s.kind == "B" and s.dim == 0:
            raise op.refuse("a loop over the examples of the batch")
        xs.append(s._replace(dim=s.dim - 1) if s.kind == "B" else s)
    _alias(an, body.invars[:consts], op.invars[:consts])
    _alias(an, body.invars[consts + carry :], op.invars[consts + carry :])
    an.carried.update(body.invars[consts : consts + carry])
    now, ys = _loop(an, op, body, ins[:consts], ins[consts : consts + carry], xs)
    return now + [s._replace(dim=s.dim + 1) if s.kind == "B" else _stacked(an, op, s) for s in ys]


def _stacked(an: Interpreter, op: Op, s: Status) -> Status:
    if s.kind in "IC":
        raise op.refuse("a loop that collects indices of examples")
    return s


def while_(an: Interpreter, op: Op, ins: list[Status]) -> list[Status]:
    c, b = op.params["cond_nconsts"], op.params["body_nconsts"]
    condition, body = op.bodies
    _alias(an, condition.invars[:c], op.invars[:c])
    _alias(an, body.invars[:b], op.invars[c : c + b])
    an.carried.update((*condition.invars[c:], *body.invars[b:]))
    ins = _plain(an, op, ins)
    now, _ = _loop(an, op, body, ins[c : c + b], ins[c + b :], [])
    (predicate,) = an.body(condition, [*ins[:c], *now])
    if predicate.kind not in "RZ":
        raise op.refuse("a while loop whose number of trips depends on the examples")
    # A share that goes through the loop must know the totals that the number of trips depends on.
    return [s.on(s.deps | predicate.deps) for s in now]


def cond(an: Interpreter, op: Op, ins: list[Status]) -> list[Status]:
    index = an.total(op, 0, ins[0])
    if index.kind == "B":
        raise op.refuse("a branch for each example")
    ins = [index, *_plain(an, op, ins)[1:]]
    found = []
    for body in op.bodies:
        _alias(an, body.invars, op.invars[1:])
        found.append(an.body(body, ins[1:]))
    outs = []
    for k in range(len(op.outs)):
        joined = found[0][k]
        for other in found[1:]:
            joined = an.join(op, joined, other[k])
        if joined.kind == "P":
            for body, results in zip(op.bodies, found):
                if results[k].kind == "R":
                    an.fixes["first", body, k] = True
        if joined.kind == "R" and op.outs[k]:
            joined = part(op.outs[k][0], None, joined.deps)
        outs.append(joined.on(joined.deps | index.deps))
    return outs


def remat(an: Interpreter, op: Op, ins: list[Status]) -> list[Status]:
    """A recomputed region is a body that runs once."""
    _alias(an, op.bodies[0].invars, op.invars)
    outs = an.body(op.bodies[0], _plain(an, op, ins))
    if any(s.kind in "IC" for s in outs):
        raise op.refuse("a recomputed region that returns indices of examples")
    return outs


def opaque(an: Interpreter, op: Op, ins: list[Status]) -> Any:
    """A region that the user wrote for a mesh, or a kernel: what a share of its batch is, is not known."""
    if op.name == "shard_map":
        raise op.refuse("a shard_map of the step's own: it says itself how the batch is split")
    if op.batched:
        raise op.refuse(f"{op.name} cannot be looked into")
    return [Status("R", deps=union(an.totals(op, ins)))] * len(op.outs)


RULES: dict[str, Rule] = {
    "scan": scan, "while": while_, "cond": cond, "remat2": remat, "checkpoint": remat, "remat": remat,
    **dict.fromkeys(("shard_map", "pallas_call", "ffi_call", "custom_partitioning", "custom_vmap_call"), opaque),
}  # fmt: skip
