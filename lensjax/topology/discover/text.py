"""The error that every parser raises: which line of which text, what was found and what was expected there."""

from __future__ import annotations

import re

from lensjax._errors import ClusterError

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def clean(text: str) -> str:
    """A text as the tool printed it: without the colours of a terminal, a byte order mark, the returns of another
    system. Lines keep their numbers.
    """
    return _ANSI.sub("", text.removeprefix("\ufeff")).replace("\r\n", "\n")


def bad(source: str, line: int, found: str, expected: str) -> ClusterError:
    """A ClusterError for line `line` (1-based) of a text from `source`."""
    shown = found.strip()
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ClusterError(f"{source}, line {line}: {shown!r}", hint=f"expected {expected}")


def cut_off(source: str, lines: int, what: str) -> ClusterError:
    """A ClusterError for a text that ends too early."""
    return ClusterError(f"{source} ends at line {lines} before {what}", hint="is the text cut off?")
