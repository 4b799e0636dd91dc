"""The state of a step: given back or not, and split as widely as it could be."""

from __future__ import annotations

from collections.abc import Iterator

from lensjax.program.program import Program
from lensjax.verify.facts import Facts
from lensjax.verify.finding import SMALL, Case, Finding, size

DONATE = "jax.jit(step, donate_argnums=(0,)), with the state's out_shardings equal to its in_shardings"


def not_donated(case: Case) -> Iterator[Finding]:
    """State that comes back in a new buffer while the old one is still held."""
    facts = case.facts
    if facts is None or facts.program is None:
        return
    reused = set(case.module.aliases.values())
    given, kept = 0.0, 0.0
    for leaf, argument in enumerate(facts.program.arguments):
        value = facts.argument(leaf)
        if argument.result is None or value is None or facts.kept.index(leaf) in reused:
            continue
        if leaf in facts.donated:
            given += value.bytes
        else:
            kept += value.bytes
    if kept > SMALL * case.peak:
        yield Finding(
            "not_donated", "warning", "", kept,
            f"the old state is kept while the new one is made: {size(kept)} of memory on each device",
            f"donate the state: {DONATE}",
        )  # fmt: skip
    if given > SMALL * case.peak:
        yield Finding(
            "donation_unused", "warning", "", given,
            f"{size(given)} of state on each device was donated and could not be re-used: the new value has another "
            "sharding, type or layout",
            "give the state's results the shardings of its arguments (out_shardings)",
        )  # fmt: skip


def optimizer_replicated(case: Case) -> Iterator[Finding]:
    """Optimizer state that is split less than the parameter it belongs to, or in another way."""
    facts = case.facts
    if facts is None or facts.program is None:
        return
    whole, other, names, crossed = 0.0, 0.0, [], []
    for leaf, argument in enumerate(facts.program.arguments):
        if argument.role != "optimizer" or argument.follows is None:
            continue
        moment, parameter = facts.argument(leaf), facts.argument(argument.follows)
        if moment is None or parameter is None or moment.shape != parameter.shape:
            continue
        ours, theirs = facts.pieces(moment), facts.pieces(parameter)
        if ours < theirs:
            whole += moment.bytes * (1 - ours / theirs)
            names.append((moment.bytes, argument.path))
        elif ours == theirs and moment.spec != parameter.spec:
            other += moment.bytes
            crossed.append((moment.bytes, argument.path))
    if whole > SMALL * case.peak:
        yield Finding(
            "optimizer_replicated", "warning", "", whole,
            f"optimizer state is split less than its parameters: {size(whole)} of memory on each device that another "
            f"holds as well ({_largest(names)})",
            "give each moment the sharding of its parameter",
        )  # fmt: skip
    if other > SMALL * case.peak:
        yield Finding(
            "optimizer_crossed", "warning", "", other,
            f"optimizer state is split along other dimensions than its parameters, so that every step re-shards "
            f"{size(other)} ({_largest(crossed)})",
            "give each moment the sharding of its parameter",
        )  # fmt: skip


def left_replicated(case: Case) -> Iterator[Finding]:
    """One large parameter whole on every device while most of the others are split."""
    facts = case.facts
    if facts is None or facts.program is None:
        return
    held = [(facts.argument(i), a) for i, a in enumerate(facts.program.arguments) if a.role == "parameter"]
    held = [(v, a) for v, a in held if v is not None]
    total = sum(a.nbytes for _, a in held) or 1
    if sum(a.nbytes for v, a in held if facts.pieces(v) > 1) < 0.5 * total:
        return  # whole parameters are the plan here (data parallel), not an oversight
    state = sum(_state_bytes(facts, facts.program, i) for i in range(len(facts.program.arguments))) or 1.0
    whole = []
    for leaf, argument in enumerate(facts.program.arguments):
        value = facts.argument(leaf)
        if argument.role != "parameter" or value is None or facts.pieces(value) > 1:
            continue
        local = value.bytes + _followers(facts, facts.program, leaf)
        if local > SMALL * state and local > SMALL * case.peak:
            whole.append((local, f"{argument.path} {list(argument.shape)}"))
    if whole:
        total = sum(local for local, _ in whole)
        yield Finding(
            "left_replicated", "warning", "", total,
            f"{_largest(whole)} whole on every device, while most parameters are split: {size(total)} with optimizer "
            f"state, {total / state:.0%} of the state that a device holds",
            "give it a sharding; its optimizer state follows",
        )  # fmt: skip


def _followers(facts: Facts, program: Program, leaf: int) -> float:
    """Bytes of the optimizer state of a parameter that is whole on every device too."""
    following = [i for i, a in enumerate(program.arguments) if a.follows == leaf]
    values = [v for v in map(facts.argument, following) if v is not None and facts.pieces(v) == 1]
    return sum(v.bytes for v in values)


def _state_bytes(facts: Facts, program: Program, leaf: int) -> float:
    value = facts.argument(leaf)
    return value.bytes if value is not None and program.arguments[leaf].role in ("parameter", "optimizer") else 0.0


def _largest(named: list[tuple[float, str]], count: int = 2) -> str:
    top = [name for _, name in sorted(named, reverse=True)[:count]]
    more = len(named) - len(top)
    return ", ".join(top) + (f" and {more} more" if more else "")
