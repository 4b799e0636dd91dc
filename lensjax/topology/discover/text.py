"""The error that every parser raises: which line of which text, what was found and what was expected there."""

from __future__ import annotations

from lensjax._errors import ClusterError


def bad(source: str, line: int, found: str, expected: str) -> ClusterError:
    """A ClusterError for line `line` (1-based) of a text from `source`."""
    shown = found.strip()
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ClusterError(f"{source}, line {line}: {shown!r}", hint=f"expected {expected}")


def cut_off(source: str, lines: int, what: str) -> ClusterError:
    """A ClusterError for a text that ends too early."""
    return ClusterError(f"{source} ends at line {lines} before {what}", hint="is the text cut off?")
