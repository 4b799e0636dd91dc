"""HLO text to data, as XLA of jax 0.10 to 0.12 prints it. What cannot be read is kept and counted, never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lensjax._errors import LensjaxError
from lensjax.verify.hlo.module import Computation, Frame, Instruction, Module
from lensjax.verify.hlo.text import closing, names

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_ARRAY = re.compile(r"[a-z]\w*\[[^\]]*\](?:\{[^}]*\})?")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NO_OPERANDS = ("constant", "parameter", "iota", "partition-id", "replica-id")
_MAX_JOINED = 10_000  # lines of one instruction; literals of constants may be long


class NotHlo(LensjaxError, ValueError):
    """Text that is no HLO module."""

    code = "not_hlo"


def parse_hlo(text: str) -> Module:
    """A Module from the text of `compiled.as_text()`. Raises NotHlo when there is no entry computation."""
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith("HloModule")), "")
    computations: dict[str, Computation] = {}
    unread: list[str] = []
    entry = ""
    for name, is_entry, body in _blocks(lines):
        instructions = tuple(_instructions(body, name, unread))
        computations[name] = Computation(name, instructions, is_entry)
        entry = name if is_entry else entry
    if not entry:
        raise NotHlo("no ENTRY computation in this text", hint="pass the text of compiled.as_text(), whole")
    partitions, replicas = _count(header, "num_partitions"), _count(header, "replica_count")
    return Module(
        name=[*header.split(), "", ""][1].rstrip(","),
        computations=computations,
        entry_name=entry,
        devices=partitions * replicas,
        header=header,
        frames=_frames(lines),
        scheduled="is_scheduled=true" in header,
        unread=tuple(unread),
    )


def _count(header: str, key: str) -> int:
    found = re.search(rf"{key}=(\d+)", header)
    return int(found.group(1)) if found else 1


def _blocks(lines: list[str]) -> Iterator[tuple[str, bool, list[str]]]:
    """(name, is entry, lines) of each computation; the braces of a computation stand at the margin."""
    name, is_entry, body = "", False, None
    for line in lines:
        if body is None:
            if line[:1] in ("", " ", "}") or line.startswith("HloModule"):
                continue
            if found := _COMPUTATION.match(line):
                name, is_entry, body = found.group(2), bool(found.group(1)), []
        elif line.startswith("}"):
            yield name, is_entry, body
            body = None
        else:
            body.append(line)


def _instructions(body: list[str], computation: str, unread: list[str]) -> Iterator[Instruction]:
    at = 0
    while at < len(body):
        text, at = body[at], at + 1
        if not text.strip() or text.lstrip().startswith("//"):
            continue
        made = _instruction(text, computation)
        joined = 0
        while made is None and at < len(body) and joined < _MAX_JOINED and not _INSTRUCTION.match(body[at]):
            text, at, joined = text + "\n" + body[at], at + 1, joined + 1
            if body[at - 1].rstrip().endswith((")", "}", "]")) or ")," in body[at - 1]:
                made = _instruction(text, computation)
        if made is None:
            unread.append(text.strip()[:300])
        else:
            yield made


def _instruction(text: str, computation: str) -> Instruction | None:
    """One instruction, or None when the text is not a whole one."""
    head = _INSTRUCTION.match(text)
    if head is None:
        return None
    end = _shape_end(text, head.end())
    opcode = _OPCODE.match(text, end) if end > 0 else None
    if opcode is None:
        return None
    close = closing(text, opcode.end() - 1)
    if close < 0:
        return None
    inside = text[opcode.end() : close]
    kind = opcode.group(1)
    return Instruction(
        name=head.group(2),
        opcode=kind,
        shape_text=text[head.end() : end],
        operands=() if kind in _NO_OPERANDS else names(inside),
        literal=inside,
        tail=text[close + 1 :].lstrip(", "),
        computation=computation,
        root=bool(head.group(1)),
    )


def _shape_end(text: str, start: int) -> int:
    if text[start : start + 1] == "(":
        end = closing(text, start)
        return end + 1 if end > 0 else -1
    found = _ARRAY.match(text, start)
    return found.end() if found else -1


def _frames(lines: list[str]) -> dict[int, tuple[Frame, ...]]:
    """The tables FileNames, FunctionNames, FileLocations and StackFrames, as id -> frames, innermost first."""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] | None = None
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif current is not None and (found := re.match(r"(\d+) (.*)$", line)):
            current[int(found.group(1))] = found.group(2)
        elif line.startswith(("%", "ENTRY")):
            break
    locations = {k: _fields(v) for k, v in tables.get("FileLocations", {}).items()}
    stacks = {k: _fields(v) for k, v in tables.get("StackFrames", {}).items()}
    return {k: _chain(k, stacks, locations, tables) for k in stacks}


def _fields(text: str) -> dict[str, int]:
    return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", text)}


def _chain(start: int, stacks: dict, locations: dict, tables: dict) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    at = start
    for _ in range(200):  # deeper than any Python stack that XLA keeps; a cycle in a damaged text ends too
        if at not in stacks:
            break
        place = locations.get(stacks[at].get("file_location_id", 0), {})
        file = tables.get("FileNames", {}).get(place.get("file_name_id", 0), "").strip('"')
        function = tables.get("FunctionNames", {}).get(place.get("function_name_id", 0), "").strip('"')
        frames.append(Frame(file, function, place.get("line", 0)))
        parent = stacks[at].get("parent_frame_id", 0)
        if parent == at:
            break
        at = parent
    return tuple(frames)
