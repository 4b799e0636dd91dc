"""The preset grammar: `"fsdp"`, `"dp=2,fsdp=4"`, outermost tier first.

    plan  := term ("," term)*
    term  := name | name "=" integer | name "=" ("once" | "again")      (the last for fsdp, as in "fsdp:once")

Names: dp zero1 fsdp hsdp tp tp_sp ep. The missing factor goes to `dp`, and the product must equal the devices.
"""

from __future__ import annotations

import dataclasses
import math
import re

from lensjax._errors import PlanError

NAMES = ("dp", "zero1", "fsdp", "hsdp", "tp", "tp_sp", "ep")

# The mesh axes that presets make (hsdp splits over "fsdp", tp_sp over "tp").
AXES = ("dp", "zero1", "fsdp", "tp", "ep")


@dataclasses.dataclass(frozen=True)
class Term:
    """One preset over `size` devices. `gather` is how fsdp gathers weights (None for the others)."""

    name: str
    size: int
    gather: str | None = None


def parse(text: str, devices: int) -> tuple[Term, ...]:
    """The terms of a preset string for a number of devices, outermost first; their sizes multiply to `devices`.

    `fsdp:once` / `fsdp:again` choose how weights are gathered (default: again). A single name without a size takes all
    devices. Raises PlanError.
    """
    return _fill(read(text), devices, text)


def read(text: str) -> list[tuple[str, int | None, str | None]]:
    """(name, size, gather) of each term as written: what can be said without the devices. Raises PlanError."""
    terms: list[tuple[str, int | None, str | None]] = []
    for part in text.split(","):
        m = re.fullmatch(r"\s*([a-z0-9_]+)(?::(once|again))?\s*(?:=\s*(\d+))?\s*", part)
        if not m or m[1] not in NAMES:
            found = f"the plan {text!r}" if part == text else f"{part.strip()!r} in the plan {text!r}"
            raise PlanError(
                f"{found} is not a preset",
                hint="write names joined by commas, each with an optional size, as in 'dp=2,fsdp=4'; names: "
                + " ".join(NAMES),
            )
        if m[2] and m[1] not in ("fsdp", "hsdp"):
            raise PlanError(f"{part.strip()!r}: only fsdp and hsdp gather weights, ':{m[2]}' does not apply to {m[1]}")
        terms.append((m[1], int(m[3]) if m[3] else None, m[2]))
    names = [n for n, _, _ in terms]
    if len(set(names)) != len(names):
        raise PlanError(f"a preset stands twice in {text!r}", hint="each name may stand once")
    if any(s == 0 for _, s, _ in terms):
        raise PlanError(f"a size of 0 in {text!r}")
    return terms


def _fill(terms: list[tuple[str, int | None, str | None]], devices: int, text: str) -> tuple[Term, ...]:
    known = math.prod(s for _, s, _ in terms if s is not None)
    open_ = [i for i, (_, s, _) in enumerate(terms) if s is None]
    if len(open_) > 1:
        raise PlanError(f"{text!r} leaves the size of more than one preset open", hint="give all sizes but one")
    if devices % known:
        raise PlanError(
            f"{text!r} asks for a multiple of {known} devices; there are {devices}",
            hint=f"sizes must multiply to a divisor of {devices}",
        )
    rest = devices // known
    if open_:
        name, _, gather = terms[open_[0]]
        terms[open_[0]] = (name, rest, gather)
    elif rest > 1:
        if any(n == "dp" for n, _, _ in terms):
            raise PlanError(
                f"{text!r} is for {known} devices; there are {devices}",
                hint="leave the size of dp out, and it takes the rest",
            )
        terms.insert(0, ("dp", rest, None))
    return tuple(Term(n, s or 1, (g or "again") if n in ("fsdp", "hsdp") else None) for n, s, g in terms)


def is_file(value: object) -> bool:
    """Whether a `plan=` value names a plan file rather than a preset."""
    return isinstance(value, str) and value.endswith(".json")
