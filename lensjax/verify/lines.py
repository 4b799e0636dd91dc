"""Which line of user code an instruction came from.

XLA keeps JAX's stack frames on most instructions and loses them on some that it makes itself (a reduce-scatter made of
an all-reduce and a slice): those take the line of what they read, else of what reads them.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterable

from lensjax.verify.hlo import Computation, Frame, Instruction, Module

_REACH = 6  # steps to look around an instruction without a line; farther ones come from something else


def origin(module: Module, computation: Computation, instruction: Instruction) -> tuple[str, tuple[Frame, ...]]:
    """(op_name, Python frames innermost first) of an instruction, or of its nearest neighbour that has them."""
    if stack := module.stack(instruction):
        return instruction.op_name, stack
    for around in (computation.operands, lambda i: computation.users.get(i.name, ())):
        seen, ring = {instruction.name}, [instruction]
        for _ in range(_REACH):
            ring = [n for i in ring for n in around(i) if n.name not in seen and not seen.add(n.name)]
            for near in ring:
                if stack := module.stack(near):
                    return instruction.op_name or near.op_name, stack
    caller = module.callers.get(computation.name)
    if caller is not None and caller.opcode == "fusion":
        return origin(module, module.computations[caller.computation], caller)
    return instruction.op_name, ()


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODELS = os.path.join(_HERE, "models") + os.sep  # the built-in targets stand for user code


@functools.cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(p for p in (paths.get("purelib"), paths.get("platlib"), paths.get("stdlib")) if p)


def user_frame(stack: Iterable[Frame]) -> Frame | None:
    """The innermost frame outside of installed packages, else the innermost outside of this one, else None."""
    frames = [f for f in stack if f.file.startswith(_MODELS) or not f.file.startswith(_HERE)]
    return next((f for f in frames if not _is_library(f.file)), frames[0] if frames else None)


def _is_library(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith((*_library_roots(), "<"))


def where(stack: Iterable[Frame]) -> str:
    """The line as text ("file.py:12 in loss"), or "" where no line is known."""
    frame = user_frame(stack)
    return str(frame) if frame else ""
