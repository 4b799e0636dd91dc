"""Numbers with units: read from cluster files ("450 GB/s", "400 Gbit/s", "1.9 us"), written in reports.

Code and files written by lensjax hold SI values only (bytes, seconds, bytes/second, FLOP/second). Cluster files
written by people may use units, because a datasheet is then copied, not converted.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from lensjax._errors import ClusterError

MOST = 1e30  # more than any machine has

# Fractions, so that "1.9 us" is the float 1.9e-6 and not a neighbour of it.
_PREFIX = {p: Fraction(1000**i) for i, p in enumerate(("", "k", "M", "G", "T", "P"))} | {"K": Fraction(1000)}
_BINARY = {p: Fraction(1024**i) for i, p in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)}
_TIME = {"s": Fraction(1)} | {p: Fraction(1, 1000**i) for p, i in (("ms", 1), ("us", 2), ("µs", 2), ("ns", 3))}
_NUMBER = re.compile(r"^\s*([-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?)\s*(\S.*)?$")
_SIZE = re.compile(r"^(Ki|Mi|Gi|Ti|[kKMGTP]?)(B|bit|b|FLOP|OP)$")

# What a quantity may be written in. The base unit of each is what the number means without a unit.
_KINDS = {"bytes": "80 GB, 80 GiB", "bytes/s": "450 GB/s, 400 Gbit/s", "seconds": "1.9 us", "flops": "989 TFLOP/s"}


def parse(value: object, kind: str, where: str) -> float:
    """The SI value of `value` (a number, or text with a unit); `kind` is bytes, bytes/s, seconds or flops.

    Raises ClusterError naming `where` when the text is no number or its unit is of another kind.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong(value, kind, where)
    if isinstance(value, int | float):
        return _checked(float(value) if abs(value) <= MOST else math.inf, value, kind, where)
    match = _NUMBER.match(value)
    if not match:
        raise _wrong(value, kind, where)
    number, unit = Fraction(match[1].replace("_", "")), (match[2] or "").strip()
    scale = Fraction(1) if not unit else _scale(unit, kind)
    if scale is None:
        raise _wrong(value, kind, where)
    if number > MOST:  # a Fraction may be too large for a float
        raise _wrong(value, kind, where)
    return _checked(float(number * scale), value, kind, where)


def _scale(unit: str, kind: str) -> Fraction | None:
    if kind == "seconds":
        return _TIME.get(unit)
    if kind != "bytes":
        if unit.endswith("/s"):
            unit = unit[:-2]
        elif unit.endswith("ps"):  # GBps, Gbps
            unit = unit[:-2]
        else:
            return None
    match = _SIZE.match(unit)
    if not match:
        return None
    scale = _BINARY.get(match[1]) or _PREFIX[match[1]]
    if kind == "flops":
        return scale if match[2] in ("FLOP", "OP") else None
    if kind == "bytes" and match[2] != "B":  # "80 Gb" of memory is a slip, not 10 GB
        return None
    return {"B": scale, "bit": scale / 8, "b": scale / 8}.get(match[2])


def _checked(number: float, value: object, kind: str, where: str) -> float:
    if not 0 <= number < float("inf"):
        raise _wrong(value, kind, where)
    return number


def _wrong(value: object, kind: str, where: str) -> ClusterError:
    return ClusterError(
        f"{where}: {value!r} is not a quantity of {kind}", hint=f"write a number or, e.g., {_KINDS[kind]}"
    )


def pretty(value: float | None, unit: str) -> str:
    """A short text for people: pretty(4.5e11, "B/s") == "450 GB/s"; seconds go down to ns; None is a dash."""
    if value is None:
        return "-"
    if unit == "s":
        for suffix, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
            if value >= scale:
                return f"{value / scale:.3g} {suffix}"
        return f"{value / 1e-9:.3g} ns"
    for prefix in ("P", "T", "G", "M", "k"):
        if value >= _PREFIX[prefix] * 0.9995:
            return f"{value / _PREFIX[prefix]:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
