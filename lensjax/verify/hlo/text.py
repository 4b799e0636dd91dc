"""Finding one's way in HLO text: the end of a bracket, the value of an attribute. Quotes hide brackets."""

from __future__ import annotations

import re

_OPEN = {"(": ")", "{": "}", "[": "]"}
_MARKS = re.compile(r'["(){}\[\]]')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, or -1 when the text ends before."""
    depth, at = 0, start
    while (found := _MARKS.search(text, at)) is not None:
        mark, at = found.group(), found.end()
        if mark == '"':
            quoted = _QUOTED.match(text, found.start())
            if quoted is None:
                return -1
            at = quoted.end()
        elif mark in _OPEN:
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return found.start()
    return -1


def attribute(text: str, key: str) -> str | None:
    """The value of `key=` in a list of attributes, without its outer braces or quotes; None when absent.

    Values that go on after a bracket ("[4,2]<=[8]T(1,0)") are cut at the next comma outside of brackets.
    """
    found = re.search(rf"(?:^|[\s,{{]){re.escape(key)}=", text)
    if found is None:
        return None
    start = found.end()
    if start >= len(text):
        return ""
    if text[start] == "{":
        end = closing(text, start)
        return text[start + 1 : end] if end > 0 else text[start + 1 :]
    if text[start] == '"':
        quoted = _QUOTED.match(text, start)
        return quoted.group()[1:-1] if quoted else text[start + 1 :]
    return _bare(text, start)


def _bare(text: str, start: int) -> str:
    at = start
    while at < len(text) and text[at] not in ",\n":
        if text[at] in _OPEN:
            end = closing(text, at)
            if end < 0:
                return text[start:]
            at = end
        at += 1
    return text[start:at].strip()


def names(text: str) -> tuple[str, ...]:
    """Names of instructions in a list of operands, with or without `%` and shapes before them."""
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+)", text))
    parts = re.sub(r"/\*.*?\*/", "", text).split(",")
    return tuple(p.split()[-1] for p in parts if p.split() and re.fullmatch(r"[\w.\-]+", p.split()[-1]))
